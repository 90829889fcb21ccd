"""`torch.distributed` on lazy tensors: traced into the step, through shared memory, or on the host."""
