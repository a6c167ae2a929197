"""An engine's interface to the runtime and to a server: what goes in, what comes out, and why a
row ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from dataflow.folder.partial_rollouts import PartialRollout
from dataflow.records import AnyArray
from dataflow.tokens.rollout_tokens import RolloutTokens, SamplingMask

if TYPE_CHECKING:  # so that a server reads these without torch
    from operators.engine.sampler import Sampling
    from operators.engine.stop_strings import StopStrings

STOPPED, TOO_LONG, BROKEN, ABORTED = 0, 1, 2, 3
"""An end token or stop string, its length limit, logits that are not finite, the caller's wish."""


@dataclass(frozen=True, kw_only=True)
class PromptStart:
    """A prompt whose rollouts (all, or some) start in this step."""

    prompt: AnyArray
    """Its tokens, int64 [at least 1]."""
    limit: int
    """Most tokens of prompt and completion together."""
    tickets: Sequence[int]
    """The caller's number of each rollout."""
    seeds: Sequence[int]
    """Of each rollout, int64."""
    sampling: Sampling | None = None
    """How its tokens are drawn; None: as the engine draws them."""
    stop: StopStrings | None = None
    """Strings at which it ends; None: the engine's."""
    alternatives: int = 0
    """Likeliest tokens to note beside each that is drawn."""
    goes_on: bool = False
    """Whether a later prompt may begin with prompt and completion, as the next turn's does: its
    keys and values are kept then while there is room."""
    partial: Sequence[PartialRollout | None] = ()
    """Of each rollout, what it had drawn before, from its first token; None, or nothing at all,
    where that is none."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rollout outside the batch, with all that is needed to go on with it: parked, or looked
    at.
    """

    ticket: int
    age: int
    """Rises with every rollout that starts."""
    tokens: RolloutTokens
    """Prompt and completion so far, with a sampling mask where that is recorded."""
    start: int
    """Tokens of the prompt."""
    limit: int
    seed: int
    sampling: Sampling
    stop: StopStrings | None
    goes_on: bool = False
    """As of `PromptStart`."""

    def ended(self, reason: int, text: str | None = None) -> EndedRollout:
        """As one that ends here."""
        return EndedRollout(
            tokens=self.tokens, start=self.start, reason=reason, ticket=self.ticket, text=text
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRollout:
    """A rollout that ended."""

    tokens: RolloutTokens
    """Prompt and completion."""
    start: int
    """Tokens of the prompt."""
    reason: int
    """STOPPED, TOO_LONG, BROKEN or ABORTED."""
    ticket: int = -1
    """The caller's number of it; of one that no engine drew, -1."""
    text: str | None = None
    """The completion, where it is not simply its tokens: before a stop string, or as it was
    given."""
    error: str | None = None
    """What failed, where it is not the model."""


def begun(
    start: PromptStart, age: int, sampling: Sampling, stop: StopStrings | None, *, masks: bool
) -> list[Row]:
    """The rows of a prompt's rollouts, the first of this age. masks: it is recorded what truncation
    left.

    sampling, stop: the engine's, where `start` says nothing.
    """
    before = len(start.prompt)
    prompt = RolloutTokens.given(start.prompt)
    if masks:
        prompt = replace(prompt, sampling_mask=SamplingMask.none(before))
    partial = start.partial or [None] * len(start.tickets)
    return [
        Row(
            ticket=start.tickets[i],
            age=age + i,
            start=before,
            limit=start.limit,
            seed=start.seeds[i],
            tokens=prompt if rollout is None else RolloutTokens.joined([prompt, rollout.tokens]),
            sampling=start.sampling or sampling,
            stop=start.stop or stop,
            goes_on=start.goes_on,
        )
        for i, rollout in enumerate(partial)
    ]


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
        """Those of them that wait for memory, or for their prompts to be computed."""

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
