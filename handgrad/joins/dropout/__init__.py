"""Dropout, beside the plain path: `bind` makes of a backend one that drops numbers where GPT-2 does in training.
`reference` and `cuda` have the operations that it binds in; `masks` says which numbers they drop."""
