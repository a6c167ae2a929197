"""How well each algorithm learns from the same number of rollouts."""
