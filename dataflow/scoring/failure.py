"""Why a rollout failed, as the column `error` has it: whose call it was, the cause, and what was found."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

RAISED: Final = "raised"
"""A function raised."""
HUNG: Final = "hung"
"""A call had no answer within its limit."""
DIED: Final = "died"
"""A process ended during a call, or took more memory than its limit."""
UNUSABLE: Final = "unusable"
"""A function gave what is no value of its column."""
WORLD: Final = "world"
"""Something outside failed that the policy has no part in: a judge, a network; tried again before it counts."""
OTHER: Final = "other"
"""Of an error that names no cause."""
CAUSES: Final = (RAISED, HUNG, DIED, UNUSABLE, WORLD)


@dataclass(frozen=True)
class RolloutFailure:
    """What failed: a value of its own, which is neither a score nor that a scorer does not apply.

    >>> str(RolloutFailure("judge", HUNG, "no answer within 30 s"))
    'judge: hung: no answer within 30 s'
    >>> RolloutFailure.read("judge: hung: no answer within 30 s").cause
    'hung'
    """

    by: str
    """The node; empty where an error names none."""
    cause: str
    """One of CAUSES, or OTHER."""
    found: str

    def __str__(self) -> str:
        return f"{self.by}: {self.cause}: {self.found}"

    @classmethod
    def read(cls, error: str) -> "RolloutFailure":
        """What a text in the column `error` says."""
        by, colon, rest = error.partition(": ")
        if not colon or not by.replace("-", "_").replace(".", "_").isidentifier():
            return cls("", OTHER, error)
        cause, _, found = rest.partition(": ")
        return cls(by, cause, found) if cause in CAUSES else cls(by, OTHER, rest)


def counted(errors: Iterable[str | None]) -> dict[str, int]:
    """How many of these texts there are by node and cause, as `judge: hung`, the most frequent first; None counts
    nothing.

    >>> counted(["judge: hung: no answer within 30 s", None, "judge: hung: no answer within 30 s", "too long"])
    {'judge: hung': 2, 'other': 1}
    """
    found: dict[str, int] = {}
    for error in errors:
        if error is not None:
            failure = RolloutFailure.read(error)
            name = f"{failure.by}: {failure.cause}" if failure.by else failure.cause
            found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items(), key=lambda each: (-each[1], each[0])))
