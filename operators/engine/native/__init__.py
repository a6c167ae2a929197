"""The generator's kernels for CPUs: paged decode attention, in C, compiled on the machine that runs them."""
