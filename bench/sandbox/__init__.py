"""Hostile programs in the sandbox, and what a sandbox costs."""
