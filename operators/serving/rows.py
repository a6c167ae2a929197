"""The rollout rows of one call, as Arrow: the columns of any rollout, and who asked for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from dataflow import records
from dataflow.records import Columns
from dataflow.tokens.rollout_tokens import RolloutTokens

SESSION_ID = "session_id"
REQUEST_ID = "request_id"
CREATED = "created"
MODEL = "model"
PARENT_ROLLOUT_ID = "parent_rollout_id"
REUSED_TOKENS = "reused_tokens"
SEED = "seed"
PARAMETERS = "parameters"

SERVING_COLUMNS: Columns = {
    SESSION_ID: pa.string(),  # header X-Session-Id, or the field user; null where neither was sent
    # the `id` of the answer; `position` is the choice's index within its prompt
    REQUEST_ID: pa.string(),
    CREATED: pa.timestamp("ms", tz="UTC"),  # when the call arrived
    MODEL: pa.string(),  # the name it was called by
    # the rollout whose tokens this one's prompt begins with, or null
    PARENT_ROLLOUT_ID: pa.int64(),
    REUSED_TOKENS: pa.int32(),  # how many of the first tokens are the parent's own
    SEED: pa.int64(),  # of the rollout
    PARAMETERS: pa.string(),  # JSON: what was asked for beside the prompt, with the defaults
}

COLUMNS: Columns = {**records.PROMPT_COLUMNS, **records.ROLLOUT_COLUMNS, **SERVING_COLUMNS}


@dataclass(frozen=True, kw_only=True)
class CallGroup:
    """What the rollouts of one prompt of one call have in common."""

    group_id: int
    size: int
    prompt: str
    """Text, or chat messages as JSON."""
    prompt_tokens: Sequence[int]
    session: str | None
    request_id: str
    created_ms: int
    """Since 1970, UTC."""
    model: str
    parent: int | None
    reused: int
    seeds: Sequence[int]
    parameters: dict[str, Any]

    def rollout_id(self, position: int) -> int:
        """Of the rollout at this position, as in every run folder."""
        return self.group_id * self.size + position


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What the model wrote in one of them."""

    text: str
    tokens: RolloutTokens
    finish_reason: str
    """stop, length or error."""
    error: str | None = None


class GroupIds:
    """Hands out group ids so that `group_id * size + position` names one rollout only, whatever the
    sizes.
    """

    def __init__(self, group: int = 0, rollout: int = 0) -> None:
        """Begin after what is taken: the lowest free group id and rollout id."""
        self._group, self._rollout = group, rollout

    def take(self, size: int) -> int:
        """The id of a new group of so many rollouts."""
        group = max(self._group, -(-self._rollout // size))
        self._group, self._rollout = group + 1, (group + 1) * size
        return group


def rows_of(group: CallGroup, completions: Sequence[Completion]) -> pa.RecordBatch:
    """One row for each rollout of the group, with COLUMNS."""
    size, prompt = group.size, RolloutTokens.given(np.array(group.prompt_tokens))
    rollouts = [RolloutTokens.joined([prompt, completion.tokens]) for completion in completions]
    offsets = np.concatenate([[0], np.cumsum([len(tokens) for tokens in rollouts])])
    columns: dict[str, Any] = RolloutTokens.joined(rollouts).columns(offsets) | {
        records.GROUP_ID: [group.group_id] * size,
        records.PROMPT_ID: [prompt_id(group.prompt)] * size,
        records.PROMPT: [group.prompt] * size,
        records.GROUP_SIZE: [size] * size,
        records.MIN_VERSION: [0] * size,
        records.ROUND_SIZE: [0] * size,
        records.ROLLOUT_ID: [group.rollout_id(position) for position in range(size)],
        records.POSITION: list(range(size)),
        records.COMPLETION: [completion.text for completion in completions],
        records.FINISH_REASON: [completion.finish_reason for completion in completions],
        records.ERROR: [completion.error for completion in completions],
        SESSION_ID: [group.session] * size,
        REQUEST_ID: [group.request_id] * size,
        CREATED: [group.created_ms] * size,
        MODEL: [group.model] * size,
        PARENT_ROLLOUT_ID: [group.parent] * size,
        REUSED_TOKENS: [group.reused] * size,
        SEED: list(group.seeds),
        PARAMETERS: [json.dumps(group.parameters, ensure_ascii=False)] * size,
    }
    return pa.record_batch(
        [pa.array(columns[name], kind) for name, kind in COLUMNS.items()], records.schema(COLUMNS)
    )


def prompt_id(prompt: str) -> str:
    """The same for the same prompt."""
    return xxhash.xxh3_64_hexdigest(prompt.encode())
