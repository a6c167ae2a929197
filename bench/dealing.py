"""Rank 0 of a trainer deals a step's rows to its other ranks: what it costs rank 0, and when the
last rank has its rows.

    python -m bench.dealing [--ranks 2 8 64 512] [--tensor-parallel 1] [--per-host 8] [--json FILE]

512 rollouts of 8,192 tokens in groups of 8. The other ranks are played by one process, which only
receives: one host's through its sockets, those of further hosts behind rank 0's line, over tcp and
CURVE. rows: batches to arrays. dealt: who computes what. hand over: until rank 0 may compute. last:
from the first share until the last rank has its own. word: until the last has heard a message
without rows, of which there is one for each micro-batch.
"""

import argparse
import contextlib
import multiprocessing
import os
import resource
import select
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import zmq

from bench.report import Figure, Report
from dataflow.limits import Limits
from dataflow.system.child import Child
from dataflow.system.messages import LENGTH, Life
from dataflow.system.security import RunKeys, dealer_to
from dataflow.worker import rank_messages as messages
from dataflow.worker.rank_line import RankLine
from operators.ranks.team import Team
from operators.training.learner.learner import Prepared
from operators.training.learner.rows import step_rows
from operators.training.parallel.lead import CODEC, Micro, addressed, dealt

GROUP, PROMPT, VOCABULARY = 8, 1024, 150_000
MICRO_BATCH_TOKENS = 16_384
WAIT_S = 120.0
COLUMNS = ("tokens", "mask", "logprobs", "versions", "advantage")


@dataclass
class Rounds:
    """Messages of which each rank receives as many."""

    ranks: int
    buffers: dict[int, bytearray] = field(default_factory=lambda: defaultdict(bytearray))
    heard: Counter[int] = field(default_factory=Counter)
    """By round, ranks that have its message."""
    counts: Counter[int] = field(default_factory=Counter)
    """By rank, messages."""

    def take(self, rank: int, data: bytes) -> bool:
        """Whether the last rank has its message of a round now."""
        buffer, is_over = self.buffers[rank], False
        buffer += data
        while len(buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(buffer)[0]
            if len(buffer) < end:
                break
            del buffer[:end]
            self.heard[self.counts[rank]] += 1
            is_over |= self.heard[self.counts[rank]] == self.ranks
            self.counts[rank] += 1
        return is_over


def play_host(ends: dict[int, socket.socket], report: Connection) -> None:
    """Ranks of rank 0's host: read what comes, and tell when the last has its message."""
    poll, rounds = select.poll(), Rounds(len(ends))
    for number in ends:
        poll.register(number, select.POLLIN)
    while True:
        for number, _ in poll.poll():
            if rounds.take(number, os.read(number, 1 << 18)):
                report.send(time.monotonic())


def play_hosts(address: str, keys: RunKeys, hosts: Sequence[str], report: Connection) -> None:
    """Further hosts, each with a line of its own to rank 0."""
    context: zmq.Context[Any] = zmq.Context()
    poller, far = zmq.Poller(), [host for host in hosts if host != hosts[0]]
    for host in dict.fromkeys(far):
        line = dealer_to(context, address, keys, {zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.LINGER: 0})
        line.connect(address)
        line.send(messages.TO_RANK_ZERO.encode(messages.Here(life=Life(), host=host)))
        poller.register(line, zmq.POLLIN)
    started, rounds = 0, Rounds(len(far))
    while True:
        for line, _ in poller.poll():
            match messages.FROM_RANK_ZERO.decode(b"".join(line.recv_multipart())):
                case messages.Start(rank=rank):
                    line.send(messages.TO_RANK_ZERO.encode(messages.Started(rank, 1)))
                    started += 1
                    if started == len(far):
                        report.send(time.monotonic())
                case messages.Bytes(rank=rank, data=data) if rounds.take(rank, data):
                    report.send(time.monotonic())


class Played(Child):
    """A rank that another process plays; it never ends by itself."""

    def __init__(self) -> None:
        super().__init__(0)
        self.returncode = 0


def main() -> None:
    """Measure each number of ranks, and show the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.dealing", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 8, 64, 512])
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--per-host", type=int, default=8)
    parser.add_argument("--json", type=Path)
    wishes = parser.parse_args()
    report = Report("dealing", wishes.json)
    groups = made_groups(wishes.rollouts, wishes.tokens)
    for ranks in wishes.ranks:
        for system, per_host in (("one host", ranks), ("hosts", wishes.per_host)):
            if per_host < ranks or system == "one host":
                figures = measure(groups, ranks, wishes.tensor_parallel, per_host)
                report.add(case=system, system=f"{ranks} ranks", **figures)
    report.show()


def made_groups(rollouts: int, tokens: int) -> list[pa.RecordBatch]:
    """Groups of one prompt, as a generator hands them over."""
    draw, groups = np.random.default_rng(0), []
    for group in range(rollouts // GROUP):
        ids = draw.integers(0, VOCABULARY, (GROUP, tokens), np.int32)
        ids[:, :PROMPT] = ids[0, :PROMPT]
        mask = np.tile(np.arange(tokens) >= PROMPT, GROUP)
        logprobs = np.where(mask, draw.standard_normal(mask.shape, np.float32), np.float32(0))
        lists = {
            "tokens": ids.ravel(),
            "mask": mask,
            "logprobs": logprobs.astype(np.float32),
            "versions": np.where(mask, 3, -1).astype(np.int32),
        }
        ends = pa.array(np.arange(GROUP + 1) * tokens, pa.int32())
        columns = {
            name: pa.ListArray.from_arrays(ends, pa.array(values)) for name, values in lists.items()
        }
        columns["group_id"] = pa.array([group] * GROUP)
        columns["rollout_id"] = pa.array(range(group * GROUP, (group + 1) * GROUP))
        columns["advantage"] = pa.array(draw.standard_normal(GROUP))
        groups.append(pa.RecordBatch.from_pydict(columns))
    return groups


def measure(
    groups: list[pa.RecordBatch], ranks: int, tensor_parallel: int, per_host: int
) -> dict[str, Figure]:
    """One step's rows, from Arrow to the last rank."""
    began, cpu = time.monotonic(), time.process_time()
    rows = step_rows(groups, COLUMNS)
    made = time.monotonic()
    step = Prepared(rows=rows, computed=np.arange(rows.rollouts))
    shares = dealt(step, ranks // tensor_parallel, MICRO_BATCH_TOKENS, False)
    split = time.monotonic()
    split_cpu = time.process_time()
    hosts = [f"h{rank // per_host}" for rank in range(ranks)]
    far = any(host != hosts[0] for host in hosts)
    keys = RunKeys.make()
    line = RankLine("127.0.0.1", keys, hosts) if far else None
    with _receivers(hosts, line, keys) as (team, ended):
        team.tell(Micro())
        ended()
        told = time.monotonic()
        team.tell(Micro())
        heard = ended() - told
        handed = time.monotonic()
        busy = time.process_time()
        team.deal(addressed(shares, tensor_parallel))
        free = time.monotonic()
        last = ended()
        busy, files = time.process_time() - busy, psutil.Process().num_fds()
    return {
        "rows s": made - began,
        "dealt s": split - made,
        "hand over s": free - handed,
        "last s": last - handed,
        "word s": heard,
        "cpu s": split_cpu - cpu + busy,
        "MiB": len(rows.tokens) * 13 / 2**20,
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "files": files,
    }


@contextlib.contextmanager
def _receivers(
    hosts: Sequence[str], line: RankLine | None, keys: RunKeys
) -> Iterator[tuple[Team, Callable[[], float]]]:
    """The played ranks once all are there, and what waits until the last has its rows: when that
    was.
    """
    ends: list[socket.socket] = []

    def start(end: socket.socket, rank: int) -> Child:
        if line is not None and hosts[rank] != hosts[0]:
            return line.start(end, rank)
        ends.append(end.dup())
        return Played()

    team = Team("trainer", len(hosts), start, Limits(), CODEC)
    players = multiprocessing.get_context("fork")
    started: list[tuple[Any, Connection]] = []
    played: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
    if ends:
        played.append((play_host, ({end.fileno(): end for end in ends},)))
    if line is not None:
        played.append((play_hosts, (line.address, keys, hosts)))
    for play, arguments in played:
        ours, theirs = players.Pipe()
        process = players.Process(target=play, args=(*arguments, theirs), daemon=True)
        process.start()
        started.append((process, ours))
    if line is not None:
        assert started[-1][1].poll(WAIT_S), "a host is missing"
        started[-1][1].recv()
    for end in ends:
        end.close()

    def ended() -> float:
        assert all(report.poll(WAIT_S) for _, report in started), "a rank lacks rows"
        return max(report.recv() for _, report in started)

    try:
        yield team, ended
    finally:
        if line is not None:
            line.close()
        team.close()
        for process, _ in started:
            process.kill()
            process.join()


if __name__ == "__main__":
    main()
