"""Versions in memory: writers, readers, and what goes wrong."""
