"""Plug-ins for the programs that train on ltc: none of them is needed, none is imported unasked.

plug_ins loads what a package needs once a program imports it; `accelerate` and `lightning` are
what a program imports itself, in place of a variable. docs/integrations.md has an example of each.
"""
