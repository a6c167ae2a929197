"""A run of a graph by a clock in place of processes, under the engine's own rules
(dataflow/rules).
"""
