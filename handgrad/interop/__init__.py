"""Weights to other programs and back: folders of Hugging Face's transformers, files of llm.c."""
