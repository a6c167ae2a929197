"""Bytes between processes: record batches (`data`) and weights (`weights`); knows no graph, no operator, no RL."""
