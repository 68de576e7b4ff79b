"""Exports and imports weights: folders of Hugging Face's transformers, files of llm.c."""
