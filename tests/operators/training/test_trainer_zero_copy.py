"""A trainer whose weights readers take from where they are: no update changes what somebody
reads.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from trainer_rig import Plane, group, rig

from dataflow.limits import Limits
from dataflow.runtime import WeightEnds
from operators.training.offers import Offers


class ZeroCopy(Plane):
    """A plane whose readers look at the weights until they are settled, and may be too slow
    then.
    """

    reads: tuple[int, dict[str, torch.Tensor]] | None = None
    in_time: bool = True

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        assert self.reads is None, "settled before they changed"
        self.reads = version, dict(tensors)
        return super().publish(version, tensors)

    def settle(self, timeout_s: float) -> bool:
        assert self.reads is not None and timeout_s == Limits().settle_s
        version, tensors = self.reads
        assert all(
            torch.equal(tensor, self.published[version][name]) for name, tensor in tensors.items()
        )
        self.events.append(("settle", version))
        self.reads = None
        return self.in_time


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def warning(self, event: str, **facts: Any) -> None:
        self.lines.append((event, facts))


@pytest.mark.parametrize("in_time", [True, False])
def test_an_update_waits_for_who_reads_the_weights_and_tells_whom_it_gave_up(
    in_time, tmp_path, monkeypatch
):
    plane, log = ZeroCopy([]), Log()
    plane.in_time = in_time
    open_ends = Offers.__init__

    def opened(self: Offers, context: Any, learner: Any) -> None:
        context.__dict__.update(weights=WeightEnds(writer=lambda tensors: plane), log=log)
        open_ends(self, context, learner)

    monkeypatch.setattr(Offers, "__init__", opened)
    world = rig(tmp_path)
    for number in range(4):
        world.push(group(number))
    world.run()
    assert [event for event in plane.events if event[0] in ("publish", "settle")] == [
        ("publish", 0),
        ("settle", 0),
        ("publish", 1),
        ("settle", 1),
        ("publish", 2),
    ]
    assert [line["seconds_settle"] >= 0.0 for line in world.folder.metrics] == [True, True]
    told = [
        (facts["node"], facts["step"]) for event, facts in log.lines if "take a later one" in event
    ]
    assert told == ([] if in_time else [("trainer", 1), ("trainer", 2)])
    assert not torch.equal(*(next(iter(plane.published[version].values())) for version in (0, 2)))
