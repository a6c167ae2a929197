"""Rollouts between two processes: how many per second, how long a single one takes."""
