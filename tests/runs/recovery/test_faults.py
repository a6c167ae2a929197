"""Faults, each dealt to a whole run: it goes on with the fault on record, or ends with the
culprit's name.
"""

import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.compute as pc
import pytest
from rigs.graphs import fake_graph, reward, tiny_graph, words
from rigs.machine import alive, wait_until
from rigs.operators import Around, Keep, built_by, signalled, slow, struck
from rigs.policy import CONTEXT_TOKENS
from rigs.programs import Program, program, under_way
from rigs.ranks import processes_of
from rigs.sent import agree

from dataflow import (
    DataflowError,
    Graph,
    GraphError,
    Model,
    RunError,
    collect,
    inline,
    run,
    scorer,
    verify,
)
from dataflow.errors import DeadlineError, RecordError, WorkerDied
from dataflow.folder.faults import FILE, STOPPED, restarts
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits, Patience
from dataflow.runtime import Batch, Context, Runtime
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from operators import Prompts

pytestmark = [pytest.mark.usefixtures("forked", "one_core"), pytest.mark.timeout(180)]


__all__ = ["program"]


MODEL = Model("fake-policy")


QUICK = Limits(stop_s=2.0, patience=Patience(first_s=0.05, of_one=2))


AT_ONCE = Limits(stop_s=2.0, patience=Patience(of_one=1))


"""For what a restart would not mend."""


def the_folder(runs: Path) -> RunFolder:
    return RunFolder.open((runs / "latest").resolve())


def clean_as_far_as_it_came(runs: Path) -> None:
    verdict = verify(the_folder(runs).path)
    assert verdict.clean, verdict.line


# Workers that end


class Once:
    """True for the first caller of all processes, and for no other."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self) -> bool:
        try:
            self.mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def victim(name: str, number: int, first: Once) -> Graph:
    """Fakes, of which one gets a signal in the midst of its work, in its first attempt."""
    source, generator = FakePrompts(size=64), FakeGenerator(model=MODEL)
    trainer = FakeTrainer(model=MODEL)
    chosen: dict[str, Any] = {"source": source, "generator": generator, "trainer": trainer}

    def blow() -> None:
        if first():
            os.kill(os.getpid(), number)

    if name in chosen:
        return fake_graph(**{**chosen, name: struck(chosen[name], blow)})

    @scorer(isolate=False)
    def judge(answer: str) -> float:
        if answer == "40":
            blow()
        return 0.0

    return fake_graph(**chosen, scorers=(judge,))


def faults(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def goes_on_to_its_end(graph: Graph, worker: str, cause: str, runs: Path, limits: Limits) -> None:
    """With one worker started again once, and every group trained once."""
    result = run(graph, runs=runs, quiet=True, limits=limits)
    assert result.verdict.clean and "64 groups issued = 64 trained" in result.verdict.line, (
        result.verdict.line
    )
    found = agree(result.folder)
    assert len(found) == len(graph.calls) - 1 and all(
        ends["received"][1] >= 64 for ends in found.values()
    ), found
    (fault,) = faults(result.folder)
    assert (fault["worker"], fault["attempt"], fault["recovered_s"] > 0) == (worker, 0, True)
    assert fault["cause"].startswith(cause)
    assert (
        f"---- {worker}, attempt 1 ----" in (result.folder / "logs" / f"{worker}.log").read_text()
    )


@pytest.mark.parametrize(
    ("name", "worker"),
    [
        pytest.param("source", "prompts-0", marks=pytest.mark.slow),
        ("generator", "generator-0"),
        pytest.param("scorer", "judge-0", marks=pytest.mark.slow),
        ("trainer", "trainer-0"),
    ],
)
def test_a_killed_worker_is_started_again_and_every_group_is_trained_once(
    name: str, worker: str, light: None, tmp_path: Path
) -> None:
    graph = victim(name, signal.SIGKILL, Once(tmp_path / "struck"))
    goes_on_to_its_end(graph, worker, "died (SIGKILL)", tmp_path / "runs", QUICK)


def killed_as_it_starts(runs: Path, chance: Random, within_s: float) -> tuple[str, float]:
    """Kill a worker so long after the first one was forked; which, and when."""
    logs = runs / "latest" / "logs"
    wait_until(
        lambda: any(processes_of(log.stem.rpartition("-")[0]) for log in logs.glob("*-0.log")), 60.0
    )
    at_s = chance.random() * within_s
    time.sleep(at_s)
    names = [log.stem.rpartition("-")[0] for log in logs.glob("*-0.log")]
    there = {name: found[0] for name in sorted(names) if (found := processes_of(name))}
    name = chance.choice(list(there))
    os.kill(there[name], signal.SIGKILL)
    return f"{name}-0", at_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_worker_that_is_killed_at_any_moment_of_the_start_is_started_again(
    seed: int, policy: Path, machine: None, tmp_path: Path
) -> None:
    """From the first fork on: a graph of two replicas with an evaluation, of which one process is
    struck.
    """
    graph = tiny_graph(policy, eval_every=3)
    with ThreadPoolExecutor() as pool:
        striking = pool.submit(
            killed_as_it_starts, tmp_path, Random(seed), 3.0 if seed % 2 else 0.5
        )
        result = run(graph, steps=40, replicas={"generator": 2}, runs=tmp_path, quiet=True)
        worker, at_s = striking.result()
    assert result.verdict.clean and result.steps == 40, result.verdict.line
    (fault,) = faults(result.folder)
    assert (fault["worker"], fault["cause"]) == (worker, "died (SIGKILL)")
    print(
        f"seed {seed}: {worker} killed {at_s:.2f} s after the first fork, back after"
        f" {fault['recovered_s']} s"
    )


@pytest.mark.slow
def test_a_worker_that_stopped_answering_is_killed_and_started_again(
    light: None, tmp_path: Path
) -> None:
    graph = victim("generator", signal.SIGSTOP, Once(tmp_path / "struck"))
    limits = dataclasses.replace(QUICK, hang_s=3.0, stopped_s=math.inf)
    goes_on_to_its_end(graph, "generator-0", "has not answered for", tmp_path / "runs", limits)


def test_a_worker_that_somebody_stopped_is_let_go_on_as_it_was(light: None, tmp_path: Path) -> None:
    graph = victim("generator", signal.SIGSTOP, Once(tmp_path / "struck"))
    result = run(
        graph, runs=tmp_path / "runs", quiet=True, limits=dataclasses.replace(QUICK, stopped_s=0.2)
    )
    assert result.verdict.clean and "64 groups issued = 64 trained" in result.verdict.line, (
        result.verdict.line
    )
    (fault,) = faults(result.folder)
    assert (fault["worker"], fault["cause"], fault["recovered_s"] is None) == (
        "generator-0",
        STOPPED,
        False,
    )
    assert (
        "worker 'generator-0' was stopped 1 times by a signal, and let go on"
        in result.verdict.notes
    )
    assert restarts(result.folder) == 0


def compute_for_ever() -> None:
    """Another slice than that which waits."""
    while True:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "limits", "cause"),
    [
        (compute_for_ever, {"stuck_s": 5.0, "asleep_s": 2.0}, "was stuck in one slice of work for"),
        (
            lambda: time.sleep(600),
            {"asleep_s": 2.0},
            "was stuck in one slice of work, and has computed nothing for",
        ),
    ],
    ids=["computes", "waits"],
)
def test_a_worker_that_is_stuck_in_one_slice_of_work_is_killed_and_started_again(
    work: Callable[[], None], limits: dict[str, float], cause: str, light: None, tmp_path: Path
) -> None:
    first = Once(tmp_path / "struck")
    generator = struck(FakeGenerator(model=MODEL), lambda: work() if first() else None)
    impatient = dataclasses.replace(QUICK, **limits)  # type: ignore[arg-type]
    goes_on_to_its_end(
        fake_graph(generator=generator), "generator-0", cause, tmp_path / "runs", impatient
    )


@pytest.mark.slow
def test_a_worker_that_fails_is_started_again(light: None, tmp_path: Path) -> None:
    first = Once(tmp_path / "struck")

    def trip() -> None:
        if first():
            raise OSError("the network is down")

    generator = struck(FakeGenerator(model=MODEL), trip)
    cause = "failed: 'generator' failed while working: OSError: the network is down"
    goes_on_to_its_end(
        fake_graph(generator=generator), "generator-0", cause, tmp_path / "runs", QUICK
    )


@pytest.mark.timeout(40)
def test_a_worker_that_dies_again_and_again_is_named_among_many_that_go_on(
    light: None, tmp_path: Path
) -> None:
    """The others never fall silent together."""
    g = Graph("many")
    for number in range(12):
        source = FakePrompts(name=f"p{number}", size=None)
        source = signalled(source, signal.SIGKILL) if number == 5 else slow(source, seconds=0.05)
        Keep(name=f"k{number}", path=tmp_path / f"kept-{number}")(g.source(source))
    with pytest.raises(
        WorkerDied, match=r"'p5-0' failed 2 times .*died \(SIGKILL\) \(2 times\).*logs/p5-0\.log"
    ):
        run(g, runs=tmp_path / "runs", quiet=True, limits=QUICK)
    assert [fault["worker"] for fault in faults(the_folder(tmp_path / "runs").path)] == [
        "p5-0",
        "p5-0",
    ]


def test_a_killed_forkserver_takes_its_workers_along_and_ends_the_run(
    light: None, tmp_path: Path
) -> None:
    generator = struck(FakeGenerator(model=MODEL), lambda: os.kill(os.getppid(), signal.SIGKILL))
    graph = fake_graph(generator=generator, trainer=FakeTrainer(model=MODEL), count=None)
    with pytest.raises(WorkerDied, match="the forkserver ended"):
        run(graph, runs=tmp_path, quiet=True, limits=QUICK)
    clean_as_far_as_it_came(tmp_path)


@pytest.mark.parametrize("name", [pytest.param("generator", marks=pytest.mark.slow), "trainer"])
def test_a_killed_worker_of_the_real_operators_leaves_no_process_and_no_memory(
    name: str, policy: Path, machine: None, tmp_path: Path
) -> None:
    graph = tiny_graph(policy)
    chosen = graph.operators[name]
    other = signalled(chosen, signal.SIGKILL, after=12)
    object.__setattr__(chosen, "build", other.build)
    with pytest.raises(WorkerDied, match=rf"'{name}-0' .*died \(SIGKILL\)"):
        run(graph, runs=tmp_path, quiet=True, limits=AT_ONCE)
    clean_as_far_as_it_came(tmp_path)


# Workers that fail


def test_an_operator_that_always_raises_ends_the_run_with_its_name_its_line_and_a_traceback(
    light: None, tmp_path: Path
) -> None:
    def boom() -> None:
        raise ValueError("boom")

    graph = fake_graph(
        generator=struck(FakeGenerator(model=MODEL), boom, after=1),
        trainer=FakeTrainer(model=MODEL),
    )
    message = (
        r"'generator-0' failed 2 times .*'generator-0' failed: 'generator' failed while working: "
        r"ValueError: boom .*test_faults\.py.*\(2 times\)"
    )
    with pytest.raises(RunError, match=message):
        run(graph, runs=tmp_path, quiet=True, limits=QUICK)
    clean_as_far_as_it_came(tmp_path)
    log = the_folder(tmp_path).log("generator").read_text()
    assert log.count("Traceback") >= 2 and "in boom" in log


class _Dying(Around):
    """Is killed when it has work."""

    def push(self, batch: Batch) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_that_cannot_be_built_again_ends_the_run_with_both_causes(
    light: None, tmp_path: Path
) -> None:
    first = Once(tmp_path / "built")
    fake = FakeGenerator(model=MODEL)

    def build(context: Context) -> Runtime:
        if not first():
            raise GraphError("the model is gone")
        return FakeGenerator.build(fake, context)

    generator = built_by(fake, lambda context: _Dying(build(context)))
    both = (
        r"failed: 'generator': the model is gone; a restart would not mend that \(before that:"
        r" .*died \(SIGKILL\)\)"
    )
    with pytest.raises(RunError, match=both):
        run(fake_graph(generator=generator), runs=tmp_path / "runs", quiet=True, limits=QUICK)
    clean_as_far_as_it_came(tmp_path / "runs")


@pytest.mark.parametrize("on", [None, inline()], ids=["processes", "inline"])
def test_a_model_that_is_not_there_is_named_before_anything_starts(
    on: Any, machine: None, tmp_path: Path
) -> None:
    from operators import Generator

    g = Graph("missing")
    model = Model(str(tmp_path / "nowhere"))
    trainer = FakeTrainer(model=model)
    generator = Generator(model)
    trainer(reward(generator(g.source(FakePrompts()))))
    g.feedback(trainer.weights, generator, max_staleness=1)
    with pytest.raises(
        GraphError, match=r"model 'nowhere' cannot be loaded: there is no folder .*; give a folder"
    ):
        run(g, on=on, runs=tmp_path / "runs", quiet=True, limits=QUICK)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_worker_that_never_gets_ready_is_named_when_the_start_is_overdue(
    light: None, tmp_path: Path
) -> None:
    generator = built_by(FakeGenerator(model=MODEL), lambda context: time.sleep(600))  # type: ignore[arg-type, return-value]
    graph = fake_graph(generator=generator, trainer=FakeTrainer(model=MODEL))
    with pytest.raises(
        DeadlineError, match=r"waited 6 s for \['generator-0'\] to start; see their logs"
    ):
        run(graph, runs=tmp_path, quiet=True, limits=Limits(start_s=6.0, stop_s=0.5))


# Scorers: what a call does wrong is a record of its rollout


def test_what_a_scorer_does_wrong_is_recorded_and_never_a_reward(
    policy: Path, machine: None, tmp_path: Path
) -> None:
    """Prompt by prompt, the scorer raises, loops, exits, eats memory, or gives none, for all or for
    some.
    """

    @scorer(timeout_s=0.4, memory_mb=64)
    def judge(completion: str, answer: str, position: int) -> float | None:
        kind, _, some = answer.partition("/")
        if some and position % 2:
            return 1.0 + len(completion)
        if kind == "raise":
            raise ValueError("cannot judge")
        if kind == "none":
            return None
        if kind == "exit":
            os._exit(5)
        eaten = []
        while kind in ("loop", "eat"):
            if kind == "eat":
                eaten.append(b"x" * (1 << 20))
                time.sleep(0.0005)
        return 1.0 + len(completion)

    kinds = ["raise", "loop", "exit", "eat", "none", "raise/some", "loop/some", "exit/some", "fine"]
    prompts = [
        {"prompt": f"{n}=", "answer": kind} for n, kind in enumerate([*kinds, *["fine"] * 20])
    ]
    credit = tiny_graph(
        policy, prompts=prompts, scorers=(judge.renamed("reward"),), prompts_per_step=4
    )
    result = run(credit, steps=3, runs=tmp_path, quiet=True)
    assert result.steps == 3 and result.verdict.clean, result.verdict.line
    folder = RunFolder.open(result.folder)
    with contextlib.closing(Ledger.open(folder.ledger)) as ledger:
        dropped = ledger.counts("trainer").dropped
    assert dropped == {"failed": 4, "skipped": 1}, "None says that the scorer does not apply"
    rows = [row for step in (1, 2, 3) for row in folder.rollouts_of().read(step).to_pylist()]
    assert [row["group_id"] for row in rows[::4]] == [5, 6, 7, *range(8, 17)]
    for row in rows:
        kind, _, some = row["answer"].partition("/")
        fails = bool(some) and row["position"] % 2 == 0
        assert (row["reward"] is None, row["advantage"] is None) == (fails, fails)
        assert row["reward"] != 0
        said = {"raise": "cannot judge", "loop": "0.4 s", "exit": "status 5", "fine": ""}[kind]
        assert (said in row["error"]) if fails else row["error"] is None


@pytest.mark.parametrize("whom", ["its process", "the server of the processes"])
@pytest.mark.parametrize(
    "on", [pytest.param(None, marks=pytest.mark.slow), inline()], ids=["processes", "inline"]
)
def test_a_scorers_process_that_is_killed_from_outside_costs_no_row(
    whom: str, on: Any, light: None, tmp_path: Path
) -> None:
    first = Once(tmp_path / "struck")
    pid = os.getpid if whom == "its process" else os.getppid

    @scorer
    def judge(answer: str) -> float:
        if answer == "20" and first():
            os.kill(pid(), signal.SIGKILL)
            time.sleep(5)
        return float(answer)

    result = run(fake_graph(scorers=(judge,), count=48), on=on, runs=tmp_path / "runs", quiet=True)
    assert first.mark.exists()
    assert result.steps == 6 and result.verdict.clean, result.verdict.line
    for step in range(1, 7):
        table = RunFolder.open(result.folder).rollouts_of().read(step)
        assert (
            table.column("judge").to_pylist() == table.column("group_id").cast("double").to_pylist()
        )
        assert table.column("error").null_count == len(table)


@pytest.mark.parametrize("kind", ["raise", pytest.param("exit", marks=pytest.mark.slow)])
def test_a_scorer_that_always_fails_ends_the_run_with_its_reason(
    kind: str, policy: Path, machine: None, tmp_path: Path
) -> None:
    @scorer
    def reward(completion: str) -> float:
        if kind == "exit":
            sys.exit("no licence")
        raise ValueError("no licence")

    graph = tiny_graph(policy, scorers=(reward,), max_tokens=2)
    with pytest.raises(
        RunError, match=r"'trainer' dropped .* groups in a row and trained none.*no licence"
    ):
        run(graph, on=inline(), runs=tmp_path, quiet=True)
    clean_as_far_as_it_came(tmp_path)


# The scheduler and the user


@pytest.mark.slow
def test_no_process_outlives_a_scheduler_that_is_killed_while_the_forkserver_loads(
    program: Callable[[str], Program],
) -> None:
    running = program("loading")
    wait_until((running.folder / "building").exists, 60.0, "the forkserver's load")
    family = running.family()
    running.process.kill()
    running.process.wait(10)
    wait_until(lambda: not alive(family), 5.0, "the end of all processes")
    wait_until(
        lambda: not any(made.exists() for made in running.made()), 5.0, "the end of its sockets"
    )


def test_control_c_ends_the_step_writes_a_checkpoint_and_leaves_a_clean_folder(
    program: Callable[[str], Program],
) -> None:
    running = program("learning")
    under_way(running)
    running.press_control_c()
    assert running.process.wait(100) == 0, (running.folder / "output").read_text()
    folder = the_folder(running.runs)
    assert running.outcome() == "stopped"
    clean_as_far_as_it_came(running.runs)
    steps = max(line["step"] for line in folder.read_metrics())
    assert folder.latest_checkpoint() == folder.checkpoints.folder(steps)


@pytest.mark.slow
def test_a_second_control_c_ends_the_run_at_once(program: Callable[[str], Program]) -> None:
    running = program("deaf_trainer")
    under_way(running)
    family = running.family()
    running.press_control_c()
    wait_until((running.folder / "asked-to-drain").exists, 30.0, "the first Ctrl-C")
    assert running.process.poll() is None
    running.press_control_c()
    assert running.process.wait(60) != 0
    assert "KeyboardInterrupt" in (running.folder / "output").read_text()
    wait_until(lambda: not alive(family), 5.0, "the end of all processes")
    clean_as_far_as_it_came(running.runs)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_a_signal_to_all_processes_of_a_run_ends_it_as_control_c_does(
    number: int, program: Callable[[str], Program]
) -> None:
    """As a service manager or Slurm sends it, and a terminal that goes away."""
    running = program("endless")
    under_way(running)
    family = running.family()
    for pid in family:
        os.kill(pid, number)
    assert running.process.wait(60) == 0, running.output()
    assert running.outcome() == "stopped"
    wait_until(lambda: not alive(family), 5.0, "the end of all processes")
    clean_as_far_as_it_came(running.runs)


@pytest.mark.parametrize("kind", ["late", "loading"])
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_while_workers_start_ends_the_run_and_waits_for_none_of_them(
    number: int, kind: str, program: Callable[[str], Program]
) -> None:
    running = program(kind)
    wait_until((running.folder / "building").exists, 60.0, "the start")
    family = running.family()
    os.killpg(running.process.pid, number)
    assert running.process.wait(30) == 0, running.output()
    wait_until(lambda: not alive(family), 5.0, "the end of all processes")
    assert running.outcome() == "stopped"
    clean_as_far_as_it_came(running.runs)


# Prompts


def write(path: Path, *rows: Any) -> Path:
    """A JSONL file; texts stand as they are."""
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


GOOD = [{"prompt": f"{n}=", "answer": str(n)} for n in range(4)]


def prompts_run(source: Any, runs: Path, *, on: Any = None, **knobs: Any) -> Any:
    prompts = Prompts(source, columns=("answer",), epochs=1, **knobs)
    graph = fake_graph(
        source=prompts,
        generator=FakeGenerator(model=MODEL),
        trainer=FakeTrainer(model=MODEL, prompts_per_step=2),
    )
    return run(graph, on=on, runs=runs, quiet=True, limits=QUICK)


BAD_ROWS = {
    "broken JSON": ('{"prompt": "4=', "is no JSON"),
    "missing column": ({"prompt": "4="}, "no column 'answer'"),
    "null": ({"prompt": None, "answer": "4"}, "null in 'prompt'"),
    "wrong type": ({"prompt": "4=", "answer": [4]}, r"\[4\]"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_ends_the_run_at_its_start_with_file_and_fault(
    kind: str, light: None, tmp_path: Path
) -> None:
    row, said = BAD_ROWS[kind]
    path = write(tmp_path / "p.jsonl", *GOOD, row)
    with pytest.raises(RecordError, match=f"'prompts': line 5 of .*p.jsonl'.*{said}"):
        prompts_run(path, tmp_path / "runs", on=inline())


def test_a_bad_row_is_named_also_when_the_source_runs_in_a_worker(
    light: None, tmp_path: Path
) -> None:
    path = write(tmp_path / "p.jsonl", *GOOD, '{"prompt": "4=')
    with pytest.raises(RunError, match=r"'prompts-0' failed: 'prompts': .*p\.jsonl"):
        prompts_run(path, tmp_path / "runs")


def test_bad_rows_are_left_out_and_counted_where_that_is_asked_for(
    light: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "p.jsonl", *GOOD, *(row for row, _ in BAD_ROWS.values()))
    result = prompts_run(path, tmp_path / "runs", on=inline(), on_bad="drop")
    assert result.steps == 2 and result.verdict.clean, result.verdict.line
    assert "4 groups issued = 4 trained" in result.verdict.line
    told = capfd.readouterr().err
    assert told.count("prompts left out") == len(BAD_ROWS) and told.count("rows=1") == len(
        BAD_ROWS
    ), told


def test_a_column_that_no_row_has_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "1=", "answr": "1"})
    with pytest.raises(GraphError, match=r"'answer'.*did you mean 'answr'"):
        prompts_run(path, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("rows", [[], [""]], ids=["empty", "blank line"])
def test_a_file_without_rows_ends_the_run_at_its_start(
    rows: list[str], light: None, tmp_path: Path
) -> None:
    path = write(tmp_path / "p.jsonl", *rows)
    with pytest.raises(DataflowError, match=r"'prompts' .*0 rows"):
        prompts_run(path, tmp_path / "runs", on=inline())
    with pytest.raises(RecordError, match="'prompts': there are no rows at all"):
        collect(Graph("empty").source(Prompts(path)), rows=1)


def test_a_file_that_is_not_there_is_named(tmp_path: Path, light: None) -> None:
    with pytest.raises(DataflowError, match=r"'prompts'.*nowhere\.jsonl"):
        prompts_run(tmp_path / "nowhere.jsonl", tmp_path / "runs", on=inline())


def test_equal_prompts_are_issued_each(light: None, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *GOOD, *GOOD)
    result = prompts_run(path, tmp_path / "runs", on=inline())
    assert result.steps == 4 and result.verdict.clean
    assert "8 groups issued = 8 trained" in result.verdict.line


@pytest.mark.parametrize("on", [None, inline()], ids=["processes", "inline"])
def test_a_source_whose_function_raises_ends_the_run_with_its_name(
    on: Any, light: None, tmp_path: Path
) -> None:
    def row(found: dict[str, str]) -> dict[str, str]:
        if found["answer"] == "3":
            raise KeyError("question")
        return found

    with pytest.raises(DataflowError, match=r"'prompts'.*KeyError: 'question'.*test_faults\.py"):
        prompts_run(GOOD, tmp_path / "runs", on=on, rows=row)


def test_an_iterable_that_raises_midway_ends_the_run_with_its_name(
    light: None, tmp_path: Path
) -> None:
    class Flaky:
        def __iter__(self) -> Iterator[dict[str, str]]:
            yield from GOOD * 20
            raise ConnectionError("the data base is gone")

    with pytest.raises(DataflowError, match=r"'prompts'.*the data base is gone"):
        prompts_run(Flaky(), tmp_path / "runs", on=inline())


def test_an_over_long_prompt_is_an_error_on_its_rollouts(policy: Path) -> None:
    from operators import Generator

    rows = [*words(2), {"prompt": "a" * (CONTEXT_TOKENS + 1), "answer": "?"}, *words(2)]
    g = Graph("long")
    generator = Generator(Model(str(policy)), group_size=3, max_tokens=4)
    table = collect(generator(g.source(Prompts(rows, columns=("answer",), epochs=1))), rows=1_000)
    assert len(table) == 15
    failed = table.filter(pc.equal(table.column("answer"), "?")).to_pylist()
    assert len(failed) == 3
    for row in failed:
        assert row["finish_reason"] == "error" and row["completion"] == ""
        assert str(CONTEXT_TOKENS) in row["error"]
    assert table.column("error").null_count == 12


def test_an_over_long_prompt_is_dropped_with_its_reason_and_the_run_goes_on(
    policy: Path, machine: None, tmp_path: Path
) -> None:
    rows = [*words(2), {"prompt": "a" * (CONTEXT_TOKENS + 1), "answer": "?"}, *words(9)]
    result = run(
        tiny_graph(policy, prompts=rows, epochs=1), steps=2, on=inline(), runs=tmp_path, quiet=True
    )
    assert result.steps == 2
    assert "8 trained + 1 dropped (1 failed)" in result.verdict.line
