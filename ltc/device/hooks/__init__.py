"""The parts of a device that torch's own Python expects: names, streams, generators, autocast,
checks.
"""
