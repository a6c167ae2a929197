"""Several processes that are one worker: rank 0, which the plan starts, and the others, which rank
0 starts itself.
"""
