"""Dropout: `bind` turns a backend into one that drops numbers where GPT-2 does in training.
`reference` and `cuda` have the operations that it binds; `masks` decides which numbers they drop."""
