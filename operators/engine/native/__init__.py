"""The generator's kernels for CPUs in C, compiled on the machine that runs them: paged attention, a
decoder step.
"""
