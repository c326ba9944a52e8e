"""Carriers of the protocol. Only this folder and ``launch`` touch MPI."""
