"""A rank behind rank 0, as a process: python -m operators.engine.parallel.follower FD, started by `launch`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dataflow.limits import Limits
from dataflow.node import Context
from dataflow.worker.ports import open_beside
from operators.engine.parallel import group
from operators.engine.parallel.lockstep import follow
from operators.engine.parallel.member import make_member
from operators.engine.parallel.shards import plain_pieces
from operators.engine.parallel.words import declaration_of
from operators.ranks.channel import Channel
from operators.ranks.exchange import last_words, next_word

FIRST_S = Limits().exchange_s
"""For words before the settings have come."""


def main(end: int) -> int:
    """Run one rank over the socket of this number; the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=end), FIRST_S)
    folder: Path | None = None
    try:
        channel.send({"started": os.getpid()})
        settings = next_word(channel, 0, os.getppid(), FIRST_S)
        folder = Path(settings["folder"])
        _serve(channel, folder, **{name: value for name, value in settings.items() if name != "folder"})
    except Exception as error:
        traceback.print_exc()
        last_words(channel, error)
        return 1
    finally:
        channel.close()
        group.leave()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _serve(
    channel: Channel, folder: Path, *, rank: int, size: int, device: str, declaration: dict[str, object], node: str,
    replica: int, site: Mapping[str, str] | None, threads: int, limits: Mapping[str, Any],
) -> None:  # fmt: skip
    """Join, load, build, and follow rank 0 to the end."""
    wait_s = Limits.from_plain(limits).exchange_s
    mesh = group.join(folder, rank, size, torch.device(device), wait_s)
    watch = group.watched(wait_s)

    @contextlib.contextmanager
    def loading() -> Iterator[None]:
        with watch.lifted():
            next_word(channel, rank, os.getppid(), wait_s)
            yield
            channel.send({"loaded": rank})
            next_word(channel, rank, os.getppid(), wait_s)

    context = Context(node=node, device=device, threads=threads)
    with watch.within():
        member = make_member(declaration_of(declaration), context, mesh, loading())
    pieces = plain_pieces(member.shards)
    with contextlib.ExitStack() as ends:
        beside = None
        if site is not None:
            own = {name: shard.local for name, shard in member.shards.items()}
            beside = open_beside(site, device, f"{node}-{replica}.{rank}", own, pieces)
            ends.callback(beside.close)
        channel.send({"pieces": pieces})
        follow(member, channel, rank, wait_s, watch, beside)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
