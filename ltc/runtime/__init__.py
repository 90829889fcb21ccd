"""Compiled graphs at run time: compile, graph_compiler, partition, program, executor, buffers."""
