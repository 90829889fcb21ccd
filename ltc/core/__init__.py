"""What a training script imports: `lazy_model` (ltm) and `functions` (collectives with gradients).

lazy_model gathers the names of devices, replicas, training (steps and files) and exchanges.
"""
