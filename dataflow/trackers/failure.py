"""What a library raised, in one line for people."""

from dataflow.errors import where

_SAID = 200
"""Characters of one error's own words: a database adds its statement, and all values of it."""


def in_one_line(error: BaseException) -> str:
    """What it says and where, and what it came from where it does not say so itself.

    >>> in_one_line(OSError(28, "No space left"))
    'OSError: [Errno 28] No space left (at unknown line)'
    """
    said, root = _words(error), _root(error)
    cause = "" if root is error or " ".join(str(root).split()) in said else f", from {_words(root)}"
    return f"{said}{cause} (at {where(error)})"


def _words(error: BaseException) -> str:
    """Its name and words, all in one line."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) <= _SAID else f"{words[:_SAID]} .."


def _root(error: BaseException) -> BaseException:
    """What was raised first of all that led to it."""
    seen = [error]
    while (before := _before(seen[-1])) is not None and before not in seen:
        seen.append(before)
    return seen[-1]


def _before(error: BaseException) -> BaseException | None:
    """What it was raised from, or while it was handled."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)
