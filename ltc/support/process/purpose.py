"""A process knows what it was started for."""

only_compiles = False  # True in one that compiles behind a training, and runs nothing else
