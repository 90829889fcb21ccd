"""How replicas exchange, from memory upwards.

private_folder, bootstrap                     how processes find each other
shm_segment, symmetric_memory, status_board   memory they share
wire, thread_wire, inter_host                 messages: read in shared memory, threads, hosts
collective_schedule, folds, collective_ops, inter_host_choice   collectives made of messages
communicator, session, progress_thread        who calls them, and beside which program
"""
