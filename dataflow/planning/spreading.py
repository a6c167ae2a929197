"""Over which hosts the ranks of one trainer are spread, where no host has room for all: a pure
function.

Every host gets as many ranks, neighbours all of them, as each step waits for the slowest. The ranks
that share out a layer (tensor parallelism) exchange several times in each layer, those that shard
the parameters once, copies of the model once in a step: so a layer is cut across hosts only where
nothing else fits, a copy of the model sits on no more hosts than it must, and of what is equal in
this the fewest hosts are taken."""

from collections.abc import Callable, Sequence

from dataflow.planning.rooms import Room, Unit


def divisions(
    ranks: int, hosts: int, *, tensor_parallel: int = 1, dp_replicate: int = 1
) -> list[int]:
    """Numbers of hosts, `hosts` at most, that so many ranks can be spread over evenly, what is
    preferred first.

    >>> divisions(16, 8, tensor_parallel=4)
    [2, 4, 8]
    >>> divisions(12, 6, dp_replicate=3)  # three copies of four ranks: none is cut over 3 hosts or 6
    [3, 6, 2, 4]
    """
    copy = ranks // dp_replicate

    def cost(count: int) -> tuple[bool, bool, int]:
        each = ranks // count
        return bool(each % tensor_parallel), bool(each % copy and copy % each), count

    return sorted((count for count in range(2, hosts + 1) if ranks % count == 0), key=cost)


def spread(
    rooms: Sequence[Room], ranks: int, unit: Callable[[int], Unit], counts: Sequence[int]
) -> list[Room]:
    """The hosts of all ranks, those of rank 0 first; none where there is no room. They are not
    taken yet.

    unit: of so many ranks. counts: numbers of hosts, as `divisions` has them. Accelerators are
    taken host after host, cores where there are fewest processes for each, as all units are
    (`rooms`)."""
    for count in counts:
        part = unit(ranks // count)
        fitting = [
            room for room in rooms if room.row(part) is not None and not room.lacks_memory(part)
        ]
        if len(fitting) >= count:
            if not part.gpus:
                fitting.sort(key=lambda room: (room.processes + part.processes) / room.host.cpus)
            return [room for room in rooms if any(room is each for each in fitting[:count])]
    return []
