"""`ltc.compile`: a step function that was recorded twice alike is replayed, and not traced again.

Every tensor that a call can reach is an input: the same object as before, or one of its kind where it is
an argument, with the memory that it lies in and the value that it has now.  Numbers of optimizers and
arguments are handed over.  All else is constant, and compared where that is cheap.

In the order in which a call meets them:
compiled_step       the function that users call: replays, records, or refuses
reachable           everything that a call can reach
contents            the tables, items and attributes in which objects hold others
guard               what was found there, as conditions of a generated function
aliases             which tensors share memory, and how
traced_float        numbers that say what was computed from them
counters            step counts that optimizers keep on the CPU, which do so too
observation         the outcome of one recorded call: its program, where its inputs came from, the
                    form of its result, and the holders of its results
handed_over         which of the program's numbers follow from an argument, a learning rate, a step
replay_plan         the guard, the launch, and the results
"""
