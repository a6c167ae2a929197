"""Runs of agents: programs that nobody rewrote, whose calls are turns; what goes wrong there is no reward."""

import json
import os
import secrets
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from rigs.operators import struck

from dataflow import Devices, Graph, Model, Result, collect, inline, run, scorer
from dataflow.errors import OperatorError
from dataflow.folder.faults import read_faults
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits, Patience
from operators import Endpoint, Evaluate, Generator, Prompts, Trainer, agent
from operators.credit import advantage
from operators.losses import aipo

pytest.importorskip("uvicorn", reason="the endpoint needs the extra 'serve'")
pytestmark = [pytest.mark.usefixtures("forked", "one_core"), pytest.mark.timeout(180)]

SCRIPT = Path(__file__).with_name("agent_of_urllib.py")
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}-"
    "{% endfor %}{% if add_generation_prompt %}a={% endif %}"
)
STEPS = 4
TURNS = 3
COMMAND = f"python {SCRIPT}"
SHARED = ("json", "urllib.request", "threading", "subprocess")
"""Imports of the program, which its starts share."""
talker = agent(COMMAND, name="talker", columns=("answer",), returns=str, imports=SHARED, concurrency=8)


@pytest.fixture(scope="module")
def chatty(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny policy with a chat template."""
    folder = tmp_path_factory.mktemp("agents") / "chatty"
    shutil.copytree(policy, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@scorer(isolate=False)
def reward(talker: str, completion: str) -> float:
    return sum(letter in "abcdefghijklm" for letter in completion) / (1 + len(completion)) + 0.0 * len(talker)


def rows(count: int = 40) -> list[dict[str, str]]:
    return [{"prompt": f"{chr(97 + n % 26)}{n}=", "answer": str(1 + n % TURNS)} for n in range(count)]


def graph(policy: Path, *, max_staleness: int = 1, eval_every: int = 2) -> Graph:
    g, model = Graph("agents"), Model(str(policy))
    generator = Generator(model, group_size=2, max_tokens=8, slots=16, segment_tokens=2)
    trainer = Trainer(
        model, loss=partial(aipo, rho=4.0), prompts_per_step=4, lr=1e-2, normalize="rollouts", checkpoint_every=1
    )
    prompts = Prompts(rows(), columns=("answer",), epochs=None)
    held_out = Prompts(rows(6), columns=("answer",), name="held_out", group_size=1)
    trainer(advantage(reward(talker(generator, g.source(prompts)))))
    Evaluate(every_steps=eval_every)(reward(talker(generator, g.source(held_out))))
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


def losses(result: Result) -> list[float]:
    return [line["loss"] for line in result.metrics if "loss" in line]


def rollouts(result: Result) -> pa.Table:
    files = RunFolder.open(result.folder).rollouts_of()
    return pa.concat_tables([files.read(step) for step in range(1, result.steps + 1)])


def programs(mark: str) -> list[int]:
    """Processes that inherited this mark, but for this one and its forks that are workers."""
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
            is_ours = process.environ().get("AGENT_RUN_TEST") == mark
        except psutil.Error:
            continue
        if is_ours and ("program_host.py" in words or SCRIPT.name in words or "sleep 987" in words):
            found.append(process.pid)
    return found


@pytest.fixture(autouse=True)
def no_program_is_left(monkeypatch: pytest.MonkeyPatch) -> Any:
    mark = secrets.token_hex(8)
    monkeypatch.setenv("AGENT_RUN_TEST", mark)
    yield
    assert not programs(mark), "all programs end with their run"


def nothing_is_left(result: Result) -> None:
    assert not list((result.folder / "finished").rglob("*.turns"))


# What a rollout is


@pytest.mark.parametrize("imports", [(), SHARED])
def test_what_a_program_was_answered_is_trained_to_the_id(chatty: Path, imports: tuple[str, ...]) -> None:
    """Ids and log-probabilities of the rows are those that the program saw; its prompts are the context."""
    g = Graph("exact")
    generator = Generator(Model(str(chatty)).frozen(), group_size=2, max_tokens=8, slots=16)
    asks = agent(COMMAND, name="talker", columns=("answer",), returns=str, imports=imports, concurrency=4)
    made = asks(Endpoint(generator), g.source(Prompts(rows(6), columns=("answer",))))
    found = collect(made, rows=12).to_pylist()
    assert len(found) == 12
    for row in found:
        assert row["error"] is None and row["finish_reason"] == "stop", row["error"]
        seen = json.loads(row["talker"])
        tokens, mask, turns, logprobs = (np.array(row[name]) for name in ("tokens", "mask", "turn", "logprobs"))
        assert len(seen) == int(row["answer"]) and (mask == (turns >= 0)).all()
        for turn, (prompt, ids, own) in enumerate(seen):
            at = np.flatnonzero(turns == turn)
            assert tokens[at].tolist() == ids and tokens[: at[0]].tolist() == prompt
            assert np.allclose(logprobs[at], own, atol=1e-6)
        assert len(tokens) == len(seen[-1][0]) + len(seen[-1][1]), "what came last is the policy's"
        assert (np.array(row["versions"])[mask] == 0).all()


def test_a_program_whose_turns_are_used_up_is_over_and_its_failure_is_the_length(chatty: Path) -> None:
    g = Graph("over")
    generator = Generator(Model(str(chatty)).frozen(), group_size=1, max_tokens=4, slots=8)
    ends = agent(COMMAND, name="talker", columns=("answer",), returns=float, imports=SHARED, max_turns=3)
    endless = [{"prompt": f"a{n}=", "answer": "endless"} for n in range(2)]
    found = collect(ends(generator, g.source(Prompts(endless, columns=("answer",)))), rows=2).to_pylist()
    assert [(row["finish_reason"], row["error"], row["talker"], max(row["turn"])) for row in found] == [
        ("length", None, 0.0, 2)
    ] * 2


@pytest.mark.parametrize("does", ["rewrites", "parallel", "again"])
def test_what_goes_on_from_no_call_before_is_a_training_row_of_its_own(does: str, chatty: Path) -> None:
    """A conversation that was rewritten, two calls at once from one past, the same call again: each token is trained
    once, and no call is refused."""
    g = Graph("rows")
    generator = Generator(Model(str(chatty)).frozen(), group_size=2, max_tokens=4, slots=8)
    tasks = [{"prompt": f"a{n}=", "answer": does} for n in range(3)]
    several = agent(COMMAND, name="talker", columns=("answer",), returns=float, imports=SHARED, concurrency=6)
    found = collect(several(generator, g.source(Prompts(tasks, columns=("answer",), epochs=1))), rows=6).to_pylist()
    for row in found:
        assert (row["error"], row["finish_reason"]) == (None, "stop"), row["error"]
        mask, turns, parts = (np.array(row[name]) for name in ("mask", "turn", "training_row"))
        said = {"rewrites": [[0], [1]], "parallel": [[0, 1], [2]], "again": [[0], [1]]}[does]
        assert [sorted(set(turns[mask & (parts == part)])) for part in range(2)] == said
        assert parts.max() == 1 and row["talker"] == 1.0


# Programs that fail

WRONG = {
    "raises": "raised: its program ended with status 1: ValueError: the agent is broken",
    "hangs": "hung: no call and no end within 2 s",
    "dies": "died: its program ended by signal 9",
    "shouts": "unusable: it said more than 1024 KB",
    "mumbles": "unusable: the last line of its output returned 'no number'",
    "silent": "unusable: its program ended well and never called",
}


def test_a_program_that_goes_wrong_is_an_error_of_its_rollouts_and_no_reward(chatty: Path) -> None:
    g = Graph("unruly")
    generator = Generator(Model(str(chatty)).frozen(), group_size=2, max_tokens=4, slots=8)
    tasks = [{"prompt": f"a{n}=", "answer": does} for n, does in enumerate([*WRONG, "strange"])]
    unruly = agent(
        COMMAND, name="talker", columns=("answer",), returns=float, imports=SHARED, timeout_s=2.0, concurrency=6
    )
    found = collect(unruly(generator, g.source(Prompts(tasks, columns=("answer",), epochs=1))), rows=14).to_pylist()
    assert len(found) == 14
    for row in found:
        if row["answer"] == "strange":
            assert (row["error"], row["talker"]) == (None, 401.0), "the key of nobody opens nothing"
            continue
        assert row["error"].startswith("talker: " + WRONG[row["answer"]]), row["error"]
        assert row["finish_reason"] == "error" and row["talker"] is None


# Whole runs


def test_a_run_of_agents_trains_every_group_once_and_none_beyond_the_bound(chatty: Path, tmp_path: Path) -> None:
    result = run(graph(chatty), steps=STEPS, runs=tmp_path, quiet=True)
    assert result.verdict.clean, result.verdict.line
    assert f"{STEPS * 4} trained + 0 dropped" in result.verdict.line and "max staleness 1 of 1" in result.verdict.line
    assert not pc.any(pc.is_valid(rollouts(result).column("error"))).as_py()
    assert {line["eval_n"] for line in result.metrics if "eval_n" in line} == {6}
    nothing_is_left(result)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "victim", ["talker", pytest.param("generator", marks=SLOW), pytest.param("trainer", marks=SLOW)]
)
def test_a_run_of_agents_whose_worker_is_killed_goes_on_and_is_clean(victim: str, chatty: Path, tmp_path: Path) -> None:
    g, mark = graph(chatty), tmp_path / "struck"

    def blow() -> None:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    operator = g.operators[victim]
    object.__setattr__(operator, "build", struck(operator, blow, after=12).build)
    limits = Limits(stop_s=2.0, patience=Patience(first_s=0.05, of_one=3))
    result = run(g, steps=STEPS, runs=tmp_path / "runs", quiet=True, limits=limits)
    assert result.verdict.clean, result.verdict.line
    assert f"{STEPS * 4} trained + 0 dropped" in result.verdict.line
    (fault,) = read_faults(result.folder)
    assert fault["worker"] == f"{victim}-0"
    assert not pc.any(pc.is_valid(rollouts(result).column("error"))).as_py()
    nothing_is_left(result)


def test_programs_of_a_run_that_is_cut_off_are_told_their_turns_again(
    chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its losses are those of a run that nobody cut off, and the turns that it had are not drawn again."""
    from operators.agents.runtime import AgentsRuntime

    counts: list[tuple[int, int]] = []

    def noted(self: AgentsRuntime, close: Any = AgentsRuntime.close) -> None:
        status = self.status()
        counts.append((int(status["turns"]), int(status["played"])))
        close(self)

    monkeypatch.setattr(AgentsRuntime, "close", noted)
    monkeypatch.setattr(sys.modules["dataflow.run"], "this_machine", lambda: Devices(cpus=1))

    def synchronous() -> Graph:
        return graph(chatty, max_staleness=0, eval_every=100)

    undisturbed = run(synchronous(), steps=2, on=inline(), runs=tmp_path / "whole", quiet=True)

    def boom() -> None:
        raise ValueError("boom")

    failing = synchronous()
    generator = failing.operators["generator"]
    object.__setattr__(generator, "build", struck(generator, boom, after=14).build)
    with pytest.raises(OperatorError, match="boom"):
        run(failing, steps=2, on=inline(), runs=tmp_path, quiet=True)
    assert list((tmp_path / "latest").resolve().rglob("*.turns"))
    result = run(synchronous(), steps=2, on=inline(), resume=tmp_path / "latest", quiet=True)
    assert result.verdict.clean and result.steps == 2, result.verdict.line
    assert losses(result) == losses(undisturbed)
    (whole, _), (cut, _), (rest, played) = counts
    assert played > 0 and cut + rest == whole, counts
    nothing_is_left(result)
