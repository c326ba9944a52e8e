"""What a server keeps: segments, leases, links and the room they take. Pure state, no I/O."""
