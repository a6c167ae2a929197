"""A loss's declaration: a call that gives knobs and no tensors is refused, with the way to set
them.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from dataflow.errors import checked

P = ParamSpec("P")
T = TypeVar("T")


def loss(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, which the trainer calls with tensors."""
    return checked(
        function,
        instead=f"functools.partial({function.__name__}, ...), which sets knobs and calls nothing",
    )
