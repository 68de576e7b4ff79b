"""Measures a model: its loss on held-out text, and its answers to tasks."""
