"""Compiled graphs at run time: compile, program_cache, partition, program, executor, buffers."""
