"""Weights and tokenizers of other programs."""
