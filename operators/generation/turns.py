"""Turns that episodes ask a generator for, as groups of one: admitted as the group of their rollout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from dataflow.records import GROUP_ID, MIN_VERSION, MOST_TOKENS, OF_GROUP, OF_SOURCE, SEED, STOP, TEMPERATURE, TOKENS
from dataflow.runtime import Batch
from dataflow.staleness import Bound
from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.engine.finish_reasons import TOO_LONG
from operators.engine.results import EndedRollout
from operators.generation.groups import PromptGroup, Turn


def with_turns(bounds: Mapping[str, Bound], episodes: Iterable[str]) -> dict[str, Bound]:
    """Bounds by source and, for each queue of turns, that of the source whose rollouts they belong to."""
    turns = {_queue(episode, source): bound for episode in episodes for source, bound in bounds.items()}
    return {**bounds, **turns}


def no_turns(queues: Iterable[str]) -> set[str]:
    """Those queues in which prompts wait, and no turns."""
    return {queue for queue in queues if "/" not in queue}


def turns_of(batch: Batch, context_tokens: int) -> Iterator[PromptGroup]:
    """The turns of a batch of requests; one whose conversation fills the context has ended, with nothing said."""
    records = batch.records
    names = (GROUP_ID, OF_SOURCE, OF_GROUP, MIN_VERSION, SEED, MOST_TOKENS, TEMPERATURE, STOP)
    columns = [records.column(name).to_pylist() for name in names]
    lists = records.column(TOKENS)
    for row, values in enumerate(zip(*columns, strict=True)):
        number, source, group_id, min_version, seed, most, temperature, stop = values
        tokens = np.asarray(lists[row].values.to_numpy(), np.int64)
        turn = Turn(
            number=number, queue=_queue(batch.source, source), seed=seed, limit=len(tokens) + most,
            temperature=temperature, stop=tuple(stop or ()),
        )  # fmt: skip
        group = PromptGroup(
            source=batch.source, group_id=group_id, size=1, min_version=min_version, batch=batch, row=row,
            prompt=tokens, unstarted=1, left=1, rows=[None], turn=turn,
        )  # fmt: skip
        if len(tokens) >= context_tokens:
            said = EndedRollout(tokens=RolloutTokens.given(tokens), start=len(tokens), reason=TOO_LONG, text="")
            group.rows, group.unstarted, group.left = [said], 0, 0
        yield group


def _queue(episode: str, source: str) -> str:
    return f"{episode}/{source}"
