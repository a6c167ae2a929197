"""Inline runs of the real operators: bit for bit the same for a seed, versions right, staleness
within its bound.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rigs.graphs import fake_graph, losses, tiny_graph
from rigs.operators import Around, mute, struck, wrapped

from dataflow import Devices, Graph, Model, Result, collect, inline, run, scorer
from dataflow.errors import DeadlineError, OperatorError
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from dataflow.worker.loop import NodeLoop

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(180)]

STEPS = 5
BOUND = 2
MODEL = Model("m")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inline")


def trained(policy: Path, folder: Path, **how: Any) -> Result:
    seed = how.pop("seed", 0)
    how = {"max_staleness": BOUND, "checkpoint_every": 1, **how}
    return run(
        tiny_graph(policy, **how), steps=STEPS, seed=seed, on=inline(), runs=folder, quiet=True
    )


@pytest.fixture(scope="module")
def asynchronous(policy: Path, folder: Path) -> Iterator[Result]:
    with pytest.MonkeyPatch.context() as patch:
        _one_core(patch)
        yield trained(policy, folder)


@pytest.fixture(scope="module")
def synchronous(policy: Path, folder: Path) -> Iterator[Result]:
    with pytest.MonkeyPatch.context() as patch:
        _one_core(patch)
        yield trained(policy, folder, max_staleness=0)


def _one_core(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules["dataflow.runner"], "this_machine", lambda: Devices(cpus=1))


def rollouts(result: Result) -> list[pa.Table]:
    return [
        RunFolder.open(result.folder).rollouts_of().read(step)
        for step in range(1, result.steps + 1)
    ]


# The same seed


@pytest.mark.parametrize("kind", ["asynchronous", "synchronous"])
def test_the_same_seed_gives_the_same_losses_bit_for_bit(
    kind: str, policy: Path, folder: Path, request: pytest.FixtureRequest
) -> None:
    first: Result = request.getfixturevalue(kind)
    again = trained(policy, folder, max_staleness=BOUND if kind == "asynchronous" else 0)
    assert len(losses(first.folder)) == STEPS and len(set(losses(first.folder))) == STEPS
    assert losses(again.folder) == losses(first.folder)
    for one, other in zip(rollouts(first), rollouts(again), strict=True):
        assert other.equals(one)
    last = [
        RunFolder.open(r.folder).latest_checkpoint() / "model.safetensors" for r in (first, again)
    ]  # type: ignore[operator]
    assert last[0].read_bytes() == last[1].read_bytes()


def test_another_seed_gives_other_losses(asynchronous: Result, policy: Path, folder: Path) -> None:
    other = trained(policy, folder, seed=1)
    assert all(
        a != b for a, b in zip(losses(asynchronous.folder), losses(other.folder), strict=True)
    )


@pytest.mark.slow
def test_the_timing_of_scorers_leaves_no_trace(policy: Path, folder: Path) -> None:
    """Scorer processes that answer in another order and at other times give the same run."""

    def losses_with(pauses: bool) -> list[float]:
        @scorer(processes=2)
        def reward(completion: str) -> float:
            if pauses:
                time.sleep(0.0005 * os.urandom(1)[0])
            return sum(letter in "abcdefgh" for letter in completion) / max(1, len(completion))

        return losses(trained(policy, folder, scorers=(reward,)).folder)

    assert losses_with(pauses=True) == losses_with(pauses=False)


def test_who_waits_for_a_process_sleeps_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.6 s of waiting are a hundred looks or so, and not thousands."""
    turns, turn = list[str](), NodeLoop.turn

    def counted(loop: NodeLoop) -> bool:
        turns.append(loop.node)
        return turn(loop)

    @scorer(processes=1)
    def reward(completion: str) -> float:
        time.sleep(0.6)
        return 1.0

    monkeypatch.setattr(NodeLoop, "turn", counted)
    g = Graph("slow")
    found = collect(
        reward(FakeGenerator(model=MODEL, group_size=1)(g.source(FakePrompts(size=1)))), rows=1
    )
    assert found.column("reward").to_pylist() == [1.0]
    assert 2 < turns.count("reward") < 600


def test_evaluation_leaves_no_trace_in_the_losses_of_a_synchronous_run(
    synchronous: Result, policy: Path, folder: Path
) -> None:
    assert losses(trained(policy, folder, max_staleness=0, eval_every=2).folder) == losses(
        synchronous.folder
    )


# Versions


def test_no_rollout_is_trained_older_than_the_bound_and_some_are_older_than_the_trainer(
    asynchronous: Result,
) -> None:
    ages = []
    for step, table in enumerate(rollouts(asynchronous), start=1):
        for versions in table.column("versions").to_pylist():
            ages.append(step - 1 - min(version for version in versions if version >= 0))
    assert min(ages) >= 0 and 0 < max(ages) <= BOUND
    told = [line["staleness_max"] for line in asynchronous.metrics if "loss" in line]
    assert max(told) == max(ages)


def test_a_synchronous_rollout_is_trained_by_the_weights_that_made_it(synchronous: Result) -> None:
    for step, table in enumerate(rollouts(synchronous), start=1):
        assert {v for versions in table.column("versions").to_pylist() for v in versions} == {
            -1,
            step - 1,
        }


def test_some_rollouts_go_on_under_newer_weights_and_never_under_older_ones(
    asynchronous: Result,
) -> None:
    spans = 0
    for table in rollouts(asynchronous):
        for versions in table.column("versions").to_pylist():
            chosen = [version for version in versions if version >= 0]
            assert chosen == sorted(chosen)
            spans += len(set(chosen)) > 1
    assert spans > 0


def test_every_token_has_the_log_probability_of_the_version_it_names(
    asynchronous: Result, policy: Path
) -> None:
    """Each step's checkpoint is loaded anew, and asked for the tokens of the rollouts that name its
    version.
    """
    import torch
    from transformers import AutoModelForCausalLM

    checkpoints = RunFolder.open(asynchronous.folder).checkpoints
    seen: dict[int, int] = {}
    for table in rollouts(asynchronous):
        for row in table.to_pylist():
            mask = np.array(row["mask"])
            (version, *others) = sorted(set(np.array(row["versions"])[mask].tolist()))
            if others or seen.get(version, 0) >= 4:
                continue
            seen[version] = seen.get(version, 0) + 1
            source = checkpoints.folder(version) if version else policy
            model = AutoModelForCausalLM.from_pretrained(source)
            tokens = torch.tensor(row["tokens"])
            with torch.no_grad():
                all_logprobs = model(tokens[None]).logits[0].float().log_softmax(-1)
            found = all_logprobs[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
            np.testing.assert_allclose(
                np.array(row["logprobs"])[1:][mask[1:]], found[mask[1:]], atol=2e-4
            )
    assert set(seen) >= {0, 1, 2}


def test_the_verdicts_are_clean_and_name_the_largest_staleness(
    asynchronous: Result, synchronous: Result
) -> None:
    assert asynchronous.verdict.clean and synchronous.verdict.clean
    assert f"max staleness {BOUND} of {BOUND}" in asynchronous.verdict.line
    assert "max staleness 0 of 0" in synchronous.verdict.line


# Errors inline


def test_an_operator_that_raises_ends_the_run_with_its_name_and_line(tmp_path: Path) -> None:
    def boom() -> None:
        raise ValueError("boom")

    generator = struck(FakeGenerator(model=MODEL), boom)
    graph = fake_graph(generator=generator, trainer=FakeTrainer(model=MODEL))
    with pytest.raises(
        OperatorError, match=r"'generator' failed while working: ValueError: boom .*test_inline\.py"
    ):
        run(graph, on=inline(), runs=tmp_path, quiet=True)


def test_an_inline_run_that_cannot_go_on_says_so_instead_of_waiting_for_ever(
    tmp_path: Path,
) -> None:
    graph = fake_graph(generator=mute(FakeGenerator(model=MODEL)), trainer=FakeTrainer(model=MODEL))
    with pytest.raises(
        DeadlineError, match=r"nothing has moved .* one of them waits for rows that never come"
    ):
        run(graph, on=inline(), runs=tmp_path, quiet=True, limits=Limits(stall_s=0.05))


@pytest.mark.parametrize("max_staleness", [0, pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_run_ends_whatever_the_bound_and_however_small_the_generator(
    max_staleness: int, policy: Path, tmp_path: Path
) -> None:
    """Four prompts a step, and room for one rollout at a time."""
    knobs = {"slots": 1, "group_size": 2, "segment_tokens": 1, "in_flight": 4}
    graph = tiny_graph(policy, max_staleness=max_staleness, max_tokens=3, generator_knobs=knobs)
    result = run(graph, steps=3, on=inline(), runs=tmp_path, quiet=True)
    assert result.steps == 3 and result.verdict.clean, result.verdict.line


class _Unclosed(Around):
    def close(self) -> None:
        super().close()
        raise OSError("this cannot be closed")


def test_what_cannot_be_closed_leaves_nothing_else_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Ledger] = []
    closed: list[Ledger] = []
    begin, close = Ledger.__init__, Ledger.close

    def begins(self: Ledger, *given: Any) -> None:
        made.append(self)
        begin(self, *given)

    def closes(self: Ledger) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(Ledger, "__init__", begins)
    monkeypatch.setattr(Ledger, "close", closes)
    model = Model("no-such-folder")
    generator = wrapped(FakeGenerator(model=model), _Unclosed)
    with pytest.raises(OSError, match="this cannot be closed"):
        run(
            fake_graph(generator=generator, trainer=FakeTrainer(model=model), count=16),
            on=inline(),
            runs=tmp_path,
        )
    assert made and not {id(each) for each in made} - {id(each) for each in closed}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_inline_run_with_the_step_under_way(number: int, tmp_path: Path) -> None:
    before, raised = signal.signal(signal.SIGHUP, signal.SIG_DFL), list[int]()

    @scorer(isolate=False)
    def judge(answer: str) -> float:
        if answer == "20" and not raised:
            raised.append(number)
            signal.raise_signal(number)
        return 0.0

    try:
        result = run(fake_graph(scorers=(judge,)), on=inline(), runs=tmp_path, quiet=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert result.verdict.clean and 0 < result.steps < 8
    assert RunFolder.open(result.folder).read_json("times.json")["outcome"] == "stopped"
