"""The protocol between writers and readers of weights: messages and state machines, no sockets."""
