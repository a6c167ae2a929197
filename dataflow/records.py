"""The columns of prompts and rollouts as Arrow types: the one place where a column name is
spelled.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
"""Numbers of a column, in annotations of scorers."""
AnyArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Columns: TypeAlias = Mapping[str, pa.DataType]

GROUP_ID = "group_id"
PROMPT_ID = "prompt_id"
PROMPT = "prompt"
GROUP_SIZE = "group_size"
TOOLS = "tools"
CHAT_TEMPLATE_KWARGS = "chat_template_kwargs"
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
RAW_COMPLETION = "raw_completion"
"""What the policy wrote with its special tokens, the one that ended it included."""
TEMPERATURE = "sampling_temperature"
"""At which a rollout was sampled, float64; null where nothing was."""
REF_LOGPROBS = "ref_logprobs"
NEW_LOGPROBS = "new_logprobs"
"""What the trainer computed of a rollout's trained tokens, list<float32>, in the files of trained
steps alone: 0 where the mask is false, null where a token or a rollout was not trained."""
VALUES = "values"
DROP_REASON = "drop_reason"
TURN = "turn"
TURN_REWARD = "turn_reward"
TRAINING_ROW = "training_row"
ROW_CONVERSATION = "row_conversation"
ROW_ROLE = "row_role"
ROW_BRANCH_TURN = "row_branch_turn"
OF_SOURCE = "of_source"
"""Which source a row comes from, where rows of several stand in one table."""
OF_GROUP = "of_group"
SEED = "seed"
MOST_TOKENS = "most_tokens"
STOP = "stop"

SAMPLING_MASK_TYPE = pa.list_(pa.list_(pa.int32()))
"""By token of the rollout the ids that truncation left; null in the prompt and where it left
all."""
SAMPLED_COLUMNS: Mapping[str, pa.DataType] = {
    RAW_COMPLETION: pa.string(),
    SAMPLING_MASK: SAMPLING_MASK_TYPE,
}
"""What a generator adds where it is asked to."""

TOKEN_NUMBERS = pa.list_(pa.float32())
"""By token of the rollout a number, 0 where the mask is false: ref_logprobs, values and their
like."""

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
    # of the distribution really sampled from; 0 where the mask is false
    LOGPROBS: pa.list_(pa.float32()),
    VERSIONS: pa.list_(pa.int32()),  # which weights produced the token; -1 where the mask is false
    FINISH_REASON: pa.string(),  # stop | length | error
    ERROR: pa.string(),  # null, or what failed
}

EPISODE_COLUMNS: Columns = {
    # by token, which of the policy's turns it is of; -1 where the mask is false
    TURN: pa.list_(pa.int32()),
    # at the last token of a turn, what the episode gave for it; 0 elsewhere
    TURN_REWARD: TOKEN_NUMBERS,
    # by token, which of the rollout's sequences it is of: 0, 1, ... side by side
    TRAINING_ROW: pa.list_(pa.int32()),
    # by training row, which conversation of the episode's it is of
    ROW_CONVERSATION: pa.list_(pa.int32()),
    # by training row, whose: empty, or as the episode named the agent
    ROW_ROLE: pa.list_(pa.string()),
    # by training row, behind which turn its conversation branched off; -1: none
    ROW_BRANCH_TURN: pa.list_(pa.int32()),
}

TURN_REQUEST: Columns = {
    GROUP_ID: pa.int64(),  # of the turn: a checksum of all that it is drawn from
    OF_SOURCE: pa.string(),  # source and group of the episode's prompt, by which it is admitted
    OF_GROUP: pa.int64(),
    MIN_VERSION: pa.int32(),  # not drawn under older weights
    SEED: pa.int64(),
    MOST_TOKENS: pa.int32(),  # of the turn
    # at which the turns before were sampled; null: as the generator samples now
    TEMPERATURE: pa.float64(),
    # strings at which the turn ends, beside end tokens; null: the generator's own
    STOP: pa.list_(pa.string()),
    TOKENS: pa.list_(pa.int32()),  # the conversation so far
}

TURN_ANSWER: Columns = {
    GROUP_ID: pa.int64(),  # as it was asked for
    COMPLETION: pa.string(),  # what the policy said, without the stop
    TOKENS: pa.list_(pa.int32()),  # of this turn alone, as are
    LOGPROBS: pa.list_(pa.float32()),
    VERSIONS: pa.list_(pa.int32()),
    SAMPLING_MASK: SAMPLING_MASK_TYPE,  # null where none is recorded
    TEMPERATURE: pa.float64(),  # at which it was sampled
    FINISH_REASON: pa.string(),  # of the turn: stop | length | error
    ERROR: pa.string(),
}


def version_column(column: str) -> str:
    """Beside a column that a model made: which version of its weights did, int32; 0 as it was
    loaded.

    >>> version_column("ref_logprobs")
    'ref_logprobs_version'
    """
    return f"{column}_version"


def note_column(column: str) -> str:
    """Beside a column that a scorer writes: what its function said beyond the number, as text.

    >>> note_column("reward")
    'reward_note'
    """
    return f"{column}_note"


def schema(columns: Columns) -> pa.Schema:
    """The Arrow schema of rows with these columns, in their order."""
    return pa.schema([pa.field(name, kind) for name, kind in columns.items()])


# How many bytes one group may have on a data edge, and whether that fits. Pure.


MESSAGE_BYTES = 64 << 20
"""The most bytes of one message on a data edge, by default."""
LEAST_MESSAGE_BYTES = 1 << 16
CAPACITY_BYTES = 16 << 30
"""The most bytes that an edge holds: rows bound it first; fewer bytes than those rows may have
would be a deadlock."""
MOST_ITEMS = (1 << 31) - 1
"""The most numbers in one list column of a batch: Arrow's offsets have 32 bits."""


def message_fault(message_bytes: int) -> str | None:
    """Why messages cannot have this cap."""
    if LEAST_MESSAGE_BYTES <= message_bytes <= CAPACITY_BYTES:
        return None
    return (
        f"a message on a data edge has at most {message_bytes} bytes, which is not from"
        f" {LEAST_MESSAGE_BYTES} to {CAPACITY_BYTES}, all that an edge holds; give message_bytes"
        f" between them (the usual: {MESSAGE_BYTES})"
    )


def items_of(columns: Columns, *, rollouts: int, tokens: int, ids_left: int) -> Mapping[str, int]:
    """By column that has numbers for each token, how many a group of so long rollouts has.

    ids_left: token ids that truncation leaves, which a list for each token holds.
    """
    ragged = {name: kind for name, kind in columns.items() if pa.types.is_list(kind)}
    return {
        name: rollouts * tokens * (ids_left if pa.types.is_list(kind.value_type) else 1)
        for name, kind in ragged.items()
    }


def group_bytes(columns: Columns, *, rollouts: int, tokens: int, ids_left: int) -> int:
    """Bytes of a group whose rollouts all have so many tokens, without its prompts and texts."""
    bits = 0
    for name, items in items_of(
        columns, rollouts=rollouts, tokens=tokens, ids_left=ids_left
    ).items():
        kind = columns[name].value_type
        if pa.types.is_list(kind):
            bits += 32 * rollouts * tokens  # its offsets
            kind = kind.value_type
        bits += items * kind.bit_width if pa.types.is_primitive(kind) else 0
    return bits // 8


def group_faults(
    generator: str, columns: Columns, *, rollouts: int, tokens: int, ids_left: int, senders: int = 1
) -> Iterator[str]:
    """Why the groups of a generator could never be sent, one of each of its replicas at a time."""
    size = group_bytes(columns, rollouts=rollouts, tokens=tokens, ids_left=ids_left)
    size_text = f"a group of '{generator}' may have {rollouts} rollouts of {tokens} tokens"
    if size * senders > CAPACITY_BYTES:
        replicas = f", {size * senders} from {senders} replicas" if senders > 1 else ""
        yield (
            f"{size_text} and {size} bytes{replicas}, but a data edge holds {CAPACITY_BYTES}; lower"
            " group_size or"
            f" max_tokens{', or top_k where sampling masks are wide' if ids_left > 1 else ''}"
        )
    for name, items in items_of(
        columns, rollouts=rollouts, tokens=tokens, ids_left=ids_left
    ).items():
        if items > MOST_ITEMS:
            yield (
                f"{size_text} and {items} numbers in its column '{name}', but an Arrow column holds"
                f" {MOST_ITEMS}; lower group_size or"
                f" max_tokens{', or top_k' if ids_left > 1 else ''}"
            )
