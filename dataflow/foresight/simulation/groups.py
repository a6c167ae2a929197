"""A prompt's rollouts in a simulation: numbers alone."""

from __future__ import annotations


class SimulatedGroup:
    """What stands for `PromptGroup`: admission takes either."""

    __slots__ = (
        "from_versions",
        "group_id",
        "last",
        "left",
        "min_version",
        "replica",
        "tokens",
        "unstarted",
    )

    def __init__(self, group_id: int, size: int, replica: int) -> None:
        self.group_id, self.min_version, self.replica = group_id, 0, replica
        self.unstarted = self.left = size
        self.tokens = 0.0
        """Of its completions."""
        self.last = 0
        """The stride of its replica at which the last of its rollouts ends that has begun."""
        self.from_versions: list[tuple[int, int]] = []
        """Versions under which some of its rollouts started, and how many of them."""

    def again(self, size: int) -> None:
        """Begin anew: what there was of its rollouts is lost."""
        self.unstarted = self.left = size
        self.tokens, self.last, self.from_versions = 0.0, 0, []
