"""Tensor parallelism: one engine as n processes, each with its slice of the weights and its heads'
keys and values.
"""
