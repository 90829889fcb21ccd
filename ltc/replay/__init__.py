"""`ltc.compile`: a step function that was recorded twice alike is replayed, and not traced again.

In the order in which a call meets them:
compiled_step       the function that users call: replays, records, or refuses
reachable           what a call can use: arguments, and what its function closes over; how to see
                    that it is still the same
conditions          what such a thing adds to: expressions that have to stay true
containers          lists, tables, sets, arrays
objects             attributes, classes and their methods
indirect            context variables, weak references, getters
modules             modules, optimizers and the hooks around them
traced_float        numbers that say what was computed from them
aliases             which of its tensors share memory, and how
observation         what one recorded call came to: which program, on what, and who got the results
origins             where its inputs came from
returned            what its result is made of
handed_over         which of the program's numbers follow from an argument, a learning rate, a step
counters            step counts that optimizers keep on the CPU
changed_use         why a call is not like the one before, in words
replay_plan         the guard and the launch, as one generated function
"""
