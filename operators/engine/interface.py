"""The interface of an engine to the runtime and to a server, whatever runs its forward passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dataflow.folder.partial_rollouts import PartialRollout
    from operators.engine.results import EndedRollout, PromptStart, Row


class DecodingEngine(Protocol):
    """Rows that are decoded together; one thread calls these methods. `decode.Engine` says more of
    each.
    """

    context_tokens: int
    """Most tokens of a row."""
    version: int
    """Of the weights that tokens are drawn from now."""
    steps: int
    """Decode steps made."""
    drawn: int
    """Tokens drawn."""
    looked: int
    """Tokens before each of them, its prompt's too, that attention looked back at."""

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """What the weight plane writes into."""

    @property
    def live(self) -> int:
        """Rollouts that have started and not ended."""

    @property
    def waiting(self) -> int:
        """Those of them that wait for memory."""

    @property
    def free(self) -> int:
        """Rollouts that may start now, as far as slots go."""

    @property
    def spare_pages(self) -> int:
        """Pages that starting rollouts may take."""

    def fitting(self, tokens: int, wanted: int, pages: int, *, idle: bool) -> tuple[int, int]:
        """How many of `wanted` rollouts of a prompt of so many tokens fit into `pages`, and the
        pages they take.
        """

    def step(self, starts: Sequence[PromptStart] = ()) -> list[EndedRollout]:
        """One token for every row; the rows that ended."""

    def abort(self, tickets: Collection[int]) -> list[EndedRollout]:
        """Take rollouts out as they are."""

    def progress(self, ticket: int) -> Row | None:
        """A live rollout as it is now."""

    def new_tokens(
        self, since: Callable[[int], int], least: int
    ) -> list[tuple[int, PartialRollout]]:
        """By ticket, what live rollouts have drawn lately, for `PromptStart.partial` of an engine
        after this one.
        """

    def adopted(self, version: int) -> None:
        """New weights of this version are in `tensors`."""

    def close(self) -> None:
        """Give up all rows, and what the engine holds."""
