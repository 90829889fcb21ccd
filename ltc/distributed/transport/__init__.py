"""How replicas exchange, from memory upwards.

bootstrap                                     how processes find each other
shm_segment, symmetric_memory, status_board   memory they share
wire, thread_wire, inter_host                 messages: read in shared memory, threads, hosts
collective_schedule, folds, exchange          the steps and messages of one collective
collective_ops, inter_host_choice             every kind of collective
communicator, session, progress_thread        who calls them, and beside which program
"""
