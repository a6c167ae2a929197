"""A small policy of one's own: a Llama of a few layers, trained a little on examples."""

from operators.warm_start.launch import WarmStartError, warm_start

__all__ = ["WarmStartError", "warm_start"]
