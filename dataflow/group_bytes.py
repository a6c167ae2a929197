"""How many bytes one group may have on a data edge, and whether that fits. Pure."""

from collections.abc import Iterator, Mapping

import pyarrow as pa

from dataflow.records import Columns

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
