"""The protocol of the weight plane, without sockets."""
