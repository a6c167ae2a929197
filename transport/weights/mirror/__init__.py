"""One reader of a host takes versions in over the network, and offers them to its neighbours in
shared memory.
"""
