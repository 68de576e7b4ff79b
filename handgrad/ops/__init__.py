"""The contract of an operation. A backend is a module of functions that keep it; `reference` is the specification.

- Outputs first, then inputs, then keyword-only scalars. Shapes come from the tensors.
- An operation fills the buffers it is given. (The reference's temporaries inside one call are its only allocations.)
- A parameter gradient is added into: `*_acc`. An activation gradient is overwritten: `d*`. What is changed in place
  says so: `*_inout`. No buffer ever holds what its name denies.
- `x_forward` and `x_backward` stand side by side, headed by their equation.
- Parameters and activations share one dtype (float32, bfloat16; float64 in tests). Statistics (`mean`, `rstd`, `lse`,
  `losses`) and gradient accumulators are float32, or float64 where the activations are.

One alphabet for the whole repository:

    B batch     T position      N = B T tokens      C channels      F feed-forward width
    H heads     D head width    V vocabulary        Vp padded vocabulary        L layers
"""
