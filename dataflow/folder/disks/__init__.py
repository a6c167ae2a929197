"""A run whose hosts have no folder in common: each has one of its own, and what others need of it
is fetched.
"""
