"""Tracing rules of what networks are made of: layers, losses, optimizers."""
