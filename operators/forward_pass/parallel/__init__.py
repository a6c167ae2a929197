"""One forward operator as several ranks, each of which holds slices of its model's layers."""
