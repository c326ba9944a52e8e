"""The parts of `exp_fan_out`."""
