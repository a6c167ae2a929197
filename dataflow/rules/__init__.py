"""By which rules rows go through a graph: pure, without tensors and sockets; a run and its
simulation share them.
"""
