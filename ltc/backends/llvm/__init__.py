"""The default backend: a graph to one native program.

backend, schedule             its passes and parts; kernels in order
program_plan, liveness, plan  where each value lies and how long
saved_program                 the plan on disk
resizable                     a program of symbols, filled in for each size
executable, scalar_arguments, workspace, output_pool   a launch and its memory
timed                         launches that tell when each kernel was over, or what it leaves
checked_steps                launches that LTC_CHECK looks at
compiling                     from a graph to a program, and every stage as text
"""
