"""A layered drawing, left to right, computed from sizes and links alone: it knows no operator and
no SVG.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

from dataflow.draw import geometry
from dataflow.draw.geometry import (
    BackEdge,
    BackRoute,
    DrawnLayout,
    ForwardEdge,
    Point,
    Rect,
    Size,
    Spacing,
    spread,
)

# Where edges run: data links through the gaps between layers, back edges round the outside.


PORT = 7.0
"""Distance between two arrows that end at one box."""
CORNER = 12.0
"""Least distance of an arrow from the corner of its box."""
WIDEST_GAP = 190.0


@dataclass(frozen=True, kw_only=True)
class Column:
    """The strip that one layer takes."""

    left: float
    box_right: float
    right: float
    """Right end of the trunks."""
    top: float
    bottom: float


def columns_of(
    rows: Sequence[Sequence[int]],
    sizes: Sequence[Size],
    heights: Sequence[float],
    spacing: Spacing,
    after: Sequence[Sequence[int]],
) -> list[Column]:
    """The strips of all layers; a gap is wider where its links climb far."""
    columns: list[Column] = []
    left = 0.0
    for row in rows:
        box_right = left + max((sizes[item].width for item in row), default=0.0)
        right = box_right + max((sizes[item].trunk for item in row), default=0.0)
        columns.append(
            Column(
                left=left,
                box_right=box_right,
                right=right,
                top=min((heights[item] - sizes[item].up for item in row), default=0.0),
                bottom=max((heights[item] + sizes[item].down for item in row), default=0.0),
            )
        )
        climb = max(
            (abs(heights[head] - heights[item]) for item in row for head in after[item]),
            default=0.0,
        )
        left = right + min(spacing.gap + 0.12 * climb, WIDEST_GAP)
    return columns


def link_routes(
    links: Sequence[ForwardEdge],
    chains: Mapping[tuple[str, str], Sequence[int]],
    boxes: Mapping[str, Rect],
    layer: Mapping[str, int],
    columns: Sequence[Column],
    heights: Sequence[float],
    spacing: Spacing,
) -> tuple[tuple[Point, ...], ...]:
    """For each link its corners, from the right side of its tail to the left side of its head."""
    streams: dict[tuple[str, str], list[int]] = {}
    for link in links:
        streams.setdefault((link.tail, link.head), []).append(link.stream)

    def bend(link: ForwardEdge, item: int) -> float:
        beside = sorted(streams[link.tail, link.head])
        return heights[item] + (beside.index(link.stream) - (len(beside) - 1) / 2) * spacing.stream

    outs: dict[str, dict[int, list[float]]] = {}
    for link in links:
        chain = chains.get((link.tail, link.head), ())
        target = heights[chain[0]] if chain else boxes[link.head].middle
        outs.setdefault(link.tail, {}).setdefault(link.stream, []).append(target)
    starts: dict[tuple[str, int], float] = {}
    for tail, targets in outs.items():
        ordered = sorted(
            targets, key=lambda stream: (sum(targets[stream]) / len(targets[stream]), stream)
        )
        for at, stream in enumerate(ordered):
            starts[tail, stream] = (
                boxes[tail].middle + (at - (len(ordered) - 1) / 2) * spacing.stream
            )

    arrivals: dict[str, list[tuple[float, int]]] = {}
    for number, link in enumerate(links):
        chain = chains.get((link.tail, link.head), ())
        last = bend(link, chain[-1]) if chain else starts[link.tail, link.stream]
        arrivals.setdefault(link.head, []).append((last, number))
    ends: dict[int, float] = {}
    for head, incoming in arrivals.items():
        incoming.sort()
        ends.update(
            zip(
                (number for _, number in incoming),
                _ports(boxes[head], [y for y, _ in incoming]),
                strict=True,
            )
        )

    drawn: list[tuple[Point, ...]] = []
    for number, link in enumerate(links):
        y = starts[link.tail, link.stream]
        points = [(boxes[link.tail].right, y), (columns[layer[link.tail]].right, y)]
        for at, item in enumerate(chains.get((link.tail, link.head), ())):
            column, height = columns[layer[link.tail] + 1 + at], bend(link, item)
            points += [(column.left, height), (column.right, height)]
        points.append((boxes[link.head].left, ends[number]))
        drawn.append(tuple(points))
    return tuple(drawn)


def _ports(box: Rect, arriving: Sequence[float]) -> list[float]:
    """Where arrows touch the left side of a box: level with where they come from, where that is
    possible.
    """
    room = max(box.height / 2 - CORNER, 0.0)
    step = min(PORT, 2 * room / max(len(arriving) - 1, 1))
    targets = [y if abs(y - box.middle) <= room else box.middle for y in arriving]
    level = [100.0 if y == want else 1.0 for y, want in zip(arriving, targets, strict=True)]
    ports = spread(targets, level, [0.0] + [step] * (len(targets) - 1))
    shift = max(box.middle - room - ports[0], 0.0) + min(box.middle + room - ports[-1], 0.0)
    return [min(max(port + shift, box.middle - room), box.middle + room) for port in ports]


@dataclass(kw_only=True)
class _Detour:
    """A back edge on its way to being drawn."""

    number: int
    back: BackEdge
    sign: float
    """1 below the boxes, -1 above."""
    low: int
    """First layer it passes."""
    high: int


def back_routes(
    backs: Sequence[BackEdge],
    boxes: Mapping[str, Rect],
    layer: Mapping[str, int],
    columns: Sequence[Column],
    spacing: Spacing,
) -> tuple[BackRoute, ...]:
    """Polylines of right angles that pass below or above all boxes between their ends, and touch no
    box.
    """
    rows: dict[int, list[Rect]] = {}
    for name, box in boxes.items():
        rows.setdefault(layer[name], []).append(box)
    plan: list[_Detour] = []
    for number, back in enumerate(backs):
        low, high = sorted((layer[back.tail], layer[back.head]))
        costs = []
        for sign in (1.0, -1.0):
            edge = _edge(columns, low, high, sign)
            costs.append(
                sum(
                    1000.0 * _blocked(boxes[name], rows[layer[name]], sign)
                    + abs(edge - boxes[name].middle)
                    for name in (back.tail, back.head)
                )
            )
        sign = 1.0 if costs[0] <= costs[1] else -1.0
        plan.append(_Detour(number=number, back=back, sign=sign, low=low, high=high))
    tracks: dict[float, list[tuple[int, int, float]]] = {1.0: [], -1.0: []}
    heights: dict[int, float] = {}
    for detour in sorted(plan, key=lambda d: (d.high - d.low, d.number)):
        edge = _edge(
            columns, max(detour.low - 1, 0), min(detour.high + 1, len(columns) - 1), detour.sign
        )
        y = edge + detour.sign * spacing.outer
        for low, high, track in sorted(tracks[detour.sign], key=lambda t: t[2] * detour.sign):
            near = abs(y - track) < spacing.track or (track - y) * detour.sign > 0
            if low <= detour.high and detour.low <= high and near:
                y = track + detour.sign * spacing.track
        tracks[detour.sign].append((detour.low, detour.high, y))
        heights[detour.number] = y
    ports = _back_ports(plan, boxes, layer)
    drawn: dict[int, BackRoute] = {}
    for detour in plan:
        y = heights[detour.number]
        start = _stub(detour, detour.back.tail, ports, boxes, rows, layer, columns, y)
        end = _stub(detour, detour.back.head, ports, boxes, rows, layer, columns, y)
        points = [*start, *reversed(end)]
        label = ((start[-1][0] + end[-1][0]) / 2, y)
        drawn[detour.number] = BackRoute(points=tuple(points), label=label)
    return tuple(drawn[number] for number in range(len(backs)))


def _edge(columns: Sequence[Column], low: int, high: int, sign: float) -> float:
    strips = columns[low : high + 1]
    return max(strip.bottom for strip in strips) if sign > 0 else min(strip.top for strip in strips)


def _blocked(box: Rect, row: Sequence[Rect], sign: float) -> bool:
    return any((neighbour.middle - box.middle) * sign > 0 for neighbour in row)


def _back_ports(
    plan: Sequence[_Detour], boxes: Mapping[str, Rect], layer: Mapping[str, int]
) -> dict[tuple[int, str], float]:
    """x of each end of each back edge on its box: spread along the side so that nested edges do not
    cross.
    """
    sides: dict[tuple[str, float], list[tuple[float, int]]] = {}
    for detour in plan:
        span = detour.high - detour.low + detour.number * 1e-6
        for name, far_end in (
            (detour.back.tail, detour.back.head),
            (detour.back.head, detour.back.tail),
        ):
            to_right = layer[far_end] > layer[name]
            sides.setdefault((name, detour.sign), []).append(
                (-span if to_right else span, detour.number)
            )
    ports: dict[tuple[int, str], float] = {}
    for (name, _), ends in sides.items():
        box = boxes[name]
        step = min(18.0, (box.width - 2 * CORNER) / max(len(ends) - 1, 1))
        for at, (_, number) in enumerate(sorted(ends)):
            ports[number, name] = box.centre + (at - (len(ends) - 1) / 2) * step
    return ports


def _stub(
    detour: _Detour,
    name: str,
    ports: Mapping[tuple[int, str], float],
    boxes: Mapping[str, Rect],
    rows: Mapping[int, Sequence[Rect]],
    layer: Mapping[str, int],
    columns: Sequence[Column],
    y: float,
) -> list[Point]:
    """From a box to the track: straight, or through the gap beside its layer where a box is in the
    way.
    """
    box, x = boxes[name], ports[detour.number, name]
    side = box.bottom if detour.sign > 0 else box.top
    if not _blocked(box, rows[layer[name]], detour.sign):
        return [(x, side), (x, y)]
    column, at = columns[layer[name]], detour.number % 3
    leaves = name == detour.back.tail
    gap = column.right + 10 + 6 * at if leaves else column.left - 16 - 6 * at
    level = side + detour.sign * (9 + 4 * at)
    return [(x, side), (x, level), (gap, level), (gap, y)]


def bounds_of(
    columns: Sequence[Column],
    lines: Sequence[Sequence[Point]],
    routes: Sequence[BackRoute],
    backs: Sequence[BackEdge],
) -> Rect:
    """The rectangle that holds everything drawn."""
    points = [point for line in lines for point in line] + [
        point for route in routes for point in route.points
    ]
    for route, back in zip(routes, backs, strict=True):
        points += [
            (route.label[0] + side * back.label_width / 2, route.label[1]) for side in (-1, 1)
        ]
    points += [
        corner
        for strip in columns
        for corner in ((strip.left, strip.top), (strip.right, strip.bottom))
    ]
    if not points:
        return Rect(left=0.0, top=0.0, right=0.0, bottom=0.0)
    return Rect(
        left=min(x for x, _ in points),
        top=min(y for _, y in points),
        right=max(x for x, _ in points),
        bottom=max(y for _, y in points),
    )


# Which layer each node stands in, and the order within a layer: longest paths, then few
# crossings.

SWEEPS = 24
SWEEPS_LARGE = 6
LARGE = 4_000
SWAP_LIMIT = 60


def acyclic(names: Sequence[str], pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The distinct pairs, those that would close a cycle (and loops of one node) left out."""
    after: dict[str, list[str]] = {name: [] for name in names}
    for tail, head in dict.fromkeys(pairs):
        if tail != head:
            after[tail].append(head)
    state: dict[str, int] = {}
    edges: list[tuple[str, str]] = []
    for root in names:
        if root in state:
            continue
        state[root] = 1
        stack = [(root, iter(after[root]))]
        while stack:
            node, heads = stack[-1]
            for head in heads:
                if state.get(head) != 1:
                    edges.append((node, head))
                if head not in state:
                    state[head] = 1
                    stack.append((head, iter(after[head])))
                    break
            else:
                state[node] = 2
                stack.pop()
    return edges


def layers_of(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Layer of each node of a DAG: longest path from the left, sources moved right to where they
    are read.
    """
    graph = _digraph(names, pairs)
    generations = enumerate(nx.topological_generations(graph))
    layer = {name: number for number, generation in generations for name in generation}
    for name in names:
        if not graph.pred[name] and graph.succ[name]:
            layer[name] = min(layer[head] for head in graph.succ[name]) - 1
    return layer


def _digraph(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> "nx.DiGraph[str]":
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(names)
    graph.add_edges_from(pairs)
    return graph


def order(
    rows: list[list[int]], before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]
) -> list[list[int]]:
    """The rows (one per layer) in an order of few crossings; neighbours are lists of items."""
    best, best_crossings = [list(row) for row in rows], crossings(rows, after)
    edges = sum(len(heads) for heads in after)
    for sweep in range(SWEEPS if edges < LARGE else SWEEPS_LARGE):
        if best_crossings == 0:
            break
        forwards = sweep % 2 == 0
        indices = range(1, len(rows)) if forwards else range(len(rows) - 2, -1, -1)
        for index in indices:
            beside = rows[index - 1] if forwards else rows[index + 1]
            rows[index] = _by_barycentre(rows[index], beside, before if forwards else after)
        if edges < LARGE:
            _swap_neighbours(rows, before, after)
        count = crossings(rows, after)
        if count < best_crossings:
            best, best_crossings = [list(row) for row in rows], count
    return best


def crossings(rows: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> int:
    """How many pairs of edges between neighbouring layers cross."""
    total = 0
    for left, right in pairwise(rows):
        at = {item: index for index, item in enumerate(right)}
        passed: list[int] = []
        for end in (end for item in left for end in sorted(at[head] for head in after[item])):
            total += len(passed) - bisect_right(passed, end)
            insort(passed, end)
    return total


def _by_barycentre(
    row: Sequence[int], beside: Sequence[int], near: Sequence[Sequence[int]]
) -> list[int]:
    at = {item: index for index, item in enumerate(beside)}
    scale = len(beside) / max(len(row), 1)
    key = {
        item: sum(at[neighbour] for neighbour in near[item]) / len(near[item])
        if near[item]
        else (index + 0.5) * scale - 0.5
        for index, item in enumerate(row)
    }
    return sorted(row, key=key.__getitem__)


def _swap_neighbours(
    rows: list[list[int]], before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]
) -> None:
    for index, row in enumerate(rows):
        if len(row) > SWAP_LIMIT:
            continue
        left = {item: at for at, item in enumerate(rows[index - 1])} if index else {}
        right = (
            {item: at for at, item in enumerate(rows[index + 1])} if index + 1 < len(rows) else {}
        )
        for at in range(len(row) - 1):
            up, down = row[at], row[at + 1]
            now = _pair(before[up], before[down], left) + _pair(after[up], after[down], right)
            then = _pair(before[down], before[up], left) + _pair(after[down], after[up], right)
            if then < now:
                row[at], row[at + 1] = down, up


def _pair(upper: Sequence[int], lower: Sequence[int], at: Mapping[int, int]) -> int:
    return sum(at[up] > at[down] for up in upper for down in lower)


MOST_BENDS = 20_000
"""Above so many bends, links that skip layers are drawn straight through."""


def arrange(
    sizes: Mapping[str, Size],
    links: Sequence[ForwardEdge],
    backs: Sequence[BackEdge] = (),
    spacing: Spacing | None = None,
) -> DrawnLayout:
    """Place boxes and lead links between them; the same input gives the same drawing."""
    spacing = spacing or Spacing()
    names = list(sizes)
    pairs = acyclic(names, ((link.tail, link.head) for link in links))
    layer = layers_of(names, pairs)
    grid = _Grid(sizes, links, pairs, layer, spacing)
    grid.rows = order(grid.rows, grid.before, grid.after)
    heights = geometry.heights(grid.levels(), spacing)
    columns = columns_of(grid.rows, grid.sizes, heights, spacing, grid.after)
    boxes = {
        name: Rect(
            left=columns[layer[name]].left,
            top=heights[item] - grid.sizes[item].height / 2,
            right=columns[layer[name]].box_right,
            bottom=heights[item] + grid.sizes[item].height / 2,
        )
        for item, name in enumerate(names)
    }
    lines = link_routes(links, grid.chains, boxes, layer, columns, heights, spacing)
    detours = back_routes(backs, boxes, layer, columns, spacing)
    return DrawnLayout(
        boxes=boxes,
        links=lines,
        backs=detours,
        bounds=bounds_of(columns, lines, detours, backs),
    )


class _Grid:
    """Layers of items: the boxes first (numbered as in `sizes`), then the bends of links that skip
    layers.
    """

    def __init__(
        self,
        sizes: Mapping[str, Size],
        links: Sequence[ForwardEdge],
        pairs: Sequence[tuple[str, str]],
        layer: Mapping[str, int],
        spacing: Spacing,
    ) -> None:
        index = {name: item for item, name in enumerate(sizes)}
        self.boxes = len(index)
        self.sizes = list(sizes.values())
        self.rows: list[list[int]] = [[] for _ in range(max(layer.values(), default=-1) + 1)]
        self.before: list[list[int]] = [[] for _ in sizes]
        self.after: list[list[int]] = [[] for _ in sizes]
        self.pulls: list[dict[int, float]] = [{} for _ in sizes]
        self.chains: dict[tuple[str, str], list[int]] = {}
        streams: dict[tuple[str, str], list[int]] = {}
        for link in links:
            streams.setdefault((link.tail, link.head), []).append(link.stream)
        for name in nx.dfs_preorder_nodes(_digraph(list(sizes), pairs)):
            self.rows[layer[name]].append(index[name])
        bends = sum(layer[head] - layer[tail] - 1 for tail, head in pairs)
        for tail, head in pairs:
            skipped = range(layer[tail] + 1, layer[head])
            if skipped and bends > MOST_BENDS:
                continue
            chain = [self._bend(at, len(streams[tail, head]), spacing) for at in skipped]
            pull = sum(8.0 if stream == 0 else 1.0 for stream in streams[tail, head])
            for left, right in pairwise([index[tail], *chain, index[head]]):
                inner = (left >= self.boxes) + (right >= self.boxes)
                self._connect(left, right, pull * (1.0, 2.0, 8.0)[inner])
            self.chains[tail, head] = chain

    def levels(self) -> geometry.Levels:
        """What the heights are computed from."""
        return geometry.Levels(
            rows=self.rows,
            sizes=self.sizes,
            boxes=self.boxes,
            before=self.before,
            after=self.after,
            pulls=self.pulls,
        )

    def _bend(self, at: int, streams: int, spacing: Spacing) -> int:
        height = spacing.stream * (streams - 1)
        self.sizes.append(Size(width=0.0, height=height))
        self.before.append([])
        self.after.append([])
        self.pulls.append({})
        self.rows[at].append(len(self.sizes) - 1)
        return len(self.sizes) - 1

    def _connect(self, tail: int, head: int, pull: float) -> None:
        self.after[tail].append(head)
        self.before[head].append(tail)
        self.pulls[tail][head] = self.pulls[head][tail] = pull
