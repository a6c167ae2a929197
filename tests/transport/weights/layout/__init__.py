"""Layouts and the copies between them."""
