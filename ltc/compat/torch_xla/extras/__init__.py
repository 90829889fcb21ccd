"""Parts of torch_xla beside training: operations built by hand, boxes, and two runs compared."""
