"""What W&B writes offline, read back without it but for its messages."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest


def needs_timed_writes() -> None:
    """Skip the test where W&B writes when 32 KiB are full, and at no time."""
    import wandb

    if "x_transaction_log_flush_interval" not in wandb.Settings.model_fields:
        pytest.skip(f"wandb {wandb.__version__} writes by 32 KiB; pip install 'wandb>=0.31'")


def wandb_records(folder: Path) -> list[list[Any]]:
    """By part, in order: the records of .wandb files, in LevelDB's log format, 32 KiB blocks behind
    a header.
    """
    from wandb.proto import wandb_internal_pb2

    parts = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data, at, whole, found = path.read_bytes(), 7, b"", []
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, at)
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                record = wandb_internal_pb2.Record()
                record.ParseFromString(whole)
                found.append(record)
                whole = b""
        parts.append(found)
    return parts


def history(records: list[Any]) -> list[dict[str, Any]]:
    return [
        {
            item.key or ".".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
