"""Turns that episodes ask a generator for, as the rows that go to it."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from dataflow.records import (
    GROUP_ID,
    MIN_VERSION,
    MOST_TOKENS,
    OF_GROUP,
    OF_SOURCE,
    SEED,
    STOP,
    TEMPERATURE,
    TOKENS,
    TURN_REQUEST,
    schema,
)
from operators.episodes.dialogue import TurnRequest
from operators.generation.groups import PromptGroup


def request_rows(requests: Sequence[tuple[PromptGroup, TurnRequest]]) -> pa.RecordBatch:
    """In the columns of `TURN_REQUEST`, each with the group of the rollout that it is for."""
    columns = {
        GROUP_ID: [request.number for _, request in requests],
        OF_SOURCE: [group.source for group, _ in requests],
        OF_GROUP: [group.group_id for group, _ in requests],
        MIN_VERSION: [group.min_version for group, _ in requests],
        SEED: [request.seed for _, request in requests],
        MOST_TOKENS: [request.most for _, request in requests],
        TEMPERATURE: [request.temperature for _, request in requests],
        STOP: [request.stop or None for _, request in requests],
        TOKENS: [request.tokens for _, request in requests],
    }
    arrays = [pa.array(columns[name], kind) for name, kind in TURN_REQUEST.items()]
    return pa.RecordBatch.from_arrays(arrays, schema=schema(TURN_REQUEST))
