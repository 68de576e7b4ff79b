"""The contract of an operation. A backend is a module of functions that meet it; `reference` is the specification.

- Outputs first, then inputs, then keyword-only scalars. Shapes come from the tensors.
- An operation fills buffers that the caller passes. A kernel's workspace is `scratch`, a uint8 buffer of at least
  `scratch_bytes(...)`; its contents mean nothing between operations. CPU operations take no scratch: they allocate
  temporaries inside a call, and cache the cosines per sequence length.
- An operation adds parameter gradients into `*_acc`, overwrites activation gradients `d*`, and changes `*_inout` in place.
  A buffer's name always tells its contents.
- `x_forward` and `x_backward` stand side by side under their equation. A fused operation is a composition of two that
  `reference` already has, and the tests compare it with that composition.
- Parameters and activations share one dtype (float32, bfloat16, float16; float64 in tests). Statistics (`mean`, `rstd`,
  `lse`, `losses`) and gradient accumulators are float32, or float64 if the activations are.
- Two device buffers hold the numbers that change every step: the host writes `controls` (learning rate, step number,
  limits, tokens), the step writes `results` (loss, norm, verdict). So a step can be replayed without the host.

One alphabet for the whole repository:

    B batch     T position      N = B T tokens      C channels      F feed-forward width
    H heads     D head width    V vocabulary        Vp padded vocabulary        L layers
    K heads of keys and values, if fewer than the query heads
    Y X rows and columns of a picture    J side of a convolution's kernel    Q groups of channels    Z latent channels
"""

from dataclasses import dataclass

# Every backend has these operations, with the same arguments. `reference` specifies them.
OPERATIONS = (
    *("embedding_forward", "embedding_backward", "token_embedding_forward", "token_embedding_backward"),
    *("layernorm_forward", "layernorm_backward"),
    *("rmsnorm_forward", "rmsnorm_backward"),
    *("rotary_forward", "rotary_backward", "qk_norm_forward", "qk_norm_backward"),
    *("qk_norm_rotary_forward", "qk_norm_rotary_backward"),
    *("gained_qk_norm_rotary_forward", "gained_qk_norm_rotary_backward"),
    *("swiglu_forward", "swiglu_backward", "linear_swiglu_forward", "swiglu_linear_backward"),
    *("geglu_forward", "geglu_backward"),
    *("mix_rmsnorm_forward", "mix_rmsnorm_backward", "value_embedding_forward", "value_embedding_backward"),
    *("relu2_forward", "relu2_backward", "linear_relu2_forward", "relu2_linear_backward"),
    *("attention_forward", "attention_backward"),
    *("linear_forward", "linear_backward", "linear_residual_forward", "linear_gelu_forward", "gelu_linear_backward"),
    *("bias_backward", "gelu_forward", "gelu_backward", "residual_forward"),  # also GEMM epilogues
    *("classifier_forward", "classifier_forward_backward", "distill_forward_backward", "softcap_forward"),
    *("loss_sum", "squared_norms", "verdict", "adamw_update"),
    *("muon_momentum", "muon_polar", "muon_update"),
    *("tree_sum", "checksum", "digest"),  # over lanes and ranks
    *("layernorm_linear_forward", "layernorm_linear_gelu_forward"),  # norm, then GEMM; generation fuses them in one kernel
    *("rmsnorm_linear_forward", "rmsnorm_linear_relu2_forward", "rmsnorm_linear_swiglu_forward"),
    *("mix_rmsnorm_linear_forward", "store_keys_values"),
)

# Operations on pictures.
PICTURE_OPERATIONS = (
    *("pixels_forward", "squared_error_forward", "squared_error_forward_backward"),
    *("conv_forward", "conv_backward", "transposed_conv_forward", "transposed_conv_backward"),
    *("groupnorm_forward", "groupnorm_backward", "silu_forward", "silu_backward"),
    *("fsq_forward", "fsq_backward", "fsq_round", "fsq_values", "vq_forward", "vq_backward", "vq_values", "vq_update"),
)

# Generation takes one token per sequence at a time; its operations are in the backend's module `decode`.
DECODE_OPERATIONS = (
    *("embedding_decode", "token_embedding_decode", "attention_decode", "choose_tokens", "advance"),
    *("rotary_forward", "qk_norm_forward", "qk_norm_rotary_forward", "rmsnorm_forward", "softcap_forward"),
    *("layernorm_linear_forward", "layernorm_linear_gelu_forward", "linear_residual_forward"),
    *("attention_linear_residual_forward", "store_keys_values_at", "attention_append"),
    *("gained_qk_norm_rotary_forward", "mix_rmsnorm_linear_forward", "value_embedding_decode"),
    *("rmsnorm_linear_forward", "rmsnorm_linear_relu2_forward", "rmsnorm_linear_swiglu_forward"),
    *("linear_forward", "linear_swiglu_forward", "residual_forward", "geglu_forward"),
)

# Every backend also has these functions, which set-up calls.
SET_UP = ("versions", "check_sizes", "scratch_bytes", "attention_scratch_bytes", "muon_scratch_bytes", "compile_ahead")


@dataclass(frozen=True)
class Backend:
    """The capabilities of a backend, for callers that must choose: `BACKEND` in its module."""

    name: str  # reference, cpu or cuda
    capturable: bool = False  # a CUDA graph can capture every operation of a step
    tf32: bool = False  # float32 GEMMs round their operands to TF32


# Indices into `controls` (float64): the host's decisions for a step.
CONTROL_STEP, CONTROL_LEARNING_RATE, CONTROL_LOSS_LIMIT, CONTROL_NORM_LIMIT, CONTROL_TOKENS = range(5)
CONTROLS = 5

# Indices into `results` (float64): what a step computed. `scale` multiplies the gradient in the update.
RESULT_LOSS, RESULT_NORM, RESULT_SCALE, RESULT_VERDICT, RESULT_LOSS_SCALE = range(5)
RESULTS = 5

# Independent sums of a digest, and elements per row; the elements of a row share its key.
DIGEST_SUMS, DIGEST_COLUMNS = 2, 4096

# Verdicts. Only UPDATE lets the optimizer change the weights.
UPDATE, LOSS_NOT_FINITE, NORM_NOT_FINITE, LOSS_OUTLIER, NORM_OUTLIER = range(5)

# Dynamic loss scaling (Micikevicius et al. 2018): a gradient overflow halves the scale, this many good steps double it.
LOSS_SCALE_GROWTH_STEPS = 2000
LARGEST_LOSS_SCALE, SMALLEST_LOSS_SCALE = 2.0**24, 1.0
