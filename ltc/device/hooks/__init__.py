"""What torch's own Python code expects of a device: names, streams, generators, autocast, checks."""
