"""A run's configuration, presets and recipes, and the ranges of its values."""
