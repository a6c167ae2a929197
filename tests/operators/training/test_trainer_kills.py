"""A trainer that is killed at random moments and started again trains what an undisturbed one
trains, to the bit.
"""

import contextlib
import math
import os
import random
import select
import signal
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from lives_rig import TrainerLife, declared, policy_folder, run_folder
from safetensors.torch import load_file
from trainer_rig import group

from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.history.verify import verify
from dataflow.system.forking import fork
from operators.training.checkpoints import saving
from operators.training.checkpoints.checkpoint import OPTIMIZER_FOLDER

STEPS, GROUPS = 7, 21


WAIT_S = 180.0


"""For one slice of a life on a busy machine."""


class Witness:
    """A weight plane that writes down, for all lives of a trainer, which bits it published as which
    version.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.sent: dict[str, Any] = {}

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        bits = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
        with self._path.open("a") as file:
            file.write(f"{version} {hash_of(bits)}\n")
        return True

    def settle(self, timeout_s: float) -> bool:
        return True

    def tell(self, note: Mapping[str, float | int | str]) -> None:
        pass

    def poll(self) -> None:
        pass


def hash_of(bits: bytes) -> str:
    import xxhash

    return xxhash.xxh3_64(bits).hexdigest()


def groups() -> list[pa.RecordBatch]:
    """Every fifth one failed as a whole."""
    return [
        group(number, error="scorer timed out" if number % 5 == 1 else None)
        for number in range(GROUPS)
    ]


def live(policy: Path, folder: RunFolder, moment: int, late_s: float, within_s: float) -> bool:
    """A life in a process of its own, killed a little after so many slices of work; whether it came
    to its end.
    """
    hears, tells = os.pipe()
    child = fork()
    if child == 0:
        status = 1
        try:
            os.close(hears)
            writer = lambda tensors: Witness(folder.path / "published.txt")  # noqa: E731
            saving.DEAR = 0.0
            trainer = declared(policy, checkpoint_every=3, recover_within_s=within_s)
            life = TrainerLife(folder, trainer, steps=STEPS, writer=writer)
            life.push(*groups())
            for _ in life.work():
                with contextlib.suppress(BrokenPipeError):
                    os.write(tells, b".")
            status = 0 if life.runtime.status().get("done") else 2
            life.end()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(tells)
    seen = 0
    while seen < moment:
        assert select.select([hears], [], [], WAIT_S)[0], "the life hangs"
        said = os.read(hears, moment - seen)
        if not said:
            break
        seen += len(said)
    time.sleep(late_s)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    os.close(hears)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, (
        f"a life failed by itself, status {status}"
    )
    return os.WIFEXITED(status)


def left(folder: RunFolder) -> tuple[object, ...]:
    """What a run leaves: losses, groups by step, drops, weights and moments, versions."""
    found = verify(folder.path)
    assert found.clean, found
    with Ledger.open(folder.ledger) as ledger:
        made, counts = ledger.steps("trainer"), ledger.counts("trainer")
    assert counts.missing == 0
    kept = folder.checkpoints.folder(STEPS)
    bits = [
        load_file(path)
        for path in (kept / "model.safetensors", *(kept / OPTIMIZER_FOLDER).iterdir())
    ]
    assert [line["step"] for line in folder.read_metrics()] == list(range(1, STEPS + 1))
    published = [line.split() for line in (folder.path / "published.txt").read_text().splitlines()]
    versions = [int(version) for version, _ in published]
    assert versions == sorted(versions), "a version went back"
    return (
        [(step.step, step.trained, dict(step.dropped), step.metrics["loss"]) for step in made],
        [
            {name: hash_of(tensor.numpy().tobytes()) for name, tensor in each.items()}
            for each in bits
        ],
        {(version, digest) for version, digest in published},
        counts,
    )


def killed_at(
    policy: Path, place: Path, kills: int, seed: int, within_s: float = math.inf
) -> tuple[RunFolder, int]:
    """A run whose trainer was killed at most so often, until it was over; and how often it was."""
    draw, folder = random.Random(seed), run_folder(place, GROUPS)
    for number in range(kills):
        if live(policy, folder, draw.randrange(0, 24), draw.random() * 0.02, within_s):
            return folder, number
    assert live(policy, folder, 10**9, 0.0, within_s)
    return folder, kills


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kills", "within_s"),
    [
        (5, 1e-9),
        *(pytest.param(50, within_s, marks=pytest.mark.slow) for within_s in (1e-9, math.inf)),
    ],
)
@pytest.mark.slow
def test_killed_at_random_moments_it_trains_nothing_twice_and_what_an_undisturbed_one_trains(
    tmp_path, kills, within_s
):
    torch.set_num_threads(1)
    policy = policy_folder(tmp_path / "policy")
    undisturbed, _ = killed_at(policy, tmp_path, 0, 0)
    wanted, done, seed = left(undisturbed), 0, 0
    while done < kills:
        folder, killed = killed_at(policy, tmp_path, min(10, kills - done), seed, within_s)
        assert left(folder) == wanted, f"seed {seed}"
        names = {path.name for path in folder.checkpoints.path.iterdir()}
        assert names == {"step-000003", "step-000006", "step-000007"}, (
            "those left by itself, and rests, are gone"
        )
        done, seed = done + killed, seed + 1
