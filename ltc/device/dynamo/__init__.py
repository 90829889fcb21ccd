"""torch.compile on ltc: Dynamo traces the user's code, and its graphs are recorded like other calls.

graph_backend  the backend "ltc", which records a graph, and runs graphs inside it as code
introduction   what Dynamo is told as soon as it is imported, never before: code that it must not
               trace, steps of optimizers, the default backend, weights of exported programs
"""
