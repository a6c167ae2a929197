"""Graphs that are drawn and run, each against the same graph on one rank."""
