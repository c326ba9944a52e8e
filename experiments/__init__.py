"""Experiment drivers: parse, workload from a seed, run, record. They use public names only."""
