"""What goes into the engine and what comes out: prompts that start, rows that ended, rows that wait to go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dataflow.folder.partial_rollouts import Stretch
from dataflow.records import AnyArray
from operators.engine.sampler import Sampling
from operators.engine.stops import StopStrings


@dataclass(frozen=True, kw_only=True)
class Start:
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
    parts: Sequence[Stretch | None] = ()
    """Of each rollout, what it had drawn before, from its first token; None, or nothing at all, where that is none."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rollout outside the batch, with all that is needed to go on with it: parked, or looked at."""

    ticket: int
    age: int
    """Rises with every rollout that starts."""
    tokens: AnyArray
    """Prompt and completion so far, int32 [tokens]."""
    logprobs: AnyArray
    """float32 [tokens]; 0 in the prompt."""
    versions: AnyArray
    """int32 [tokens]; -1 in the prompt."""
    start: int
    """Tokens of the prompt."""
    limit: int
    seed: int
    sampling: Sampling
    stop: StopStrings | None
    kept: list[AnyArray] | None
    """By token of the completion, the ids that truncation left; None where that is not recorded."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Rows that ended in a step, as arrays over the k rows."""

    tickets: AnyArray
    """int64 [k]."""
    tokens: AnyArray
    """Prompt and completion, int32 [k, longest], right-padded."""
    logprobs: AnyArray
    """float32 [k, longest]."""
    versions: AnyArray
    """int32 [k, longest]."""
    starts: AnyArray
    """Tokens of the prompt, int64 [k]."""
    lengths: AnyArray
    """Tokens of prompt and completion, int64 [k]."""
    reasons: AnyArray
    """STOPPED, TOO_LONG, BROKEN or ABORTED, int64 [k]."""
    texts: dict[int, str] = field(default_factory=dict)
    """By ticket: the completion before its stop string, for those that ended at one."""
    kept: dict[int, list[AnyArray]] = field(default_factory=dict)
    """By ticket: for each token of the completion the ids that truncation left, where that is recorded."""


def begun(start: Start, age: int, sampling: Sampling, stop: StopStrings | None, *, masks: bool) -> list[Row]:
    """The rows of a prompt's rollouts, the first of this age. masks: it is recorded what truncation left.

    sampling, stop: the engine's, where `start` says nothing.
    """
    prompt, before = start.prompt.astype(np.int32), len(start.prompt)
    none = Stretch(begin=0, tokens=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), versions=prompt[:0])
    logprobs, versions = np.zeros(before, np.float32), np.full(before, -1, np.int32)
    found = []
    for i, part in enumerate(part or none for part in start.parts or [None] * len(start.tickets)):
        found.append(
            Row(
                ticket=start.tickets[i], age=age + i, tokens=np.concatenate([prompt, part.tokens]),
                logprobs=np.concatenate([logprobs, part.logprobs]),
                versions=np.concatenate([versions, part.versions]), start=before, limit=start.limit,
                seed=start.seeds[i], sampling=start.sampling or sampling, stop=start.stop or stop,
                kept=list(part.masks or ()) if masks else None,
            )
        )  # fmt: skip
    return found


def finished_of(rows: Sequence[Row], reason: int) -> Finished:
    """Rows outside the batch as rows that ended, all for this reason."""
    lengths = np.array([len(row.tokens) for row in rows], dtype=np.int64)
    longest = int(np.max(lengths, initial=0))

    def padded(columns: list[AnyArray], dtype: type) -> AnyArray:
        table: AnyArray = np.zeros((len(rows), longest), dtype)
        for i, column in enumerate(columns):
            table[i, : len(column)] = column
        return table

    return Finished(
        tickets=np.array([row.ticket for row in rows], dtype=np.int64),
        tokens=padded([row.tokens for row in rows], np.int32),
        logprobs=padded([row.logprobs for row in rows], np.float32),
        versions=padded([row.versions for row in rows], np.int32),
        starts=np.array([row.start for row in rows], dtype=np.int64),
        lengths=lengths,
        reasons=np.full(len(rows), reason, dtype=np.int64),
        kept={row.ticket: row.kept for row in rows if row.kept is not None},
    )


def merged(parts: Sequence[Finished | None]) -> Finished | None:
    """Several as one; None where there is nothing."""
    found = [part for part in parts if part is not None and len(part.tickets)]
    if len(found) < 2:
        return found[0] if found else None
    longest = max(part.tokens.shape[1] for part in found)

    def tables(name: str) -> AnyArray:
        return np.concatenate(
            [np.pad(t, ((0, 0), (0, longest - t.shape[1]))) for t in (getattr(p, name) for p in found)]
        )

    def columns(name: str) -> AnyArray:
        return np.concatenate([getattr(part, name) for part in found])

    return Finished(
        tickets=columns("tickets"), tokens=tables("tokens"), logprobs=tables("logprobs"), versions=tables("versions"),
        starts=columns("starts"), lengths=columns("lengths"), reasons=columns("reasons"),
        texts={t: text for part in found for t, text in part.texts.items()},
        kept={t: kept for part in found for t, kept in part.kept.items()},
    )  # fmt: skip
