"""Which worker runs what, on which devices, over which transports: pure functions of graph and
devices.
"""
