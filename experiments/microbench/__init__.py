"""The parts of `exp_microbench`: each measures ours and a reference in turn, in one run."""
