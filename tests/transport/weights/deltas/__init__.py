"""Versions as what changed."""
