"""LoRA: adapters beside frozen weights (docs/lora.md).

tables     the GEMMs that have adapters, the adapters' rows, the memory beside them
reference  the operations that add into a GEMM's output, in plain torch; `cuda`: on NVIDIA GPUs
products   the adapters' GEMMs, added to their weights'
bind       the operations of a model whose weights have adapters
merge      weights with their adapters added
"""
