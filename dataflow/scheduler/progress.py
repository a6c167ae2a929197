"""Turns what the workers report into what the display shows, and keeps the accounts of the training
phase.
"""

import collections
import itertools
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from dataflow.display import EdgeSnapshot, NodeSnapshot, Snapshot
from dataflow.display.formatting import Silence
from dataflow.draw.charts import CURVE_NAMES
from dataflow.folder.run_folder import RunFolder
from dataflow.graph import Graph
from dataflow.history.summary import live_command
from dataflow.node import Generate
from dataflow.planning.plan import Plan
from dataflow.planning.wiring import edges
from dataflow.scheduler.state_machine import RunStateMachine
from dataflow.scoring.failure import failures_told
from dataflow.structure import feeding, leading, lines_of
from dataflow.system.files import tail
from dataflow.system.native import STARTING
from dataflow.worker.kept_counts import CrossedByFile, total
from dataflow.worker.state_clock import BESIDE, STATES

_WINDOW_S, _LONGEST_S, _APART_S = 5.0, 60.0, 0.5
"""The window of rates: its least length, its length where nothing comes in, and the pause between
two kept moments."""
_LOOKED_AT = 8
"""Logs of workers that start."""
_BUSY = "busy"
_Spent: TypeAlias = dict[str, dict[str, float]]
"""Seconds, by state and node."""
_COUNTED = (
    "tokens",
    "looked",
    "prefilled",
    "replayed_steps",
    "version",
    "step",
    "turns",
    "world_s",
)
"""Counts of work in a status."""
_DECODED = "decode_"
"""The prefix of counts of decode steps, by how many rollouts they carry on."""
_DOING = {"first_evaluation": "first evaluation", "last_evaluation": "last evaluation"}
"""Text for the phases that make no steps."""
_DRAINING = "stopping after the step under way"


class ProgressWatch:
    """Reports in, snapshots out.

    consumes: the heartbeats of all workers, the lines of metrics.jsonl
    produces: snapshots for the display; wall and busy seconds of the training phase
    waits for: nothing
    unblocked by: -
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        folder: RunFolder,
        steps: int | None,
        clock: Callable[[], float] = time.monotonic,
        begun: Mapping[str, int] | None = None,
    ) -> None:
        """begun: by trainer, steps that parts of the run before this one have made."""
        self._graph, self._plan, self._folder, self._steps, self._clock = (
            graph,
            plan,
            folder,
            steps,
            clock,
        )
        self._began, self._look = clock(), live_command(folder)
        self._training: tuple[float, _Spent] | None = None
        self._trained: tuple[float, _Spent] | None = None
        self._nodes: dict[str, dict[str, Any]] = {}
        self._summed: dict[tuple[str, str], float] = {}
        self._spent: _Spent = {_BUSY: {}, BESIDE: {}}
        self._depths: dict[str, tuple[int, int]] = {}
        self.crossed: dict[str, dict[str, list[int]]] = {}
        """By edge what was sent, received and acknowledged since its workers' first attempts:
        batches, rows, bytes."""
        self._past: collections.deque[tuple[float, dict[str, dict[str, Any]]]] = collections.deque()
        self._leading = leading(graph)
        self._leader = next(iter(self._leading), None)
        self._begun = (begun or {}).get(self._leader or "", 0)
        self._last_step: dict[str, Any] = {}
        """The newest line of the leading trainer."""
        self._accuracies: tuple[float, float] | None = None
        """Lines of the first evaluation and of the last."""
        self._outcomes: collections.Counter[str] = collections.Counter()
        """Groups in all its lines: trained, dropped."""
        self._read = 0
        """Bytes of metrics.jsonl that are read; the lines themselves stay there."""
        self._doing = ""
        self._silence = Silence()
        self._said: set[tuple[str, str]] = set()
        """Notices of nodes that the user has seen."""
        self.notices: list[str] = []
        """Sentences for the user."""

    @property
    def seconds(self) -> float:
        """Wall seconds of the training phase, so far or in all."""
        if self._training is None:
            return 0.0
        return (self._trained[0] if self._trained else self._clock()) - self._training[0]

    @property
    def busy_seconds(self) -> dict[str, float]:
        """By node, seconds at work during the training phase, in the mean of its replicas."""
        return self._during_training(_BUSY)

    @property
    def beside_seconds(self) -> dict[str, float]:
        """The part of these that the nodes' own processes spent."""
        return self._during_training(BESIDE)

    def _during_training(self, state: str) -> dict[str, float]:
        if self._training is None:
            return {}
        begin, end = (
            self._training[1][state],
            (self._trained[1] if self._trained else self._spent)[state],
        )
        return {node: spent - begin.get(node, 0.0) for node, spent in end.items()}

    @property
    def activity(self) -> dict[str, dict[str, Any]]:
        """By node, since its processes began and summed over them: seconds, rows, and what it
        counts of its work.
        """
        return {
            name: {
                "replicas": _present(node),
                "rows_in": node["rows_in"],
                "rows_out": node["rows_out"],
                **{key: round(value, 4) for key, value in node["seconds"].items()},
                "measured": round(node["measured_s"], 4),
                **{
                    key: count
                    for key, count in node["status"].items()
                    if key in _COUNTED or key.startswith(_DECODED)
                },
            }
            for name, node in self._nodes.items()
        }

    def to_plain(self) -> dict[str, Any]:
        """What the next scheduler cannot find out, times on the machine's clock; `take_up` gives it
        back.
        """
        return {"began": self._began, "training": self._training, "trained": self._trained}

    def take_up(self, plain: Mapping[str, Any]) -> None:
        """Be where the watch was that wrote this."""
        self._began, self._training, self._trained = (
            plain["began"],
            plain["training"],
            plain["trained"],
        )

    def note(self, run: RunStateMachine, heartbeats: Mapping[str, Mapping[str, Any]]) -> None:
        """Take in the newest heartbeats."""
        now = self._clock()
        self._merge(heartbeats)
        self._add_up()
        for name, node in self._nodes.items():
            notice = str(node["status"].get("notice") or "")
            if notice and (name, notice) not in self._said:
                self._said.add((name, notice))
                self.notices.append(f"'{name}': {notice}")
        if self._training is None and run.phase not in ("starting", "first_evaluation"):
            self._training = (now, self._spent_so_far())
        if self._training and self._trained is None and run.phase in ("last_evaluation", "over"):
            self._trained = (now, self._spent_so_far())
        self._doing = _DRAINING if run.draining else _DOING.get(run.phase, "")
        if len(self._past) > 1 and now - self._past[-2][0] < _APART_S:
            self._past.pop()
        self._past.append((now, self._nodes))
        while len(self._past) > 2 and now - self._past[1][0] > _LONGEST_S:
            self._past.popleft()
        self._tail()

    def count(
        self, heartbeats: Mapping[str, Mapping[str, Any]], files: CrossedByFile | None = None
    ) -> None:
        """Take in what has crossed the edges, of heartbeats, and of the files that workers have
        left at the end.
        """
        self.crossed = total(
            [*(heartbeat.get("crossed", {}) for heartbeat in heartbeats.values()), files or {}]
        )

    def starting(self, late: Collection[str]) -> Snapshot:
        """The workers that are not ready yet, as text."""
        waiting = {worker.rpartition("-")[0] for worker in late}
        names = [
            name for name in self._graph.operators if self._plan.placements[name].worker in waiting
        ]
        nodes = tuple(
            NodeSnapshot(name=name, state="starting" if name in names else "ready")
            for name in self._graph.operators
        )
        return Snapshot(
            graph=self._graph.name,
            step=self._begun,
            steps=self._steps,
            doing=f"starting {', '.join(names)}{self._held_by(late)}" if names else "",
            elapsed_s=self._clock() - self._began,
            nodes=nodes,
        )

    def _held_by(self, late: Collection[str]) -> str:
        """What delays one of them, if its log ends with that."""
        first = itertools.islice(late, _LOOKED_AT)
        last = [
            tail(self._folder.logs / f"{name}.log").rstrip().rpartition("\n")[2] for name in first
        ]
        starting = [line.removeprefix(STARTING) for line in last if line.startswith(STARTING)]
        return f" ({starting[0]})" if starting else ""

    def snapshot(self) -> Snapshot:
        """The run as it is now."""
        last, scores = self._last_step, self._accuracies
        step = max(last.get("step", 0), self._begun)
        elapsed = self._clock() - self._began
        left_s = None
        if self._steps and step > self._begun and self._training:
            left_s = (self._steps - step) * self.seconds / (step - self._begun)
        bounds = [bound.max_staleness for bound in self._plan.bounds.values()]
        return Snapshot(
            graph=self._graph.name,
            step=step,
            steps=self._steps,
            doing=self._doing,
            version=self._version(),
            staleness_mean=last.get("staleness_mean"),
            staleness_max=last.get("staleness_max"),
            staleness_bound=max(bounds, default=None),
            reward=last.get("reward_mean"),
            accuracy=scores[1] if scores else None,
            accuracy_before=scores[0] if scores else None,
            tokens_per_s=self._rate(
                lambda nodes: sum(n["status"].get("tokens", 0) for n in nodes.values())
            ),
            rollouts_per_s=self._rate(
                lambda nodes: sum(nodes[n]["rows_in"] for n in self._leading if n in nodes)
            ),
            rollouts_active=self._active(),
            elapsed_s=elapsed,
            left_s=left_s,
            groups=self._groups(),
            look=self._look,
            nodes=tuple(self._node(name) for name in self._graph.operators),
            edges=self._edges(),
        )

    def curve(self) -> list[dict[str, Any]]:
        """What the learning curve shows of metrics.jsonl: of the trainer that leads, and of
        evaluations.
        """
        lines = (
            line_of_leader
            for _, line in self._folder.stream_metrics(0)
            for line_of_leader in lines_of([line], self._leader)
        )
        return [{name: line[name] for name in CURVE_NAMES if name in line} for line in lines]

    def _merge(self, heartbeats: Mapping[str, Mapping[str, Any]]) -> None:
        """Sum over the replicas of a node; those that left count with what they did."""
        nodes: dict[str, dict[str, Any]] = {}
        for heartbeat in heartbeats.values():
            member = heartbeat.get("member", "live")
            for name, report in heartbeat.get("nodes", {}).items():
                sums = nodes.setdefault(
                    name,
                    {
                        "status": {},
                        "seconds": dict.fromkeys((*STATES, BESIDE), 0.0),
                        "rows_in": 0,
                        "rows_out": 0,
                        "measured_s": 0.0,
                        "blocked": False,
                        "starved": False,
                        "ended": True,
                        "turns": set(),
                        "members": collections.Counter(),
                    },
                )
                sums["members"][member] += 1
                sums["rows_in"] += report["rows_in"]
                sums["rows_out"] += report["rows_out"]
                sums["measured_s"] += report.get("measured_s", 0.0)
                for state in ("blocked", "starved"):
                    sums[state] |= report[state] and member != "left"
                sums["turns"] |= {report.get("turn", "")} if member != "left" else set()
                sums["ended"] &= report["ended"] or member == "left"
                for key in sums["seconds"]:
                    sums["seconds"][key] += report["seconds"].get(key, 0.0)
                for key, value in report["status"].items():
                    both = key in sums["status"] and isinstance(value, int | float)
                    if key == "version":
                        if member == "live":
                            sums["status"][key] = min(value, sums["status"][key]) if both else value
                    else:
                        sums["status"][key] = sums["status"][key] + value if both else value
            for edge, (depth, capacity) in heartbeat.get("edges", {}).items():
                self._depths[edge] = (depth, capacity)
        self._nodes = nodes
        self.count(heartbeats)

    def _tail(self) -> None:
        """Take in what has been added to metrics.jsonl."""
        for place, added in self._folder.stream_metrics(self._read):
            self._read = place
            for line in lines_of([added], self._leader):
                if "eval_accuracy" in line:
                    first = self._accuracies[0] if self._accuracies else line["eval_accuracy"]
                    self._accuracies = (first, line["eval_accuracy"])
                else:
                    self._last_step = line
                    if line.get("step", 0) > self._begun:
                        self._outcomes["trained"] += line.get("groups", 0)
                        self._outcomes["dropped"] += sum((line.get("dropped") or {}).values())
                    if notice := self._silence.take(line):
                        self.notices.append(notice)

    def _groups(self) -> dict[str, int]:
        """Groups of the training sources, as the nodes report them: in this part of the run."""
        issued = sum(
            n["rows_out"]
            for name, n in self._nodes.items()
            if self._graph.operators[name].kind == "source" and name not in self._plan.on_demand
        )
        return {
            "issued": issued,
            "trained": self._outcomes["trained"],
            "dropped": self._outcomes["dropped"],
        }

    def _add_up(self) -> None:
        """Seconds at work so far, on the mean over the replicas that there were at each time."""
        for name, node in self._nodes.items():
            for state, sums in self._spent.items():
                spent, before = node["seconds"][state], self._summed.get((name, state), 0.0)
                self._summed[name, state] = spent
                sums[name] = sums.get(name, 0.0) + (spent - before) / max(1, _present(node))

    def _spent_so_far(self) -> _Spent:
        return {state: dict(sums) for state, sums in self._spent.items()}

    def _version(self) -> int | None:
        """The oldest that the trainers which lead, and their generators, have."""
        names = {
            *self._leading,
            *(feedback.reader.name for feedback in feeding(self._graph).values()),
        }
        statuses = [node["status"] for name, node in self._nodes.items() if name in names]
        versions = [status["version"] for status in statuses if "version" in status]
        return int(min(versions)) if versions else None

    def _rate(self, of: Callable[[dict[str, dict[str, Any]]], float]) -> float | None:
        if len(self._past) < 2:
            return None
        now, count = self._past[-1][0], of(self._past[-1][1])
        at = self._window()
        while at and of(self._past[at][1]) == count:
            at -= 1
        then, before = self._past[at]
        return max(0.0, count - of(before)) / (now - then) if now > then else None

    def _window(self) -> int:
        """The moment that is `_WINDOW_S` ago, or the first."""
        now = self._past[-1][0]
        return max(
            (at for at, (then, _) in enumerate(self._past) if now - then >= _WINDOW_S), default=0
        )

    def _active(self) -> int | None:
        """Rollouts that are being generated: of episodes, not the turns that they ask a generator
        for.
        """
        generates = [
            operator
            for operator in self._graph.operators.values()
            if isinstance(operator, Generate)
        ]
        asked_names = {generator.asks.name for generator in generates if generator.asks is not None}
        counts = [
            self._nodes[generator.name]["status"].get("active")
            for generator in generates
            if generator.name in self._nodes and generator.name not in asked_names
        ]
        active = [int(count) for count in counts if count is not None]
        return sum(active) if active else None

    def _node(self, name: str) -> NodeSnapshot:
        node = self._nodes.get(name)
        if node is None:
            return NodeSnapshot(name=name, state="starting")
        before = self._past[self._window()][1].get(name, node) if self._past else node
        spent = {key: node["seconds"][key] - before["seconds"][key] for key in STATES}
        whole = sum(spent.values())
        status = node["status"]
        rows = "rows_in" if self._graph.operators[name].kind == "sink" else "rows_out"
        return NodeSnapshot(
            name=name,
            state=_state(node, spent),
            rate=self._rate(lambda nodes: nodes.get(name, node)[rows]),
            queue=_whole(status.get("queue", status.get("waiting"))),
            **{state: spent[state] / whole if whole else None for state in STATES},
            note=_note(status, node["members"], self._waited_for(name)),
            replicas=_present(node),
        )

    def _waited_for(self, name: str) -> str:
        """What a node that waits for its turn waits for: the node that has it."""
        if _turn(self._nodes[name]) != "waits":
            return ""
        mates = [
            mate
            for mate in self._plan.turns_of(name)
            if "awake" in self._nodes.get(mate, {}).get("turns", ())
        ]
        return f"for {mates[0]}" if mates else "for its turn"

    def _edges(self) -> tuple[EdgeSnapshot, ...]:
        all_edges = edges(self._graph)
        sources = len({edge.source for edge in all_edges}) > 1
        return tuple(
            EdgeSnapshot(
                producer=edge.producer,
                consumer=edge.consumer,
                source=edge.source if sources else "",
                depth=self._depths[edge.name][0],
                capacity=self._depths[edge.name][1],
            )
            for edge in all_edges
            if edge.name in self._depths
        )


def _present(node: Mapping[str, Any]) -> int:
    """Replicas that are at work, those that are leaving included."""
    members = node["members"]
    return int(members["live"] + members["leaving"] + members["stopping"])


def _state(node: Mapping[str, Any], spent: Mapping[str, float]) -> str:
    """What a node does, after it has spent these seconds."""
    if node["members"]["restarting"] and not _present(node):
        return "restarting"
    if node["ended"]:
        return "ended"
    if _turn(node) in ("waits", "asleep"):
        return "waiting" if _turn(node) == "waits" else "asleep"
    if node["blocked"]:
        return "blocked"
    return "working" if spent["busy"] else "starved" if node["starved"] else "waiting"


def _turn(node: Mapping[str, Any]) -> str:
    """Of a node's replicas, which are awake together: awake, waits, asleep; empty where its devices
    are its own.
    """
    return next((word for word in ("awake", "waits", "asleep") if word in node["turns"]), "")


def _note(status: Mapping[str, Any], members: Mapping[str, int], waited_for: str = "") -> str:
    parts = [waited_for] if waited_for else []
    parts += [
        f"{members[state]} {state}"
        for state in ("joining", "leaving", "restarting")
        if members.get(state)
    ]
    if "active" in status:
        parts.append(f"{status['active']} rollouts")
    if "version" in status:
        parts.append(f"v{status['version']}")
    if failed := failures_told(status):
        parts.append(failed)
    if status.get("retried"):
        parts.append(f"{status['retried']} tried again")
    if "eval_accuracy" in status:
        parts.append(f"last {status['eval_accuracy']:.2f}")
    return ", ".join(parts)


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)
