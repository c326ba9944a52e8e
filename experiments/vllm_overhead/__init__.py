"""The parts of `exp_vllm_overhead`."""
