"""Agents as programs: the run's generator answers the programs' calls of a model."""
