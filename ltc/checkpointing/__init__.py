"""Files: the safetensors format, nested values, checkpoints of several replicas, resuming."""
