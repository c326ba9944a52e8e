"""Transport `sim`: a whole job in one process, on a virtual clock, with every fault a job can meet.

The handlers, the caches and the client operations are those that run over MPI; what carries them
is replaced. `cluster` is the machines, moved by hand; `simulation` moves them by a seeded schedule
under a `faults` plan; `workloads` say what the clients do, `checkers` what must hold meanwhile.
``python -m ptstore_mpi.sim --help`` runs seeds and replays one with its trace.
"""
