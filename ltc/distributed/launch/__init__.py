"""Processes of `spawn`: the parent, the child, the call between them, and who notices a death."""
