"""Bytes between processes: record batches (`data`), weights (`weights`); no graph, no operator, no
RL.
"""
