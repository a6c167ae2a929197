"""Tokens per second of the generator, ours and others."""
