"""LoRA: adapters beside frozen weights (docs/lora.md).

tables  the GEMMs that have adapters, the adapters' rows, the memory beside them, weights with adapters added
bind    a model's weights with adapters, the operations that read them; `cuda`: the GEMMs added to others on NVIDIA GPUs
"""
