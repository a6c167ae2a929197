"""Agents that nobody rewrites: programs whose calls of a model are answered by the generator of a
run.
"""
