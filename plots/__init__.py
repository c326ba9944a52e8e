"""Figures, drawn from HDF5 results alone."""
