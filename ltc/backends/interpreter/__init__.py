"""Recorded calls run one by one on PyTorch's own CPU kernels: no graph, no compiler.

recorded_call.py runs one call on its kernel, by_rule.py as its rule says, interpreted.py those of a
recording in order; call_facts.py tells what each does, view_chains.py views of what is not contiguous.
"""
