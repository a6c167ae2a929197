"""Which layer each node stands in, and the order within a layer: longest paths, then few
crossings."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

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
    kept: list[tuple[str, str]] = []
    for root in names:
        if root in state:
            continue
        state[root] = 1
        stack = [(root, iter(after[root]))]
        while stack:
            node, rest = stack[-1]
            for head in rest:
                if state.get(head) != 1:
                    kept.append((node, head))
                if head not in state:
                    state[head] = 1
                    stack.append((head, iter(after[head])))
                    break
            else:
                state[node] = 2
                stack.pop()
    return kept


def layers_of(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Layer of each node of a DAG: longest path from the left, sources moved right to where they
    are read."""
    after: dict[str, list[str]] = {name: [] for name in names}
    waiting = dict.fromkeys(names, 0)
    for tail, head in pairs:
        after[tail].append(head)
        waiting[head] += 1
    fed = {name for name, count in waiting.items() if count}
    layer = dict.fromkeys(names, 0)
    ready = [name for name in names if not waiting[name]]
    for name in ready:
        for head in after[name]:
            layer[head] = max(layer[head], layer[name] + 1)
            waiting[head] -= 1
            if not waiting[head]:
                ready.append(head)
    for name in names:
        if name not in fed and after[name]:
            layer[name] = min(layer[head] for head in after[name]) - 1
    return layer


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
    for seen, end in enumerate(ends):
        index, not_above = end + 1, 0
        while index:
            not_above += tree[index]
            index -= index & -index
        total += seen - not_above
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
        item: sum(at[other] for other in near[item]) / len(near[item])
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
    return sum(at[one] > at[other] for one in upper for other in lower)
