"""The default backend: a graph to one native program.

backend, schedule             its passes and parts; kernels in order
liveness, narrow_scratch, one_shot_buffers, plan   where each value lies and how long
saved_program                 the plan on disk
executable, scalar_arguments, workspace, output_pool, prefault   a launch and its memory
checked_steps, observed       launches that LTC_CHECK and LTC_VERIFY look at
launch_queue, explain         launches ahead of Python; every stage as text
"""
