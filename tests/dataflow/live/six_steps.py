"""Rollouts of the six steps of a run, with texts that mean harm."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow import records

STEPS, GROUPS, SIZE = 6, 2, 3
LONG = "x" * 1_000_000
EVIL = (
    "<script>document.title='harmed'</script><img src=x onerror=\"document.title='harmed'\">",
    "\x1b[31mred\x1b[0m \x07 \u202eesrever\u202c \u200b",
    LONG,
)


def rollouts(step: int, mask: Sequence[bool] = (False, True, True, True)) -> pa.Table:
    """Two groups of three; the texts of the last step mean harm. mask: of each rollout's four
    tokens.
    """
    ids = np.repeat(np.arange((step - 1) * GROUPS, step * GROUPS), SIZE)
    position = np.tile(np.arange(SIZE, dtype=np.int32), GROUPS)
    count = len(ids)
    texts = [f"answer {step} {at}" for at in range(count)]
    if step == STEPS:
        texts[:3] = EVIL
    made: dict[str, Any] = {
        records.GROUP_ID: ids,
        records.PROMPT_ID: [f"p{each}" for each in ids],
        records.PROMPT: ["what?"] * count,
        records.GROUP_SIZE: [SIZE] * count,
        records.MIN_VERSION: [0] * count,
        records.ROUND_SIZE: [0] * count,
        records.ROLLOUT_ID: ids * SIZE + position,
        records.POSITION: position,
        records.COMPLETION: texts,
        records.TOKENS: [[1, 2, 3, 4]] * count,
        records.MASK: [list(mask)] * count,
        records.LOGPROBS: [[0.0, -0.5, -2.0, -0.01]] * count,
        records.VERSIONS: [[-1, max(0, step - 2), step - 1, step - 1]] * count,
        records.FINISH_REASON: ["stop"] * count,
        records.ERROR: ["tool <b>failed</b>" if at == 5 else None for at in range(count)],
    }
    schema = records.schema({**records.PROMPT_COLUMNS, **records.ROLLOUT_COLUMNS})
    table = pa.table(
        [pa.array(made[name], schema.field(name).type) for name in schema.names], schema=schema
    )
    table = table.append_column("reward", pa.array([float("nan"), *range(1, count)], pa.float64()))
    return table.append_column(
        "new_logprobs", pa.array([[0.0, -0.5, -1.0, -0.01]] * count, records.TOKEN_NUMBERS)
    )
