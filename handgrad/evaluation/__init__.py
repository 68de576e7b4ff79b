"""What a model is worth: its loss on held-out text, and the text it writes."""
