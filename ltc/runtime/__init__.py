"""Compiled graphs at run time: compile, program_cache, partition, graph_compiler, program, executor, buffers."""
