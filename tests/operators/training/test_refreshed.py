"""What a trainer keeps for readers that it refreshes: against its definition, in checkpoints, over
any ranks.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from shard_ranks import REFRESHES, keep, loaded, ranks_do, step
from trainer_rig import group, rows_of, tiny_learner, tiny_llama, tiny_trainer

from dataflow.errors import RunError
from dataflow.weight_ends import Refresh
from operators.training.checkpoints import checkpoint
from operators.training.learner import memory
from operators.training.learner.learner import Learner


def followed(
    refresh: Refresh, steps: int, dtype: str = "float32"
) -> tuple[Learner, list[dict[str, torch.Tensor]]]:
    """A learner after so many steps, and its weights at each, in float64."""
    learner = tiny_learner(tiny_trainer(), tiny_llama())
    keep(learner, refresh, step=0, dtype=dtype)
    seen = [{name: weight.detach().double().clone() for name, weight in learner.parameters.items()}]
    for number in range(steps):
        step(learner, number)
        memory.follow(learner=learner, rank=0, ranks=1, step=number + 1)
        seen.append(
            {name: weight.detach().double().clone() for name, weight in learner.parameters.items()}
        )
    return learner, seen


@pytest.mark.parametrize("decay", [0.5, 0.99])
@pytest.mark.parametrize("every", [1, 3])
def test_an_average_is_that_of_float64_and_stays_until_the_next_nth_step(
    decay: float, every: int
) -> None:
    learner, seen = followed(Refresh(every=every, decay=decay), 7)
    average = seen[0]
    for weights in seen[1 : 7 // every * every + 1]:
        average = {name: decay * old + (1 - decay) * weights[name] for name, old in average.items()}
    offered = learner.offered(1)
    assert offered.keys() == learner.parameters.keys()
    for name, tensor in offered.items():
        torch.testing.assert_close(tensor.detach().double(), average[name], rtol=0, atol=1e-6)


def test_weights_without_an_average_are_those_of_the_nth_step_as_they_travel() -> None:
    learner, seen = followed(Refresh(every=3), 5, dtype="bfloat16")
    offered = learner.offered(1)
    assert {tensor.dtype for tensor in offered.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, seen[3][name].bfloat16()) for name, tensor in offered.items())
    assert set(memory.tensors_of(learner.refreshed)) == {f"{name}/sent-3-0.0" for name in offered}


def test_what_the_next_step_makes_anew_is_not_kept() -> None:
    learner, _ = followed(Refresh(every=1), 2)
    assert (
        not memory.tensors_of(learner.refreshed)
        and learner.offered(1).keys() == learner.parameters.keys()
    )
    averaging, _ = followed(Refresh(every=1, decay=0.5), 2)
    assert {name.split("/")[1] for name in memory.tensors_of(averaging.refreshed)} == {
        "average-1-0.5"
    }


class Busy:
    """A rank's end of a weight plane whose buffers are all read: a version is copied when it is
    polled.
    """

    sent: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.copied: dict[int, dict[str, torch.Tensor]] = {}
        self.pending: tuple[int, dict[str, torch.Tensor]] | None = None

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        self.pending = version, dict(tensors)
        return False

    def settle(self, timeout_s: float) -> bool:
        self.pending = None
        return True

    def tell(self, note: Mapping[str, Any]) -> None:
        pass

    def poll(self) -> None:
        if self.pending is not None:
            version, tensors = self.pending
            self.copied[version] = {
                name: tensor.detach().clone() for name, tensor in tensors.items()
            }
            self.pending = None


class ZeroCopy(Busy):
    """One that sends a version from the tensors themselves, and reads them until they are
    settled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.version = -1

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        assert self.pending is None, "settled before it changed"
        self.version = version
        return super().publish(version, tensors)

    def poll(self) -> None:
        pending = self.pending
        super().poll()
        self.pending = pending

    def settle(self, timeout_s: float) -> bool:
        self.poll()
        return super().settle(timeout_s)


@pytest.mark.parametrize("end", [Busy, ZeroCopy])
@pytest.mark.parametrize("frees", range(1, 6))
def test_a_version_that_is_read_late_has_its_own_weights(frees: int, end: type[Busy]) -> None:
    """Readers let go of a buffer after any of the things that a rank does between two steps, where
    it polls.
    """
    refreshes = [
        Refresh(every=1),
        Refresh(every=2),
        Refresh(every=1, decay=0.5),
        Refresh(every=2, decay=0.5),
    ]
    learner = tiny_learner(tiny_trainer(), tiny_llama())
    ends = {line: end() for line in range(1 + len(refreshes))}
    learner.writers = {**ends}
    for refresh in refreshes:
        keep(learner, refresh, step=0)
    rows = rows_of(group(0, advantages=[1.0, -1.0, 0.5]), group(1))
    expected: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    done = 0

    def polled() -> None:
        nonlocal done
        done += 1
        if done % frees == 0:
            for each in ends.values():
                each.poll()

    for number in range(1, 9):
        for part in learner.begin(rows, number - 1):
            learner.micro(part)
        assert learner.end(1e-2).culprit is None
        polled()
        memory.follow(learner=learner, rank=0, ranks=1, step=number)
        polled()
        for line, each in ends.items():
            if line == 0 or refreshes[line - 1].newest(number) == number:
                offered = learner.offered(line)
                expected[line, number] = {
                    name: tensor.detach().clone() for name, tensor in offered.items()
                }
                each.publish(number, offered)
                polled()
    found = {
        (line, version): copied
        for line, each in ends.items()
        for version, copied in each.copied.items()
    }
    assert {line for line, _ in found} == set(ends)
    for key, copied in found.items():
        assert all(torch.equal(copied[name], tensor) for name, tensor in expected[key].items()), key


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [
        pytest.param((1, 1, 1), (1, 2, 1), marks=pytest.mark.slow),
        ((1, 2, 2), (1, 1, 1)),
        pytest.param((2, 2, 1), (1, 2, 1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_some_ranks_go_on_from_what_others_kept(wrote, reads, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    ranks_do("save", wrote, tmp_path / "checkpoint")
    ranks_do("go_on_refreshed", reads, tmp_path / "checkpoint")
    found = load_file(loaded(tmp_path / "checkpoint", reads))
    expected = {}
    for refresh in REFRESHES:
        expected |= memory.tensors_of(followed(refresh, 2, dtype="bfloat16")[0].refreshed)
    assert {
        name for name in found if name.rpartition("/")[2].split("-")[0] in ("sent", "average")
    } == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor.detach(), rtol=0, atol=1e-2 if "sent" in name else 1e-6
        )


def test_a_checkpoint_without_what_readers_have_is_refused(tmp_path):
    learner, _ = followed(Refresh(every=2), 1)
    checkpoint.save(tmp_path, learner, None, {"step": 2})
    keep(learner, Refresh(every=1, decay=0.5), step=2)
    with pytest.raises(RunError, match="does not hold this state"):
        checkpoint.restore(learner, 0, 1, tmp_path)
