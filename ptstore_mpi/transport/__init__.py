"""Carriers of the protocol. Only this folder and ``job`` touch MPI."""
