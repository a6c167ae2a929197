"""A plan in lines of text and as a picture, and how long it takes by a model of the links between
GPUs.

The model. Rank i of the source sits on GPU i; the destination's ranks sit on GPUs from
`destination_first` on; every `gpus_per_node` GPUs are a node. Between two ranks bytes go over one
of three links: within one GPU (local), within a node, or between nodes. Each GPU has its own of
each, equally fast in both directions at once, and the network between nodes is never the limit. A
pair's bytes travel in buckets, each of which costs a message at both ends. Links work at the same
time, so a direction of a GPU takes as long as its busiest link, and its messages; the plan takes as
long as the busiest GPU. Packing, casting and waiting for stragglers are not in it: it is a floor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transport.weights.layout.layout import Ints
from transport.weights.layout.plan import CopyPlan, matchings, smaller

KINDS = ("local", "within", "between")
"""Links, in the order of the columns of `Cost`'s tables."""
WHERE = ("within its GPU", "within its node", "between nodes")


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """Where the ranks sit, and how fast they reach each other; bandwidths per GPU and direction."""

    gpus_per_node: int = 8
    local_bytes_per_s: float = 2e12
    """Within one GPU's memory."""
    within_bytes_per_s: float = 450e9
    """To GPUs of the same node (NVLink)."""
    between_bytes_per_s: float = 50e9
    """To GPUs of other nodes (400 Gb/s)."""
    message_s: float = 10e-6
    """What a message costs each end besides its bytes."""
    bucket_bytes: int = 64 << 20
    """Bytes of one message at most."""
    destination_first: int | None = None
    """GPU of the destination's first rank; None: the first node that holds no source rank."""

    def __post_init__(self) -> None:
        speeds = (self.local_bytes_per_s, self.within_bytes_per_s, self.between_bytes_per_s)
        if min(*speeds, self.gpus_per_node, self.bucket_bytes) <= 0 or self.message_s < 0:
            raise ValueError(
                f"links need bandwidths, buckets and nodes above zero; found {self}; give bytes per"
                " second and GPU"
            )

    def destinations_from(self, sources: int) -> int:
        """GPU of the destination's first rank."""
        if self.destination_first is not None:
            return self.destination_first
        return -(-sources // self.gpus_per_node) * self.gpus_per_node


@dataclass(frozen=True, kw_only=True, eq=False)
class Cost:
    """The model's estimate for a plan."""

    seconds: float
    busiest: str
    """The rank, and what holds it up."""
    source_bytes: Ints
    """[source ranks, local | within | between]: that each sends."""
    destination_bytes: Ints
    """[destination ranks, local | within | between]: that each receives."""
    source_messages: Ints
    """[source ranks]"""
    destination_messages: Ints
    """[destination ranks]"""

    @property
    def link_bytes(self) -> dict[str, int]:
        """Bytes in all, by the kind of link."""
        return dict(zip(KINDS, self.source_bytes.sum(axis=0).tolist(), strict=True))


def cost(pair_bytes: Ints, links: Interconnect) -> Cost:
    """The model's cost of moving `pair_bytes` [source ranks, destination ranks] over these
    links.
    """
    kind = _kinds(pair_bytes.shape, links)
    by_kind = np.stack(
        [np.where(kind == number, pair_bytes, 0) for number in range(len(KINDS))], axis=2
    )
    messages = -(-pair_bytes // links.bucket_bytes)
    sides = [
        ("source", "sends", by_kind.sum(axis=1), messages.sum(axis=1)),
        ("destination", "receives", by_kind.sum(axis=0), messages.sum(axis=0)),
    ]
    speeds = _speeds(links)
    seconds, busiest = 0.0, "nothing is sent"
    for side, does, nbytes, count in sides:
        busy = (nbytes / speeds).max(axis=1) + count * links.message_s
        rank = int(busy.argmax())
        if busy[rank] > seconds:
            link = int((nbytes[rank] / speeds).argmax())
            seconds = float(busy[rank])
            sums = f"{amount(nbytes[rank, link])} {WHERE[link]} in {count[rank]} messages"
            busiest = f"{side} rank {rank} {does} {sums}"
    return Cost(
        seconds=seconds,
        busiest=busiest,
        source_bytes=sides[0][2],
        destination_bytes=sides[1][2],
        source_messages=sides[0][3],
        destination_messages=sides[1][3],
    )


def in_rounds(pair_bytes: Ints, links: Interconnect) -> tuple[int, float]:
    """How many rounds the ranks go through, and seconds until the last is through: each rank has
    one message under way, and goes on when its peer has come to it too.
    """
    seconds = pair_bytes / _speeds(links)[_kinds(pair_bytes.shape, links)]
    seconds += -(-pair_bytes // links.bucket_bytes) * links.message_s
    table = matchings(pair_bytes)
    rounds, (sources, destinations) = int(table.max(initial=-1)) + 1, pair_bytes.shape
    sent, received = np.zeros(sources), np.zeros(destinations)
    for number in range(rounds):
        source, destination = np.nonzero(table == number)
        over = np.maximum(sent[source], received[destination]) + seconds[source, destination]
        sent[source] = received[destination] = over
    return rounds, float(max(sent.max(), received.max()))


def _kinds(shape: tuple[int, ...], links: Interconnect) -> Ints:
    """[source ranks, destination ranks]: over which of `KINDS` each pair goes."""
    source = np.arange(shape[0])[:, None]
    destination = links.destinations_from(len(source)) + np.arange(shape[1])[None, :]
    near = source // links.gpus_per_node == destination // links.gpus_per_node
    return np.where(source == destination, 0, np.where(near, 1, 2))


def _speeds(links: Interconnect) -> npt.NDArray[np.float64]:
    """Of `KINDS`, bytes per second."""
    return np.array([links.local_bytes_per_s, links.within_bytes_per_s, links.between_bytes_per_s])


UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def amount(nbytes: float) -> str:
    """In powers of 1,000: 1.23 GB."""
    power = 0
    while nbytes >= 999.5 and power < len(UNITS) - 1:
        nbytes, power = nbytes / 1000, power + 1
    return f"{nbytes:.3g} {UNITS[power]}"


PAIRS_SHOWN = 8
"""Ranks of either side up to which the bytes of each pair are listed."""
KINDS_SHOWN = 12


def explain(plan: CopyPlan, links: Interconnect | None = None) -> str:
    """Who sends how much to whom, in lines of text. links: tells the seconds as well."""
    nbytes, copies = plan.pair_bytes, plan.pair_copies
    sources, destinations = nbytes.shape
    pairs = np.count_nonzero(nbytes)
    lines = [
        f"{amount(int(nbytes.sum()))} from {sources} to {destinations} ranks, "
        f"{copies.sum():,} copies between {pairs:,} of {nbytes.size:,} pairs",
        _spread(
            "each source rank sends",
            nbytes.sum(axis=1),
            copies.sum(axis=1),
            (nbytes > 0).sum(axis=1),
        ),
        _spread(
            "each destination rank receives",
            nbytes.sum(axis=0),
            copies.sum(axis=0),
            (nbytes > 0).sum(axis=0),
        ),
    ]
    if links is not None:
        estimate = cost(nbytes, links)
        by_link = ", ".join(f"{amount(estimate.link_bytes[kind])} {kind}" for kind in KINDS)
        lines.append(
            f"at least {estimate.seconds:.3g} s by the model: {estimate.busiest} ({by_link})"
        )
    lines += ["", "tensors dealt out alike"]
    for kind, tensors in plan.kinds[:KINDS_SHOWN]:
        (origin, target), per_tensor = tensors[0], len(kind.to)
        first = f"{target.name} {list(target.shape)} {smaller(origin.dtype, target.dtype)}"
        suffix = f" and {len(tensors) - 1:,} like it" if len(tensors) > 1 else ""
        lines.append(
            f"  {first}{suffix}: {per_tensor:,} {'copy' if per_tensor == 1 else 'copies'} each"
        )
    if len(plan.kinds) > KINDS_SHOWN:
        lines.append(f"  and {len(plan.kinds) - KINDS_SHOWN:,} more kinds")
    if max(sources, destinations) <= PAIRS_SHOWN:
        lines += ["", *_matrix(nbytes)]
    return "\n".join(lines)


def _spread(label: str, nbytes: Ints, copies: Ints, peers: Ints) -> str:
    def of(values: Ints, text: str = "{:,.0f}") -> str:
        least, middle, most = int(np.min(values)), float(np.median(values)), int(np.max(values))
        show = amount if text == "bytes" else text.format
        return show(most) if least == most else f"{show(least)} | {show(middle)} | {show(most)}"

    return f"{label} {of(nbytes, 'bytes')} in {of(copies)} copies, with {of(peers)} peers"


def _matrix(nbytes: Ints) -> list[str]:
    """Bytes of each pair: a line per source rank, a column per destination rank."""
    rows = [["from \\ to", *map(str, range(nbytes.shape[1]))]]
    rows += [
        [str(rank), *(amount(n) if n else "." for n in line)]
        for rank, line in enumerate(nbytes.tolist())
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


MOST = 64
"""Rows and columns; where there are more ranks, each stands for several."""
SIDE = 512
"""Of the matrix, in pixels, where there are many ranks; a few get cells of `CELL`."""
CELL = 64
WITH_TEXT = 40
"""Pixels of a cell from which its bytes stand in it."""
LEFT, TOP, BAR = 56, 112, 48
"""Pixels for the ranks' numbers, for title and numbers, and for the longest bar."""
THICK = 16
"""Pixels of a bar, where there is room."""
COLOURS = (
    ".reshard .paper{fill:%s}.reshard text{fill:%s}.reshard .muted{fill:%s}.reshard .empty{fill:%s}"
    ".reshard .cell,.reshard .bar{fill:%s}.reshard .full{fill:%s}"
)
STYLE = (
    ".reshard{max-width:100%;height:auto;font:11px 'Helvetica Neue',Arial,'Liberation"
    " Sans',sans-serif}.reshard .heading{font-size:15px;font-weight:600}"
    + COLOURS % ("#fff", "#1f2328", "#656d76", "#f2f4f6", "#0b62c4", "#fff")
    + "@media (prefers-color-scheme:dark){"
    + COLOURS % ("#0d1117", "#e6edf3", "#9198a1", "#161b22", "#58a6ff", "#0d1117")
    + "}"
)


def picture(pair_bytes: Ints, gpus_per_node: int | None = None) -> str:
    """The picture of bytes [source ranks, destination ranks].

    Up to 64 ranks a side each has its row or column. Above, each stands for a node's ranks where
    `gpus_per_node` is given, and in any case for so many that 64 are enough. A cell's shade is its
    share of the fullest cell.
    """
    down, across = (_group(ranks, gpus_per_node) for ranks in pair_bytes.shape)
    cells = _summed(_summed(pair_bytes, down).T, across).T
    size = min(CELL, SIDE // max(cells.shape))
    width, height = cells.shape[1] * size, cells.shape[0] * size
    most = max(int(np.max(cells)), 1)
    sent, received = cells.sum(axis=1), cells.sum(axis=0)
    senders, receivers = pair_bytes.shape
    body = [
        _text(
            16,
            26,
            f"{amount(int(pair_bytes.sum()))} from {senders} to {receivers} ranks",
            "heading",
        ),
        _text(16, 45, _load("a source rank sends", pair_bytes.sum(axis=1)), "muted"),
        _text(16, 60, _load("a destination rank receives", pair_bytes.sum(axis=0)), "muted"),
        _text(16, 80, f"rows: source {_of(down)}; columns: destination {_of(across)}", "muted"),
        f'<rect class="empty" x="{LEFT}" y="{TOP}" width="{width}" height="{height}"/>',
        *_numbers(cells.shape[0], down, size, down=True),
        *_numbers(cells.shape[1], across, size, down=False),
    ]
    gap = 1 if size > 4 else 0
    for row, column in np.argwhere(cells).tolist():
        share = float(cells[row, column]) / most
        x, y = LEFT + column * size, TOP + row * size
        tip = (
            f"{_names(row, down, senders)} to {_names(column, across, receivers)}:"
            f" {amount(cells[row, column])}"
        )
        body.append(
            f'<rect class="cell" x="{x}" y="{y}" width="{size - gap}" height="{size - gap}" '
            f'fill-opacity="{0.12 + 0.88 * share:.3f}"><title>{tip}</title></rect>'
        )
        if size >= WITH_TEXT:
            kind = "full" if share > 0.55 else ""
            body.append(
                _text(x + size / 2, y + size / 2 + 4, amount(cells[row, column]), kind, "middle")
            )
    body += _bars(sent, size, (LEFT + width + 10, TOP), down=True)
    body += _bars(received, size, (LEFT, TOP + height + 10), down=False)
    body.append(
        _text(LEFT + width + 10, TOP - 6, f"sent, up to {amount(int(np.max(sent)))}", "muted")
    )
    below = TOP + height + BAR + 26
    body.append(
        _text(
            LEFT,
            below,
            f"received, up to {amount(int(np.max(received)))}; fullest cell {amount(most)}",
            "muted",
        )
    )
    wide, high = max(LEFT + width + BAR + 90, 430), below + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="reshard" role="img" width="{wide}"'
        f' height="{high}" viewBox="0 0 {wide} {high}"><style>{STYLE}</style><rect class="paper"'
        f' width="{wide}" height="{high}"/>{"".join(body)}</svg>\n'
    )


def _group(ranks: int, gpus_per_node: int | None) -> int:
    """Ranks that one row or column stands for."""
    if ranks <= MOST:
        return 1
    unit = gpus_per_node or 1
    return unit * -(-ranks // (unit * MOST))


def _summed(table: Ints, group: int) -> Ints:
    """Rows of a table added up by groups."""
    return np.asarray(np.add.reduceat(table, np.arange(0, len(table), group), axis=0))


def _numbers(count: int, group: int, size: int, *, down: bool) -> list[str]:
    """The first rank of rows or columns, as many as there is room for."""
    every = next(step for step in (1, 2, 4, 8, 16, 32, 64) if step * size >= (14 if down else 26))
    labels = []
    for number in range(0, count, every):
        at = number * size + size / 2
        if down:
            labels.append(_text(LEFT - 8, TOP + at + 4, str(number * group), "", "end"))
        else:
            labels.append(_text(LEFT + at, TOP - 6, str(number * group), "", "middle"))
    return labels


def _bars(sums: Ints, size: int, origin: tuple[int, int], *, down: bool) -> list[str]:
    """A bar for each sum, growing away from the matrix."""
    x, y = origin
    bars = []
    for number, value in enumerate(sums.tolist()):
        length, thick = BAR * value / max(int(np.max(sums)), 1), min(max(size - 1, 1), THICK)
        at = number * size + (size - thick) / 2
        place = (x, y + at, length, thick) if down else (x + at, y, thick, length)
        corner_x, corner_y, wide, high = (f"{number:.1f}".removesuffix(".0") for number in place)
        bars.append(
            f'<rect class="bar" x="{corner_x}" y="{corner_y}" width="{wide}" height="{high}"'
            f' fill-opacity="0.55"><title>{amount(value)}</title></rect>'
        )
    return bars


def _names(number: int, group: int, ranks: int) -> str:
    last = min((number + 1) * group, ranks) - 1
    return f"rank {number}" if group == 1 else f"ranks {number * group} to {last}"


def _of(group: int) -> str:
    return "ranks" if group == 1 else f"ranks, {group} at a time"


def _load(label: str, nbytes: Ints) -> str:
    least, middle, most = int(np.min(nbytes)), float(np.median(nbytes)), int(np.max(nbytes))
    if least == most:
        return f"{label} {amount(most)}"
    return f"{label} {amount(least)} to {amount(most)}, half of them {amount(middle)} or less"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    anchor = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:g}" y="{y:g}"{kind}{anchor}>{text}</text>'
