"""Tests of the weight plane."""
