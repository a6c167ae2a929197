"""Checkpoints of a trainer: written beside the training, found again, and gone on from."""
