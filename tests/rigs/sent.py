"""What was sent in runs. Over the weight plane: counted where it enters gloo, or a segment, and by
the kernel.

It is put around what sends before a run, whose workers are forked with it; each of them writes down
what it sees in a file of its own.
"""

import fcntl
import json
import os
import socket
import struct
import termios
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataflow.folder.run_folder import RunFolder
from dataflow.worker.kept_counts import known_edges
from transport.weights.sharded import put
from transport.weights.sharded.process_group import ProcessGroup
from transport.weights.sharded.transfer import SUMS_TAG
from transport.weights.sharded.writer import Sending

_BYTES_SENT = 200
"""Where `struct tcp_info` has tcpi_bytes_sent (Linux 4.19 and later)."""


class Sent:
    """What was sent in the runs since."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        """folder: made here."""
        folder.mkdir()
        self._folder = folder
        now, pack = threading.local(), put.Deposit.pack
        connect, send, begin, transfer = (
            ProcessGroup.__init__,
            ProcessGroup.send,
            Sending.__init__,
            Sending.transfer,
        )

        def connecting(group: Any, *args: Any, **knobs: Any) -> None:
            before = set(_connections())
            connect(group, *args, **knobs)
            group.sockets = set(_connections()) - before

        def sending(group: Any, tensor: Any, peer: int, tag: int) -> Any:
            end = getattr(now, "end", None)
            # a greeting; a word that bytes are there
            if end is None or (end._deposits is not None and tag < SUMS_TAG):
                return send(group, tensor, peer, tag)
            self._write(**group.peers[peer], sender=group.rank, tag=tag, nbytes=tensor.nbytes)
            return send(group, tensor, peer, tag)

        def beginning(end: Any, writer: Any, form: Any, stop: Any) -> None:
            begin(end, writer, form, stop)
            group = end._exchange._group
            group.peers = {
                form.sources + column: {"to": reader, "receiver": rank}
                for reader, columns in form.columns.items()
                for rank, column in enumerate(columns)
            }
            for peer, fragment in [
                (peer, each)
                for peer, chunks in end._chunks.items()
                for chunk in chunks
                for each in chunk.fragments
            ]:
                self._write(
                    **group.peers[peer],
                    sender=writer.rank,
                    epoch=form.epoch,
                    tensor=fragment.copy.tensor,
                    part=fragment.nbytes,
                )

        def transferring(end: Any, turn: Any, deadline: float) -> Any:
            now.end = end
            try:
                outcome = transfer(end, turn, deadline)
            finally:
                del now.end
            group = end._exchange._group
            kernel = _bytes_sent(group.sockets)
            for reader in turn.readers:
                self._write(to=reader, sender=group.rank, version=turn.version, kernel=kernel)
            return outcome

        def packing(deposit: Any, sums: Any) -> Any:
            group = now.end._exchange._group
            self._write(
                **group.peers[deposit.peer],
                sender=group.rank,
                tag=deposit.tag,
                nbytes=sum(there.nbytes for there in deposit._copier._destinations),
            )
            return pack(deposit, sums)

        patch.setattr(put.Deposit, "pack", packing)
        patch.setattr(ProcessGroup, "__init__", connecting)
        patch.setattr(ProcessGroup, "send", sending)
        patch.setattr(Sending, "__init__", beginning)
        patch.setattr(Sending, "transfer", transferring)

    def payload(self, to: str) -> dict[tuple[int, int], int]:
        """Bytes of weights by (trainer's rank, reader's rank)."""
        found: dict[tuple[int, int], int] = defaultdict(int)
        for line in self._lines(to):
            if line.get("tag", SUMS_TAG) < SUMS_TAG:
                found[line["sender"], line["receiver"]] += line["nbytes"]
        return dict(found)

    def transfers(self, to: str) -> dict[tuple[int, int], int]:
        """How many versions each pair brought to their end: the sums of its bytes are what it sends
        last.
        """
        found: dict[tuple[int, int], int] = defaultdict(int)
        for line in self._lines(to):
            found[line.get("sender"), line.get("receiver")] += line.get("tag") == SUMS_TAG
        return {pair: count for pair, count in found.items() if count}

    def kernel(self, to: str) -> dict[int, int]:
        """By trainer's rank, bytes that the kernel has sent over the sockets of its process
        groups.
        """
        groups: dict[tuple[int, str], int] = {}
        for line in self._lines(to):
            for number, nbytes in line.get("kernel", {}).items():
                key = line["sender"], number
                groups[key] = max(groups.get(key, 0), nbytes)
        found: dict[int, int] = defaultdict(int)
        for (sender, _), nbytes in groups.items():
            found[sender] += nbytes
        return dict(found)

    def parts(self, to: str) -> dict[str, int]:
        """By tensor, the most bytes of it that one rank sends another of one version."""
        found: dict[tuple[Any, ...], int] = defaultdict(int)
        for line in self._lines(to):
            if "part" in line:
                found[line["tensor"], line["sender"], line["receiver"], line["epoch"]] += line[
                    "part"
                ]
        most: dict[str, int] = {}
        for (tensor, *_), nbytes in found.items():
            most[tensor] = max(most.get(tensor, 0), nbytes)
        return most

    def _write(self, **line: Any) -> None:
        with (self._folder / f"{os.getpid()}.jsonl").open("a") as out:
            out.write(json.dumps(line) + "\n")

    def _lines(self, to: str) -> Iterator[dict[str, Any]]:
        for path in sorted(self._folder.iterdir()):
            for text in path.read_text().splitlines():
                line = json.loads(text)
                if line["to"] == to:
                    yield line


def _connections() -> Iterator[tuple[int, str]]:
    """Connected TCP sockets of this process: (descriptor, the kernel's name for it)."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            name = str(entry.readlink())
            if not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                if (
                    found.family in (socket.AF_INET, socket.AF_INET6)
                    and found.type == socket.SOCK_STREAM
                ):
                    found.getpeername()
                    yield int(entry.name), name
        except OSError:
            continue


def _bytes_sent(connections: set[tuple[int, str]]) -> dict[str, int]:
    """What each has sent, once nothing waits in it."""
    found = {}
    for number, name in connections:
        with socket.socket(fileno=os.dup(number)) as connection:
            deadline = time.monotonic() + 5.0
            while _waiting(connection) and time.monotonic() < deadline:
                time.sleep(0.001)
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 280)
        found[name] = struct.unpack_from("<Q", info, _BYTES_SENT)[0]
    return found


def _waiting(connection: socket.socket) -> int:
    return struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, b"\0" * 4))[0]


def crossed(folder: Path) -> dict[str, dict[str, list[int]]]:
    """By edge, what was sent, received and acknowledged: batches, rows, bytes."""
    return known_edges(RunFolder.open(folder).read_json("times.json")["edges"])


def agree(folder: Path) -> dict[str, dict[str, list[int]]]:
    """The same, once it is sure that no end has counted what the other cannot have."""
    found = crossed(folder)
    for edge, ends in found.items():
        for least, count, most in zip(
            ends["acknowledged"], ends["received"], ends["sent"], strict=True
        ):
            assert 0 < least <= count <= most, (edge, ends)
    return found
