"""The columns of prompts and rollouts as Arrow types: the one place where a column name is spelled."""

import itertools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from dataflow.errors import RecordError

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
"""Numbers of a column, in annotations of scorers."""
AnyArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Columns: TypeAlias = Mapping[str, pa.DataType]

GROUP_ID = "group_id"
PROMPT_ID = "prompt_id"
PROMPT = "prompt"
GROUP_SIZE = "group_size"
MIN_VERSION = "min_version"
ROUND_SIZE = "round_size"
ROLLOUT_ID = "rollout_id"
POSITION = "position"
COMPLETION = "completion"
TOKENS = "tokens"
MASK = "mask"
LOGPROBS = "logprobs"
VERSIONS = "versions"
FINISH_REASON = "finish_reason"
ERROR = "error"
ADVANTAGE = "advantage"
SAMPLING_MASK = "sampling_mask"
REF_LOGPROBS = "ref_logprobs"
VALUES = "values"
DROP_REASON = "drop_reason"

SAMPLING_MASK_TYPE = pa.list_(pa.list_(pa.int32()))
"""By token of the rollout the ids that truncation left; null in the prompt and where it left all."""

TOKEN_NUMBERS = pa.list_(pa.float32())
"""By token of the rollout a number, 0 where the mask is false: ref_logprobs, values and their like."""

PROMPT_COLUMNS: Columns = {
    GROUP_ID: pa.int64(),  # issue number of the prompt within its source: 0, 1, 2, ...
    PROMPT_ID: pa.string(),  # which task this is; the same in every epoch
    PROMPT: pa.string(),  # text, or chat messages as JSON
    GROUP_SIZE: pa.int32(),  # rollouts asked for; 0: as many as the generator makes by itself
    MIN_VERSION: pa.int32(),  # not started under older weights
    ROUND_SIZE: pa.int32(),  # prompts in the evaluation round this belongs to; 0: not an evaluation
}

ROLLOUT_COLUMNS: Columns = {
    ROLLOUT_ID: pa.int64(),  # group_id * group_size + position
    POSITION: pa.int32(),  # 0 .. group_size - 1
    COMPLETION: pa.string(),  # what the policy wrote, without the stop
    TOKENS: pa.list_(pa.int32()),  # prompt and completion
    MASK: pa.list_(pa.bool_()),  # true where the policy chose the token
    LOGPROBS: pa.list_(pa.float32()),  # of the distribution really sampled from; 0 where the mask is false
    VERSIONS: pa.list_(pa.int32()),  # which weights produced the token; -1 where the mask is false
    FINISH_REASON: pa.string(),  # stop | length | error
    ERROR: pa.string(),  # null, or what failed
}

_SCALARS: dict[Any, pa.DataType] = {
    str: pa.string(),
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    bytes: pa.binary(),
}


def version_column(column: str) -> str:
    """Beside a column that a model made: which version of its weights did, int32; 0 as it was loaded.

    >>> version_column("ref_logprobs")
    'ref_logprobs_version'
    """
    return f"{column}_version"


def schema(columns: Columns) -> pa.Schema:
    """The Arrow schema of rows with these columns, in their order."""
    return pa.schema([pa.field(name, kind) for name, kind in columns.items()])


def check_schema(batch: pa.RecordBatch, columns: Columns, who: str) -> None:
    """Refuse a batch that lacks a promised column or has it in another type (RecordError)."""
    for name, kind in columns.items():
        at = batch.schema.get_field_index(name)
        if at < 0:
            raise RecordError(
                f"{who} promised column '{name}' but its rows have {batch.schema.names}; "
                f"mend the operator so that it adds '{name}'"
            )
        if batch.schema.field(at).type != kind:
            raise RecordError(
                f"{who} promised column '{name}' as {kind} but its rows have {batch.schema.field(at).type}; "
                f"mend the operator, or its annotation"
            )


def arrow_type(annotation: Any) -> pa.DataType | None:
    """The Arrow type that a Python annotation stands for; None where any type will do (Any, Array, none given)."""
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        return arrow_type(inner[0]) if len(inner) == 1 else None
    if origin is list and arguments:
        inner_type = arrow_type(arguments[0])
        return pa.list_(inner_type) if inner_type is not None else None
    return None


def fits(found: pa.DataType, wanted: Any) -> bool:
    """Whether a column of Arrow type `found` can be read as the Python annotation `wanted`."""
    if wanted is np.ndarray or typing.get_origin(wanted) is np.ndarray:
        return _is_numeric(found) or (pa.types.is_list(found) and _is_numeric(found.value_type))
    kind = arrow_type(wanted)
    if kind is None or kind == found:
        return True
    if pa.types.is_list(kind) and pa.types.is_list(found):
        return _number_fits(found.value_type, kind.value_type)
    return _number_fits(found, kind)


def list_lengths(column: pa.ListArray) -> AnyArray:
    """Length of each list of a ragged column, int64 [rows]."""
    offsets: AnyArray = column.offsets.to_numpy()
    return np.diff(offsets).astype(np.int64)


def group_slices(records: pa.RecordBatch) -> list[tuple[int, int, int]]:
    """(group_id, first row, rows) of the groups of a batch, in order; the rows of a group lie side by side."""
    ids = records.column(GROUP_ID).to_numpy()
    bounds = [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist(), len(ids)]
    return [(int(ids[start]), start, end - start) for start, end in itertools.pairwise(bounds) if end > start]


def _is_numeric(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _number_fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    if found == wanted:
        return True
    if pa.types.is_floating(wanted):
        return bool(pa.types.is_floating(found) or pa.types.is_integer(found))
    return bool(pa.types.is_integer(wanted) and pa.types.is_integer(found))
