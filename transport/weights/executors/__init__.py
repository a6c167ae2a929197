"""The ways in which bytes of weights move: in one process, in shared memory, in a GPU's memory."""
