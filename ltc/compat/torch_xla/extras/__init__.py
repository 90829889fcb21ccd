"""What torch_xla has beside training: operations built by hand, boxes, and two runs compared."""
