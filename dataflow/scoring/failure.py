"""Why a rollout failed, as in the column `error`: the node, the cause, and the details."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

RAISED: Final = "raised"
"""A function raised."""
HUNG: Final = "hung"
"""A call had no answer within its limit."""
DIED: Final = "died"
"""A process ended during a call, or took more memory than its limit."""
UNUSABLE: Final = "unusable"
"""A function returned what is no value of its column; or a prompt, or a conversation, is
unusable."""
TOO_LONG: Final = "too_long"
"""A prompt has no room in the context: it can never be trained."""
WORLD: Final = "world"
"""Something outside of the policy failed: a judge, a network. The call is made again before it
counts."""
OTHER: Final = "other"
"""The cause of an error that names none."""
CAUSES: Final = (RAISED, HUNG, DIED, UNUSABLE, TOO_LONG, WORLD)
BY_CAUSE: Final = "failed_"
"""The prefix of a cause in a node's status: how many rollouts failed by it."""


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
    detail: str

    def __str__(self) -> str:
        return f"{self.by}: {self.cause}: {self.detail}"

    @classmethod
    def read(cls, error: str) -> "RolloutFailure":
        """The failure in a text of the column `error`."""
        by, colon, text = error.partition(": ")
        if not colon or not by.replace("-", "_").replace(".", "_").isidentifier():
            return cls("", OTHER, error)
        cause, _, detail = text.partition(": ")
        return cls(by, cause, detail) if cause in CAUSES else cls(by, OTHER, text)


def status_of(causes: Mapping[str, int]) -> dict[str, int]:
    """What a node's status says of failures that were counted by cause: `failed`, and `failed_hung`
    and so on.

    >>> status_of({"hung": 2, "raised": 1})
    {'failed': 3, 'failed_hung': 2, 'failed_raised': 1}
    """
    return {
        "failed": sum(causes.values()),
        **{f"{BY_CAUSE}{cause}": count for cause, count in causes.items()},
    }


def failures_told(status: Mapping[str, float | int | str]) -> str:
    """The same in words: `3 failed (2 hung, 1 raised)`; empty where nothing failed.

    >>> failures_told({"failed": 3, "failed_hung": 2, "failed_raised": 1})
    '3 failed (2 hung, 1 raised)'
    """
    if not (failed := status.get("failed")):
        return ""
    causes = {
        name.removeprefix(BY_CAUSE): count
        for name, count in status.items()
        if name.startswith(BY_CAUSE)
    }
    some = ", ".join(
        f"{count} {cause}"
        for cause, count in sorted(causes.items(), key=lambda each: -int(each[1]))
    )
    return f"{failed} failed ({some})" if some else f"{failed} failed"


def counted(errors: Iterable[str | None]) -> dict[str, int]:
    """How many of these texts there are by node and cause, as `judge: hung`, the most frequent
    first; None counts nothing.

    >>> hung = "judge: hung: no answer within 30 s"
    >>> counted([hung, None, hung, "too long"])
    {'judge: hung': 2, 'other': 1}
    """
    counts: dict[str, int] = {}
    for error in errors:
        if error is not None:
            failure = RolloutFailure.read(error)
            name = f"{failure.by}: {failure.cause}" if failure.by else failure.cause
            counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items(), key=lambda each: (-each[1], each[0])))
