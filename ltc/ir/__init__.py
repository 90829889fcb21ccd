"""The graph language: what every later stage reads and writes.  In the order of use:

tensor_type, ops, infer   what a node's result is, the closed set of operations, their type rules
node, build, graph        nodes, the functions that make them, and those reachable from outputs, named
loop_nest and its kin     a fused group of nodes as loops, and its text
collective, one_shot, extern_call   exchanges between replicas; calls of torch's own kernels
json_codec                          written to disk
"""
