"""A snapshot as lines of styled text for a screen of a given size: pure, so tests read what users
see.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rich.cells import cell_len

from dataflow.display.formatting import (
    Glyphs,
    age,
    clean,
    count,
    duration,
    fit,
    fit_right,
    known,
    rate,
    score,
    several,
    share,
    sparkline,
    split_bar,
)
from dataflow.structure import edge_name

# What the display shows, as plain values; None or NaN: not known yet.


@dataclass(frozen=True, kw_only=True)
class NodeSnapshot:
    """One operator, all its replicas together."""

    name: str
    replicas: int = 1
    """How many of it are at work."""
    state: str = ""
    """A word: starting, running, waiting, draining, done, dead, ..."""
    rate: float | None = None
    """Rows per second."""
    queue: int | None = None
    """Rows that wait inside it."""
    busy: float | None = None
    """Share of the last seconds spent at work, 0 to 1."""
    waiting: float | None = None
    """Share spent without input, or without its turn."""
    starved: float | None = None
    """Share in which it had input, and only newer weights would have let it begin."""
    blocked: float | None = None
    """Share spent waiting for room further on (back-pressure)."""
    note: str = ""
    """A few words, such as `v39` or `12 slots`."""


@dataclass(frozen=True, kw_only=True)
class EdgeSnapshot:
    """A data edge. What its consumer has passed on stays on it until the next nodes are done with
    it.
    """

    producer: str
    consumer: str
    source: str = ""
    """The source; for the display only where two edges join the same nodes."""
    depth: int | None = None
    """Rows that arrived and are not acknowledged; None: not known."""
    capacity: int | None = None
    """Most rows that may be on their way."""

    @property
    def name(self) -> str:
        return edge_name(self.producer, self.consumer, self.source)

    @property
    def is_full(self) -> bool:
        """Whether it takes no more rows."""
        return self.depth is not None and self.capacity is not None and self.depth >= self.capacity


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The run at one moment."""

    graph: str = ""
    """Name of the graph."""
    step: int | None = None
    """Steps done."""
    steps: int | None = None
    """Steps to do; None: until the prompts end."""
    doing: str = ""
    """What goes on beside the steps, in a few words: `starting trainer`, `first evaluation`; empty:
    steps are made."""
    version: int | None = None
    """Version that the generator uses."""
    staleness_mean: float | None = None
    """Mean staleness of the last step, in versions."""
    staleness_max: float | None = None
    """Largest staleness of the last step, in versions."""
    staleness_bound: int | None = None
    """max_staleness of the graph."""
    reward: float | None = None
    """Mean of the last step."""
    accuracy: float | None = None
    """eval_accuracy of the last round."""
    accuracy_before: float | None = None
    """eval_accuracy before the first step."""
    tokens_per_s: float | None = None
    """Generated tokens per second, of rollouts that have not ended too."""
    rollouts_per_s: float | None = None
    """Rollouts a second that reach the trainer."""
    rollouts_active: int | None = None
    """Rollouts that are being generated now."""
    elapsed_s: float | None = None
    left_s: float | None = None
    """Estimated seconds to the end."""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Prompt groups by ledger state."""
    warnings: tuple[str, ...] = ()
    """The last warnings, newest last."""
    look: str = ""
    """The command that shows more of it."""
    nodes: tuple[NodeSnapshot, ...] = ()
    edges: tuple[EdgeSnapshot, ...] = ()

    @property
    def only_begun(self) -> bool:
        """Whether rollouts are being generated, and none has reached the trainer lately: their rate
        is unknown.
        """
        return bool(self.rollouts_active) and not self.rollouts_per_s


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The run at its end."""

    graph: str = ""
    outcome: str = "finished"
    """finished, stopped, failed."""
    steps: int | None = None
    wall_s: float | None = None
    rollouts: int | None = None
    """Rollouts that were trained on."""
    dropped: int | None = None
    """Groups dropped."""
    failed: str = ""
    """Rollouts that failed, by node and cause."""
    does_not_apply: str = ""
    """Rollouts that a scorer does not apply to, by scorer."""
    reward_before: float | None = None
    """Mean over the first `reward_steps`."""
    reward_after: float | None = None
    """Mean over the last ones."""
    reward_steps: int = 0
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    efficiency: float | None = None
    """Share of the time in which the run's bottleneck was at work."""
    bounded_by: str = ""
    """The bottleneck."""
    staleness_mean: float | None = None
    staleness_max: float | None = None
    foreseen: tuple[str, ...] = ()
    """The forecast beside the measurements; empty: there was none."""
    restarts: int | None = None
    """How often a worker was started again."""
    faults: tuple[str, ...] = ()
    """What failed, how the run went on, and what was repeated."""
    changes: tuple[tuple[str, str], ...] = ()
    """What was changed on the way, in order: swapped or set, and to what."""
    hosts: str = ""
    """Which node was planned where, in a run over hosts."""
    signal: str = ""
    """Scorers that told no rollout from its siblings, where the whole run could learn nothing."""
    verdict: str = ""
    """The ledger's verdict, one line."""
    is_clean: bool | None = None
    """Whether the verdict is good."""
    models: tuple[str, ...] = ()
    """Paths of the models that were trained, as they are now."""
    folder: str = ""
    """Path of the run folder."""
    folder_bytes: int | None = None
    """Its size."""
    not_kept: str = ""
    """The part of it that was not kept, in a few words."""
    commands: tuple[tuple[str, str], ...] = ()
    """Commands that look further, each with what it shows."""


# A snapshot as lines.

Styled: TypeAlias = tuple[str, str]
StyledLine: TypeAlias = list[Styled]
"""Pieces of text, each with the name of its style."""

SPARK = 20


@dataclass(frozen=True, kw_only=True)
class Screen:
    """Where the lines go."""

    width: int = 80
    """Cells."""
    height: int = 24
    """Lines that may be used."""
    glyphs: Glyphs = Glyphs()


def lines(snapshot: Snapshot, rewards: Sequence[float], screen: Screen) -> list[StyledLine]:
    """Everything about the run in at most `screen.height` lines of at most `screen.width` cells."""
    if screen.width < 8 or screen.height < 1:
        return []
    all_lines = [_progress(snapshot, screen), *_facts(snapshot, rewards, screen)]
    free = screen.height - len(all_lines)
    warnings = [clean(text) for text in snapshot.warnings][-2:] if free >= 6 else []
    edges = _edges(snapshot.edges, screen)
    free -= len(warnings) + bool(warnings)
    nodes = _nodes(snapshot.nodes, screen, max(free - 2, 0))
    if nodes:
        all_lines += [[], *nodes]
        free -= len(nodes) + 1
    if edges and free >= 3:
        shown = (
            edges
            if len(edges) < free
            else [*edges[: free - 2], [(f"  {screen.glyphs.more}", "dim")]]
        )
        all_lines += [[], *shown]
        free -= len(shown) + 1
    if snapshot.look and free >= 2:
        all_lines += [[], [(clean(snapshot.look), "accent"), ("  shows it in a browser", "dim")]]
    if warnings:
        all_lines += [[], *([("! ", "warning"), (text, "warning")] for text in warnings)]
    return [_cut(line, screen) for line in all_lines[: screen.height]]


def text_of(line: StyledLine) -> str:
    """The line without its styles."""
    return "".join(text for text, _ in line)


def _progress(snapshot: Snapshot, screen: Screen) -> StyledLine:
    glyphs = screen.glyphs
    step, steps = known(snapshot.step), known(snapshot.steps)
    name = clean(snapshot.graph) or "run"
    total = f"/{count(steps)}" if steps is not None else ""
    counted = f"step {count(step, '0')}{total}"
    times = f"{duration(snapshot.elapsed_s, '0:00')} elapsed"
    if known(snapshot.left_s) is not None:
        times += f", {duration(snapshot.left_s)} left"
    room = screen.width - cell_len(name) - cell_len(counted) - cell_len(times) - 6
    if room < -2:
        times = f"{duration(snapshot.elapsed_s, '0:00')} elapsed"
    line = [(name, "title"), ("  ", "")]
    if steps and room >= 8:
        width = min(room, 60)
        done = round(share((step or 0.0) / steps) * width)
        line += [(glyphs.done * done, "good"), (glyphs.todo * (width - done), "dim"), ("  ", "")]
    return [*line, (counted, "strong"), ("  ", ""), (times, "")]


def _facts(snapshot: Snapshot, rewards: Sequence[float], screen: Screen) -> list[StyledLine]:
    """Facts of the run, as many to a line as fit."""
    glyphs = screen.glyphs
    facts: list[StyledLine] = []

    def add(name: str, value: str, after: StyledLine | None = None) -> None:
        facts.append([(f"{name} ", "dim"), (value, "strong"), *(after or [])])

    if snapshot.doing:
        facts.append([(clean(snapshot.doing), "warning")])
    if known(snapshot.reward) is not None:
        spark = sparkline(rewards, SPARK, glyphs.spark) if len(rewards) > 1 else ""
        add("reward", score(snapshot.reward), [(" ", ""), (spark, "accent")] if spark else None)
    if known(snapshot.accuracy) is not None:
        before = known(snapshot.accuracy_before)
        start = f"{score(before)} {glyphs.arrow} " if before is not None else ""
        add("accuracy", start + score(snapshot.accuracy))
    if known(snapshot.staleness_mean) is not None:
        most = (
            f", max {age(snapshot.staleness_max)}"
            if known(snapshot.staleness_max) is not None
            else ""
        )
        bound = (
            f" of {age(snapshot.staleness_bound)}"
            if known(snapshot.staleness_bound) is not None
            else ""
        )
        add("staleness", age(snapshot.staleness_mean), [(f"{most}{bound}", "dim")])
    if known(snapshot.version) is not None:
        add("version", count(snapshot.version))
    if known(snapshot.rollouts_per_s) is not None and not snapshot.only_begun:
        facts.append([(rate(snapshot.rollouts_per_s), "strong"), (" rollouts/s", "dim")])
    if known(snapshot.rollouts_active):
        facts.append([(count(snapshot.rollouts_active), "strong"), (" rollouts under way", "dim")])
    if known(snapshot.tokens_per_s) is not None:
        facts.append([(rate(snapshot.tokens_per_s), "strong"), (" tokens/s", "dim")])
    groups = [
        f"{count(value)} {clean(state)}" for state, value in snapshot.groups.items() if known(value)
    ]
    if groups:
        add("groups", ", ".join(groups))
    return _flow(facts, screen.width)


def _flow(facts: Sequence[StyledLine], width: int) -> list[StyledLine]:
    flowed: list[StyledLine] = []
    used = width
    for fact in facts:
        size = cell_len(text_of(fact))
        if used + 3 + size > width:
            flowed.append(list(fact))
            used = size
        else:
            flowed[-1] += [("   ", ""), *fact]
            used += 3 + size
    return flowed


def _nodes(nodes: Sequence[NodeSnapshot], screen: Screen, room: int) -> list[StyledLine]:
    """A line per node; where they are too many, the busiest of them in their order."""
    if not nodes or room < 2:
        return []
    glyphs, width = screen.glyphs, screen.width
    shown = list(nodes)
    if len(nodes) + 1 > room:
        ranked = sorted(range(len(nodes)), key=lambda at: -share(nodes[at].busy))[
            : max(room - 2, 0)
        ]
        shown = [nodes[at] for at in sorted(ranked)]
    names = [several(node.name, node.replicas, glyphs) for node in shown]
    name_width = min(max([8, *map(cell_len, names)]), max(width // 3, 8), 28)
    with_state, with_note = width >= 64, width >= 76
    fixed = name_width + 24 + 11 * with_state + 20 * with_note
    bar = min(max(width - fixed, 4), 30)
    head = [fit("node", name_width)]
    if with_state:
        head.append(fit("state", 9))
    head += [fit_right("rows/s", 7), fit_right("queue", 6)]
    key = [
        (f"busy {glyphs.busy}", "good"),
        (f" blocked {glyphs.blocked}", "hot"),
        (f" starved {glyphs.starved}", "accent"),
        (f" waiting {glyphs.waiting}", "dim"),
    ]
    table: list[StyledLine] = [[("  ".join(head) + "  ", "dim"), *(key if bar >= 10 else key[:1])]]
    for node, name in zip(shown, names, strict=True):
        busy, blocked, starved, waiting = split_bar(
            node.busy, node.blocked, node.starved, bar, glyphs
        )
        line: StyledLine = [(fit(name, name_width, glyphs.more), "strong"), ("  ", "")]
        if with_state:
            line += [(fit(clean(node.state), 9, glyphs.more), _state_style(node.state)), ("  ", "")]
        line += [(fit_right(rate(node.rate, glyphs.dash), 7) + "  ", "")]
        line += [(fit_right(count(node.queue, glyphs.dash), 6) + "  ", "")]
        percent = f"{share(node.busy):4.0%}" if known(node.busy) is not None else "    "
        line += [
            (busy, "good"),
            (blocked, "hot"),
            (starved, "accent"),
            (waiting, "dim"),
            (f" {percent}", ""),
        ]
        if with_note and node.note:
            line.append((f"  {clean(node.note)}", "dim"))
        table.append(line)
    if len(shown) < len(nodes):
        table.append([(f"{glyphs.more} {len(nodes) - len(shown)} more nodes, less busy", "dim")])
    return table


def _state_style(state: Any) -> str:
    word = str(state)
    if word in ("dead", "failed", "error", "lost"):
        return "bad"
    return "warning" if word in ("starting", "draining", "restarting", "stopping") else ""


def _edges(edges: Sequence[EdgeSnapshot], screen: Screen) -> list[StyledLine]:
    """Depth of each edge against its capacity, two to a line where there is room."""
    if not edges:
        return []
    glyphs = screen.glyphs
    per_line = 2 if screen.width >= 76 else 1
    cell = (screen.width - 4 * (per_line - 1)) // per_line
    depths = [_depth(edge, glyphs) for edge in edges]
    depth_width = max(cell_len(text) for text in depths)
    beside = Counter((edge.producer, edge.consumer) for edge in edges)
    names = [_edge_name(edge, beside[edge.producer, edge.consumer] > 1, glyphs) for edge in edges]
    room = cell - depth_width - 2
    name_width = min(max(cell_len(name) for name in names), max(room - 6, 6))
    bar = min(max(room - name_width - 1, 0), 20)
    table: list[StyledLine] = []
    for at, (edge, name, depth) in enumerate(zip(edges, names, depths, strict=True)):
        full = round(_fill(edge) * bar)
        pieces: StyledLine = [
            (fit(name, name_width, glyphs.more) + " ", ""),
            (glyphs.full * full, "hot" if _fill(edge) > 0.95 else "accent"),
            (glyphs.free * (bar - full), "dim"),
            (" " + fit_right(depth, depth_width), "dim"),
        ]
        if at % per_line == 0:
            table.append(pieces)
        else:
            gap = cell + 4 - cell_len(text_of(table[-1]))
            table[-1] += [(" " * max(gap, 1), ""), *pieces]
    return table


def _edge_name(edge: EdgeSnapshot, is_parallel: bool, glyphs: Glyphs) -> str:
    source = f" ({clean(edge.source)})" if edge.source and is_parallel else ""
    return f"{clean(edge.producer)} {glyphs.arrow} {clean(edge.consumer)}{source}"


def _depth(edge: EdgeSnapshot, glyphs: Glyphs) -> str:
    return f"{count(edge.depth, glyphs.dash)}/{count(edge.capacity, glyphs.dash)}"


def _fill(edge: EdgeSnapshot) -> float:
    capacity = known(edge.capacity)
    return share((known(edge.depth) or 0.0) / capacity) if capacity else 0.0


def _cut(line: StyledLine, screen: Screen) -> StyledLine:
    """The pieces that fit."""
    pieces: StyledLine = []
    width = screen.width
    for text, style in line:
        size = cell_len(text)
        if size > width:
            if width > 0:
                pieces.append((fit(text, width, screen.glyphs.more), style))
            break
        if text:
            pieces.append((text, style))
        width -= size
    return pieces
