"""The protocol without I/O: messages, effects, client generators and the server's handler."""
