"""The rules by which rows go through a graph: pure, without tensors and sockets; a run and its
simulation share them.
"""
