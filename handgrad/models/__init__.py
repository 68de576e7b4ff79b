"""GPT-2 as tables and equations: parameters and activations (what there is), block and transformer (what is computed).

The model knows neither where its memory lies nor who else trains: tensors and the backend are passed in.
"""
