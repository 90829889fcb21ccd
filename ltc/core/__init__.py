"""What a training script imports: `lazy_model` (ltm) and `functions` (collectives with gradients)."""
