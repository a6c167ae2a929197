"""What decode steps take, by how many rollouts they carry on: it tells seconds of a step from those
of a rollout."""

from __future__ import annotations


class DecodeTimes:
    """Steps, rollouts, tokens that these looked back at, and seconds, each summed over steps of
    about as many rollouts.

    >>> times = DecodeTimes()
    >>> for rollouts in (3, 4):
    ...     times.add(rollouts, 100, 0.25)
    >>> times.status()
    {'decode_4_steps': 2, 'decode_4_rollouts': 7, 'decode_4_looked': 200, 'decode_4_s': 0.5}
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, int, int, float]] = {}
        """By the most rollouts of their steps, a power of two."""

    def add(self, rollouts: int, looked: int, seconds: float) -> None:
        """A step has drawn a token for each of so many rollouts, which together had `looked` before
        it."""
        if rollouts < 1:
            return
        most = 1 << (rollouts - 1).bit_length()
        steps, known, back, spent = self._sums.get(most, (0, 0, 0, 0.0))
        self._sums[most] = (steps + 1, known + rollouts, back + looked, spent + seconds)

    def status(self) -> dict[str, float | int]:
        """Small numbers for the heartbeat, which are added up over replicas."""
        return {
            f"decode_{most}_{name}": value
            for most, (steps, rollouts, looked, seconds) in sorted(self._sums.items())
            for name, value in (
                ("steps", steps),
                ("rollouts", rollouts),
                ("looked", looked),
                ("s", round(seconds, 6)),
            )
        }
