"""The most memory that each process of a run holds by itself, beside its share of the model."""
