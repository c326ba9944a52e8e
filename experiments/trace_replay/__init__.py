"""Parts of `exp_trace_replay`: its options, tables, places and the course of one request."""
