"""Exchanges among replicas, from memory upwards.

bootstrap                                     the meeting of processes
shm_segment, symmetric_memory, status_board   memory that they share
tcp_mesh, tcp_link                            connections between hosts
wire, inter_host                              messages: in shared memory, between threads, between hosts
collective_schedule, folds                    the steps and messages of one collective
collective_ops                                every kind of collective
call_log                                      a group's calls, written down so that ranks can be compared
communicator, session, progress_thread        the callers, beside the program
"""
