"""Environments of the tests' own, and servers of such."""

LETTERS = "abcdefghijklm"
"""Of which each is worth 1 where the policy's turn begins with it."""
