"""torch.compile on ltc: Dynamo traces the user's code, and its graphs are recorded like other calls.

hidden_code      what Dynamo must not trace: ltc's own code
traced_lines     a graph's code at the lines of the user's that it came from
nested_graphs    graphs inside a graph, which torch would interpret node by node
graph_backend    the backend "ltc", which records a graph
default_backend  what torch.compile does without a backend's name, and with "inductor"
optimizer_steps  steps of optimizers, which are left to Python
saved_exports    weights of exported programs, in files
introduction     Dynamo is told of all this as soon as it is imported, never before
"""
