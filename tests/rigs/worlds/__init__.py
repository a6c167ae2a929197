"""Environments of the tests' own, and servers of such."""
