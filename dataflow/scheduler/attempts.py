"""What the scheduler knows of one worker, over all of its attempts: as plain values."""

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dataflow.limits import Limits
from dataflow.planning.wiring import Edge
from dataflow.worker.host import Settings
from dataflow.worker.link import ALONE

_COUNTERS = ("tokens", "scored", "failed", "restarts")
"""What a node's status counts from 0 in each process; all else in it is how things stand."""

_END_S = 5.0
"""For a worker that failed, or was killed, to be gone; then it is killed again."""
_LOADING = 4
"""A worker that is starting may be silent for so many times `Limits.hang_s`: imports hold up its beats."""

Beat = Mapping[str, Any]


@dataclass
class WorkerState:
    """One worker: the attempt under way, and what those before it did."""

    name: str
    nodes: list[str]
    settings: Settings
    """Of the attempt under way, or of the last one."""
    forked: float
    """When it was asked for, on the scheduler's clock."""
    heard: float
    """When it last said anything, on the scheduler's clock."""
    pid: int = 0
    """0: it has not said hello."""
    state: str = "forked"
    """forked | starting | ready | dying | down | stopping | left (in order, while the run goes on) | gone"""
    wired: bool = False
    """Whether it was told where to send, so that it may hear what changes."""
    cause: str = ""
    """Why it is dying, or down."""
    lasting: bool = False
    """Whether that is something which a restart does not mend."""
    dying_since: float = 0.0
    beat: Beat = field(default_factory=dict)
    earlier: Beat = field(default_factory=dict)
    """Of the attempts before this one, together."""
    addresses: Mapping[str, str] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """What a successor of the scheduler cannot learn from the forkserver or from beats."""
        return {"state": self.state, "addresses": dict(self.addresses), "earlier": dict(self.earlier)}

    @property
    def is_live(self) -> bool:
        """Whether its words count: neither waiting for a restart nor at its end."""
        return self.state not in ("down", "left", "gone")

    @property
    def is_away(self) -> bool:
        """Whether it has been at work in this run, and is not now."""
        return self.state in ("dying", "down") or (self.settings.attempt > 0 and self.state in ("forked", "starting"))

    @property
    def told(self) -> Beat:
        """The last beat, with the sums of all attempts."""
        return together(self.earlier, self.beat)

    def die(self, cause: str, now: float, *, lasting: bool = False) -> None:
        """It failed, or is being killed: of what it says from now on only sums count."""
        self.lasting |= lasting
        self.state, self.cause, self.dying_since = "dying", self.cause or cause, now

    def fall(self, cause: str) -> None:
        """The attempt under way has ended, and another one may follow."""
        self.earlier, self.beat = self.told, {}
        self.state, self.wired, self.pid, self.cause = "down", False, 0, cause

    def fork(self, settings: Settings, now: float) -> None:
        """An attempt begins."""
        self.settings, self.state, self.forked, self.heard = settings, "forked", now, now
        self.cause, self.lasting = "", False


def overdue(state: WorkerState, limits: Limits, now: float, *, begun: bool) -> str | None:
    """Why a worker is to be killed at `now`; None: it need not. begun: whether the run is past its start."""
    silent = now - state.heard
    if state.state == "dying":
        return state.cause if now - state.dying_since > _END_S else None
    if state.state == "ready":
        if silent > limits.hang_s:
            return f"has not answered for {silent:.0f} s"
        if (turned_s := state.beat.get("turned_s", 0.0)) > limits.stuck_s:
            return f"was stuck in one slice of work for {turned_s:.0f} s"
        if (asleep_s := state.beat.get("asleep_s", 0.0)) > limits.asleep_s:
            return f"was stuck in one slice of work, and has computed nothing for {asleep_s:.0f} s"
    elif begun and state.state == "starting" and silent > _LOADING * limits.hang_s:
        return f"has not answered for {silent:.0f} s while it started"
    elif state.state in ("forked", "starting") and state.is_away and now - state.forked > limits.start_s:
        return f"was not ready within {limits.start_s:.0f} s"
    return None


def together(earlier: Beat, now: Beat) -> Beat:
    """A beat whose sums are those of both; what is known only of earlier attempts stays as it was."""
    nodes = dict(earlier.get("nodes", {}))
    for name, known in nodes.items():
        nodes[name] = {**known, "blocked": False, "ended": False}
    for name, report in now.get("nodes", {}).items():
        nodes[name] = _added(nodes[name], report) if name in nodes else report
    return {**earlier, **now, "nodes": nodes}


def _added(before: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    status = dict(report["status"])
    for key in _COUNTERS:
        if key in status and key in before["status"]:
            status[key] += before["status"][key]
    return {
        **report, "status": status,
        "seconds": {key: value + before["seconds"].get(key, 0.0) for key, value in report["seconds"].items()},
        "rows_in": report["rows_in"] + before["rows_in"], "rows_out": report["rows_out"] + before["rows_out"],
    }  # fmt: skip


def how(status: int | None) -> str:
    """What a process did that ended with this status, for people; a signal's number is below 0."""
    if status is None:
        return "ended for an unknown reason"
    if status == ALONE:
        return "ended, as no scheduler spoke to it"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"died ({signal.Signals(-status).name})"
    except ValueError:
        return f"died (signal {-status})"


def obituary(state: WorkerState) -> str:
    """What became of a worker that was needed, for people."""
    return (
        f"worker '{state.name}' ({', '.join(state.nodes)}) {state.cause} while the run needed it; "
        f"see {state.settings.folder}/logs/{state.name}.log"
    )


def addresses(workers: Iterable[WorkerState]) -> dict[str, list[str]]:
    """By edge, the addresses of its receivers, replica by replica."""
    found: dict[str, list[str]] = {}
    for state in workers:
        for edge, address in state.addresses.items():
            found.setdefault(edge, []).append(address)
    return found


def is_of(state: WorkerState, message: Mapping[str, Any], edges: Iterable[Edge]) -> bool:
    """Whether a word names what belongs to this worker."""
    if message["kind"] == "beat":
        return set(message["nodes"]) <= set(state.nodes)
    if message["kind"] == "hello":
        ends = [edge for edge in edges if edge.consumer in state.nodes and edge.producer not in state.nodes]
        return {edge.name for edge in ends} <= set(message["addresses"])
    return True


def all_ended(node: str, workers: Iterable[WorkerState]) -> bool:
    """Whether every replica of a node says that its inputs have ended and it has nothing more to do."""
    reports = [state.beat.get("nodes", {}).get(node) for state in workers if node in state.nodes]
    return all(report and report["ended"] for report in reports)
