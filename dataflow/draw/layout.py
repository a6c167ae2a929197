"""A layered drawing, left to right, computed from sizes and links alone: it knows no operator and
no SVG.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import networkx as nx

from dataflow.draw import levels, routes
from dataflow.draw.geometry import BackEdge, DrawnLayout, ForwardEdge, Rect, Size, Spacing

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
        ends = [end for item in left for end in sorted(at[head] for head in after[item])]
        total += _inversions(ends, len(right))
    return total


def _inversions(ends: Sequence[int], size: int) -> int:
    tree = [0] * (size + 1)
    total = 0
    for count, end in enumerate(ends):
        index, not_above = end + 1, 0
        while index:
            not_above += tree[index]
            index -= index & -index
        total += count - not_above
        index = end + 1
        while index <= size:
            tree[index] += 1
            index += index & -index
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
    heights = levels.heights(grid.levels(), spacing)
    columns = routes.columns_of(grid.rows, grid.sizes, heights, spacing, grid.after)
    boxes = {
        name: Rect(
            left=columns[layer[name]].left,
            top=heights[item] - grid.sizes[item].height / 2,
            right=columns[layer[name]].box_right,
            bottom=heights[item] + grid.sizes[item].height / 2,
        )
        for item, name in enumerate(names)
    }
    lines = routes.links(links, names, grid.chains, boxes, layer, columns, heights, spacing)
    back_routes = routes.backs(backs, boxes, layer, columns, spacing)
    trunks = {
        link.tail: (columns[layer[link.tail]].right, boxes[link.tail].middle) for link in links
    }
    return DrawnLayout(
        boxes=boxes,
        links=lines,
        backs=back_routes,
        trunks=trunks,
        bounds=routes.bounds(columns, lines, back_routes, backs),
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

    def levels(self) -> levels.Levels:
        """What the heights are computed from."""
        return levels.Levels(
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
