"""Measurements behind the claims: a module each, which prints a table and writes JSON lines."""
