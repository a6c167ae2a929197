"""A layered drawing, left to right, computed from sizes and links alone: it knows no operator and
no SVG."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from dataflow.draw import levels, ordering, routes
from dataflow.draw.geometry import BackEdge, DrawnLayout, ForwardEdge, Rect, Size, Spacing

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
    pairs = ordering.acyclic(names, ((link.tail, link.head) for link in links))
    layer = ordering.layers_of(names, pairs)
    grid = _Grid(sizes, links, pairs, layer, spacing)
    grid.rows = ordering.order(grid.rows, grid.before, grid.after)
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
    layers."""

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
        for name in _depth_first(list(sizes), pairs):
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

    def _connect(self, left: int, right: int, pull: float) -> None:
        self.after[left].append(right)
        self.before[right].append(left)
        self.pulls[left][right] = self.pulls[right][left] = pull


def _depth_first(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    after: dict[str, list[str]] = {name: [] for name in names}
    for tail, head in pairs:
        after[tail].append(head)
    seen: dict[str, None] = {}
    for root in names:
        stack = [root]
        while stack:
            name = stack.pop()
            if name not in seen:
                seen[name] = None
                stack.extend(reversed(after[name]))
    return list(seen)
