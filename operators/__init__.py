"""Operators that know reinforcement learning: declarations here, torch only where a worker builds them."""
