"""Types of results without running the call: formulas, torch's Meta kernels, what these get wrong."""
