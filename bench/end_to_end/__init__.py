"""Whole training loops: rollouts per second and seconds to an accuracy, ours and others."""
