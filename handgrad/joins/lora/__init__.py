"""LoRA: adapters on frozen weights (docs/lora.md).

tables  the GEMMs with adapters, the adapters' rows and working memory, merged weights
bind    a model's weights with adapters, the operations that read them; `cuda`: accumulating GEMMs on NVIDIA GPUs
"""
