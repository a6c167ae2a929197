"""The world of `bench.episodes`: a class of tools as TRL's `environment_factory` takes them, which
takes its time.
"""

import asyncio
import random
from typing import Any

LONGEST_S, SHORTEST_S, SHAPE = 30.0, 0.1, 1.1


def world_s(number: int, turn: int, scale: float) -> float:
    """What the world of a prompt takes after a turn."""
    return scale * min(
        LONGEST_S, SHORTEST_S * random.Random(f"{number}/{turn}").paretovariate(SHAPE)
    )


class SlowWorld:
    """Takes words, and its time; the share of their letters that stand early in the alphabet is the
    reward.
    """

    def reset(self, number: int, scale: float, **_: Any) -> None:
        """Begin the world of a prompt."""
        self.number, self.scale, self.turn, self.said = number, scale, 0, ""

    async def go(self, word: str) -> str:
        """Say a word.

        Args:
            word: Any letters.

        Returns:
            Always the same.
        """
        took, self.turn, self.said = self.turn, self.turn + 1, self.said + word
        await asyncio.sleep(world_s(self.number, took, self.scale))
        return "="

    def get_reward(self) -> float:
        """The share of early letters."""
        return sum(letter < "h" for letter in self.said) / max(1, len(self.said))
