"""The file tier of a server: slabs, their slots, and I/O in threads. Never calls MPI."""
