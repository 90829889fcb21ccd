"""Compiling while the program that asked for it runs on.

compile_behind   requests, and the process that is given them
worker_process   that process: a copy of this one, or a new one
graph_record     what it is given, as data
compile_worker   what it does
core_build_behind  a process that builds the native core
"""
