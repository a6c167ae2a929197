"""A small policy of one's own: a Llama of a few layers, trained a little on examples."""

from operators.warm_start.launch import WarmStartError, warm_start
from operators.warm_start.spec import EOS

__all__ = ["EOS", "WarmStartError", "warm_start"]
