"""A training step: the resolved design, its memory, the program of launches, feed, schedule and spike detector."""
