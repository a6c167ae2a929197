"""From an FSDP2 trainer to tensor-parallel generators, real processes over gloo: byte for byte,
training meanwhile.
"""

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from .fsdp_case import CASE_S, Case, line_of

PROGRAM = Path(__file__).with_name("fsdp_to_tp.py")
ROOT = PROGRAM.parents[4]
LOAD_S = 60.0
"""For the program to import torch and transformers."""
ALONE = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""What keeps libraries from starting threads as they are imported: a process with threads is not
forked."""

pytestmark = pytest.mark.timeout(LOAD_S + CASE_S + 30)

Seen = dict[tuple[str, int, int], dict[str, Any]]
"""What each process saw, by side, number and rank."""


@pytest.fixture(scope="module")
def program(forked: None) -> Iterator[subprocess.Popen[str]]:
    """The process that forks the ranks of one case after another."""
    environment = os.environ | ALONE | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(PROGRAM)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as found:
        yield found
        found.kill()


@pytest.fixture
def play(program: subprocess.Popen[str], tmp_path: Path) -> Callable[..., tuple[Case, Seen]]:
    """Runs a case to its end; fails with the ranks' logs unless all of them end well."""

    def played(**fields: Any) -> tuple[Case, Seen]:
        case = Case(folder=str(tmp_path), heads=max(fields["groups"]), **fields)
        program.stdin.write(line_of(case))
        program.stdin.flush()
        ready, _, _ = select.select([program.stdout], [], [], LOAD_S + CASE_S)
        line = program.stdout.readline() if ready else ""
        statuses = json.loads(line) if line else {}
        if not line:
            program.kill()
        if not statuses or any(statuses.values()):
            logs = "\n".join(
                f"{log.name}:\n{log.read_text()[-2000:]}" for log in tmp_path.glob("*.log")
            )
            pytest.fail(f"exit statuses {statuses}\n{logs}")
        return case, {each: json.loads(case.result(*each).read_text()) for each in case.ranks()}

    return played


def check(case: Case, seen: Seen) -> None:
    """The laws that hold in every run; that each version is byte-exact was proved by the ranks
    themselves.
    """
    for number, size in enumerate(case.groups):
        first, *others = (seen["generator", number, rank] for rank in range(size))
        adopted = first["adopted"]
        assert adopted[: case.in_turn] == list(range(1, case.in_turn + 1)), (
            "a version was skipped though awaited"
        )
        assert all(older < newer for older, newer in pairwise(adopted)), "versions went back"
        assert adopted[-1] == case.last, "the newest did not win"
        assert all(other == first for other in others), (
            "ranks of one group computed with different versions"
        )
        computed = {}
        for version, logits in first["steps"]:
            assert computed.setdefault(version, logits) == logits, (
                f"version {version} changed while it was held"
            )
        assert list(computed) == adopted
        assert len(set(computed.values())) == len(adopted), "training changed nothing"
    for rank in range(case.trainer):
        trainer = seen["trainer", 0, rank]
        assert trainer["steps"] == seen["trainer", 0, 0]["steps"] >= case.last
        assert not trainer["faults"]


HALF = {"dtype": "bfloat16"}
"""Generators in bfloat16, cast on the way from float32."""


@pytest.mark.parametrize(
    ("trainer", "generator", "kind"),
    [
        (1, 1, {"tied": True}),
        (2, 1, HALF),
        (1, 2, {**HALF, "cast": "trainer", "tied": True}),
        (2, 2, {}),
    ],
    ids=["1-1-tied", "2-1-cast-on-the-way", "1-2-cast-by-the-trainer-tied", "2-2"],
)
def test_each_rank_holds_the_bytes_of_gather_then_shard_in_every_version(
    play, trainer, generator, kind
):
    check(*play(trainer=trainer, groups=(generator,), in_turn=8, **kind))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [1, 2, 4])
@pytest.mark.parametrize("generator", [1, 2, 4])
@pytest.mark.parametrize("kind", [{}, {**HALF, "tied": True}], ids=["float32", "bfloat16-tied"])
def test_any_number_of_trainer_ranks_serves_any_number_of_generator_ranks(
    play, trainer, generator, kind
):
    check(*play(trainer=trainer, groups=(generator,), layers=2, **kind))


@pytest.mark.slow
def test_versions_nobody_took_are_skipped_and_the_newest_is_taken_by_all_ranks(play):
    case, seen = play(trainer=2, groups=(2,), in_turn=2, in_a_row=20, rests=True)
    check(case, seen)
    adopted = seen["generator", 0, 0]["adopted"]
    assert len(adopted) <= case.in_turn + 3, (
        "one that was whole, one before the last was known to all ranks, the last"
    )


@pytest.mark.slow
def test_generators_of_different_sizes_take_versions_from_one_trainer(play):
    check(*play(trainer=4, groups=(2, 1, 1), tied=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{}, HALF], ids=["float32", "bfloat16"])
def test_versions_sent_from_the_trainers_own_tensors_are_whole(play, kind):
    check(*play(trainer=2, groups=(2,), hold="until_settle", in_turn=0, **kind))
