"""The scheduler of a run over many hosts: processor share, time from a heartbeat to what follows,
start, memory.

python -m bench.controller [--ranks 1024] [--workers 64 512 4096] [--seconds 20] [--json FILE]
[--profile FILE]

The scheduler is the product's, with its sockets over tcp and CURVE, its table, its snapshot and its
view; agents and workers are played by another process (`bench.controller.played`). Eight workers to
a host. --ranks: generators of 8 ranks each, and a trainer that has half of all ranks. Of a worker
of several ranks the first alone speaks to the scheduler, so 1,024 ranks are 66 workers and 128
agents. Beside it workers ask the service of the ledger (`bench.controller.callers`).
"""

import argparse
import contextlib
import cProfile
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from msgspec import structs

from bench.controller.callers import GROUPS, SOURCE, TRAINER, Calls
from bench.controller.cast import Call, Size, graph, planned
from bench.report import Report
from dataflow.agent.forkserver_client import Event
from dataflow.agent.messages import Begin, Built
from dataflow.folder.ledger import Ledger
from dataflow.folder.ledger_service.service import LedgerProcess
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits
from dataflow.runtime import RunSettings
from dataflow.scheduler.agents import Agents
from dataflow.scheduler.control import Scheduler
from dataflow.scheduler.control_server import Client, HostsControlServer
from dataflow.scheduler.events import Received
from dataflow.scheduler.progress import ProgressWatch
from dataflow.scheduler.requests import Request
from dataflow.system.clocks import RunClock, Seldom
from dataflow.system.security import RunKeys
from dataflow.worker.host import Settings

LISTEN = "127.0.0.1"
FILES = 1024
"""Open files of a process in a default shell."""


def main() -> None:
    """Measure each number of workers, and show the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.controller", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1024])
    parser.add_argument("--workers", type=int, nargs="*", default=[64, 512, 4096])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help="of the steady state, for pstats")
    wishes = parser.parse_args()
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    report = Report("controller", wishes.json)
    sizes = [Size.of_ranks(ranks) for ranks in wishes.ranks]
    for size in [*sizes, *(Size(workers=workers) for workers in wishes.workers)]:
        figures = measure(size, wishes.seconds, wishes.profile)
        report.add(case="one scheduler", system=size.name, **figures)
    report.show()


class CountingServer(HostsControlServer):
    """Counts the messages of workers."""

    messages = 0

    def wait(
        self, wait_s: float
    ) -> tuple[list[Received], list[tuple[Client, Request]], list[Event]]:
        """As the server's."""
        heard, requests, events = super().wait(wait_s)
        self.messages += len(heard)
        return heard, requests, events


def measure(size: Size, seconds: float, profile: Path | None) -> dict[str, Any]:
    """Of one run, from its start to its end."""
    folder = Path(tempfile.mkdtemp(prefix="controller-"))
    try:
        with contextlib.ExitStack() as open_:
            return _measured(size, seconds, profile, folder, open_)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measured(
    size: Size, seconds: float, profile: Path | None, folder: Path, open_: contextlib.ExitStack
) -> dict[str, Any]:
    for below in ("logs", "rollouts", "checkpoints"):
        (folder / below).mkdir()
    controller, keys = graph(), RunKeys.make()
    ledger = RunFolder(folder).ledger
    Ledger.create(ledger, {TRAINER: [SOURCE]}).close()
    service = open_.enter_context(LedgerProcess())  # while this process has no threads
    ledger_at = service.serve(ledger, f"tcp://{LISTEN}:*", keys)
    limits = Limits()
    agents = Agents(LISTEN, keys, folder, hang_s=limits.hang_s)
    ours = Built(digest="same")
    names = [host.name for host in size.hosts]
    call = Call(
        address=agents.address,
        keys=keys.to_bytes().hex(),
        hosts=names,
        built=structs.asdict(ours),
        folder=str(folder),
    )
    player = open_.enter_context(_player("played", call.to_line()))
    began = time.monotonic()
    agents.assemble(len(names), limits.start_s)
    plan = planned(controller, size)
    server = CountingServer(agents, folder)
    agents.build(
        Begin(launch={}, inputs={}, whereabouts=asdict(server.whereabouts)), ours, limits.start_s
    )
    gathered_s = time.monotonic() - began
    clock = RunClock(0.0)
    settings = Settings(folder=str(folder), run=RunSettings(limits=limits))
    scheduler = Scheduler(controller, plan, settings, clock=clock, server=server)
    watch = ProgressWatch(controller, plan, RunFolder(folder), None, clock)
    closing = open_.enter_context(contextlib.ExitStack())
    closing.callback(scheduler.close)

    seldom = Seldom()

    def look() -> None:
        watch.note(scheduler.table.run, scheduler.heartbeats)
        watch.snapshot()

    def turn() -> None:
        scheduler.turn(0.1)
        scheduler.check()
        seldom(look)

    began, busy = time.monotonic(), time.process_time()
    scheduler.start()
    started_s, start_cpu_s = time.monotonic() - began, time.process_time() - busy
    asking = Calls(
        ledger=str(ledger),
        address=ledger_at,
        keys=keys.to_bytes().hex(),
        replicas=min(GROUPS, size.workers - 2),
    )
    callers = open_.enter_context(_player("callers", asking.to_line()))
    _for(3.0, turn)
    profiler = cProfile.Profile() if profile is not None else None
    if profiler is not None:
        profiler.enable()
    began, busy, before = time.monotonic(), time.process_time(), server.messages
    turns = _for(seconds, turn)
    share = (time.process_time() - busy) / (time.monotonic() - began)
    if profiler is not None:
        profiler.disable()
        profiler.dump_stats(str(profile))
    process = psutil.Process()
    files, rss = process.num_fds(), process.memory_info().rss
    restarts = sum(record.life.attempt for record in scheduler.table)
    messages = server.messages - before
    asked = json.loads(callers.communicate(timeout=60)[0] or "{}")
    closing.close()
    delays = json.loads(player.communicate(timeout=60)[0] or "{}").get("delays", [])
    return {
        "hosts": len(names),
        "gather s": round(gathered_s, 2),
        "start s": round(started_s, 2),
        "start cpu s": round(start_cpu_s, 2),
        "share %": round(100 * share, 1),
        "turns/s": round(turns / seconds, 1),
        "messages/s": round(messages / seconds),
        "delay median ms": _ms(delays, 0.5),
        "delay p99 ms": _ms(delays, 0.99),
        "decisions": len(delays),
        "rss MiB": rss >> 20,
        "files": files,
        "restarts": restarts,
        **{
            f"{kind} {name} ms": _ms(asked.get(kind, []), share)
            for kind in ("issue", "mark", "commit")
            for name, share in (("median", 0.5), ("p99", 0.99))
        },
    }


def _for(seconds: float, turn: Any) -> int:
    """How many turns."""
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        turn()
        count += 1
    return count


def _ms(delays: list[float], share: float) -> float | None:
    return (
        round(1000 * delays[min(len(delays) - 1, int(share * len(delays)))], 1) if delays else None
    )


@contextlib.contextmanager
def _player(module: str, line: str) -> Iterator[subprocess.Popen[str]]:
    """Hosts or callers, in a process of their own, which may open as many files as it likes."""

    def more() -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    command = [sys.executable, "-m", f"bench.controller.{module}"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=more
    ) as player:
        assert player.stdin is not None
        player.stdin.write(line + "\n")
        player.stdin.flush()
        try:
            yield player
        finally:
            player.kill()


if __name__ == "__main__":
    main()
