"""Tokens per second of one training step, ours and others."""
