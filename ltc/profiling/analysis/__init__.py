"""What the tables of a trace say: where the time went, what bounded it, what is to be mended."""
