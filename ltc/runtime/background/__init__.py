"""Compiling while the program that asked for it runs on.

compile_behind   requests, and the process that is given them
graph_record     what they are given, as data
compile_worker   what that process does
"""
