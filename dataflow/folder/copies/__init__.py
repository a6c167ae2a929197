"""Copies of a run's checkpoints at an address of its own, and the way back from there to a run
folder.
"""
