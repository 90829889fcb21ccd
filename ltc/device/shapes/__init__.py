"""Types of results without running the call: torch's Meta kernels, and what they get wrong."""
