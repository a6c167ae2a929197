"""A rollout's tokens in arrays: from the engine, over wire and disk, to the trainer."""
