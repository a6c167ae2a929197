"""The runtime of `Generator`: which groups start, what becomes of them, which weights they are
drawn from.
"""
