"""A run seen from its folder: described, summed up, verified, resumed, replayed."""
