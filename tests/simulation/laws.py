"""The laws, each a check that is made after events; a broken one names the seed's world as it
stands.
"""

from collections.abc import Callable


class Broken(BaseException):
    """A law does not hold; a BaseException, so that no handler of the product takes it for an error
    of an operator.
    """


def check(holds: bool, law: str, waits: Callable[[], str] | None = None) -> None:
    """Raise Broken unless the law holds."""
    if not holds:
        raise Broken(law if waits is None else f"{law}; {waits()}")
