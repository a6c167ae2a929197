"""Faults: what they cost a run, and whether they break it."""
