"""`main(build)` and the `dataflow` command, as a user types them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dataflow import Graph, GraphError, Model, RunError, cli, inline, main, run, scorer, verify
from dataflow.folder.run_folder import RunFolder
from dataflow.history.launch import recorded_launch
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from graphs import played_by_programs, sorting
from operators import Generator, Trainer
from operators.credit import advantage


@scorer(isolate=False)
def reward(completion: str, answer: str) -> float:
    return float(completion == answer)


def build(*, policy: str = "policy", size: int = 64, group_size: int = 4) -> Graph:
    """Train something.

    Args:
        policy: folder of the policy.
        size: how many prompts there are.
        group_size: rollouts of a prompt.
    """
    graph, model = Graph("test"), Model(policy)
    generator, trainer = FakeGenerator(model=model, group_size=group_size), FakeTrainer(model=model)
    trainer(reward(generator(graph.source(FakePrompts(size=size)))))
    graph.feedback(trainer.weights, generator, max_staleness=1000)
    return graph


def status_of(*args: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(build, args=list(args))
    return ended.value.code


def test_keyword_arguments_become_flags_with_their_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("--help") == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "--group-size INT" in said and "rollouts of a prompt" in said and "--steps" in said


def test_an_unknown_flag_names_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("--group-sise", "3") == 2
    captured = capsys.readouterr()
    assert "--group-size" in captured.out + captured.err


def test_a_flag_of_another_system_is_told_with_its_name_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status_of("--num-generations", "8", "--max_steps=3", "--epsilon", "0.2") == 2
    told = capsys.readouterr().err
    assert "no --num-generations; it is called --group-size here" in told
    assert "no --max_steps; it is called --steps here" in told
    assert (
        "no --epsilon; that is Trainer(loss=partial(grpo, clip_low=...)), in the file of a graph"
        in told
    )


def test_a_flag_of_the_wrong_type_is_refused() -> None:
    assert status_of("--group-size", "many") == 2


def test_explain_prints_the_plan_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(build, args=["--explain", "--runs", str(tmp_path / "runs")])
    assert "generator" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("policies/nope", "no folder policies/nope here, and the hub gives no model"),
        ("./nope", "no folder ./nope"),
    ],
)
def test_explain_refuses_a_model_that_is_not_there_as_the_run_does(
    policy: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_real() -> Graph:
        graph, model = Graph("test"), Model(policy)
        Trainer(model)(advantage(reward(Generator(model)(graph.source(FakePrompts())))))
        return graph

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    errors = []
    for flags in (["--explain"], ["--quiet"]):
        with pytest.raises(SystemExit) as ended:
            main(build_real, args=flags)
        assert ended.value.code == 1
        errors.append(capsys.readouterr().err)
    assert said in errors[0] and errors[0] == errors[1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--steps", "0"), "at least 1 step"),
        (("--keep-steps", "-1"), "the last 0 steps or more"),
        (("--track", "wandbb"), "did you mean 'wandb'"),
        (("--resume", "runs/nope"), "no run folder"),
    ],
)
def test_explain_refuses_the_flags_that_the_run_would_refuse(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of("--explain", *flags) == 1
    assert said in capsys.readouterr().err


def test_a_program_that_adds_to_its_policy_is_explained_before_that_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main(played_by_programs.build, args=["--explain"])
    assert "a warm start of 300 steps makes it" in capsys.readouterr().out and not any(
        tmp_path.iterdir()
    )


@pytest.mark.parametrize("looks", [("--explain",), ("--draw", "g.svg"), ("--foresee", "2xcpu")])
def test_whoever_looks_at_a_graph_trains_no_warm_start_and_is_told_as_if_it_were_there(
    looks: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "operators.warm_start.launch._train", lambda *args: pytest.fail("it was trained")
    )
    monkeypatch.chdir(tmp_path)
    main(sorting.build, args=[*looks, "--policy", "made/later"])
    told = capsys.readouterr().out
    assert not (tmp_path / "made").exists()
    if "--explain" in looks:
        assert (
            "weights 2.5 MiB" in told
            and "a warm start of 140 steps makes it when the run starts" in told
        )


@pytest.mark.parametrize("suffix", ["svg", "dot", "mmd", "html"])
def test_draw_writes_the_picture_that_its_suffix_names(tmp_path: Path, suffix: str) -> None:
    main(build, args=["--draw", str(tmp_path / f"g.{suffix}")])
    assert "generator" in (tmp_path / f"g.{suffix}").read_text()


def test_a_refused_graph_ends_with_status_1_and_one_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status_of("--size", "4", "--explain") == 1
    assert re.search(r"GraphError: 'prompts' ends after 4 prompts", capsys.readouterr().err)


def test_devices_that_are_not_there_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("--gpus", "generator=600", "--draw", "plan.svg") == 1
    assert "600 GPUs" in capsys.readouterr().err
    main(build, args=["--gpus", "generator=600", "--explain"])
    assert "foreseen: the plan on 600 GPUs of no kind" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["generator", "generator=", "=a", "generator=a+", "generator=a,generator=b"]
)
def test_an_unreadable_place_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("--place", text, "--explain") == 1
    assert re.search(r"--place is '.*', which cannot be read at", capsys.readouterr().err)


def test_hosts_are_read_as_names_even_where_these_are_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status_of("--place", "generator=1+2,trainer=c", "--explain") == 1
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert (
        "{'generator': ('1', '2'), 'trainer': ('c',)}, but this run has this machine alone" in said
    )


def test_a_path_longer_than_any_file_systems_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of("--runs", "x" * 5000, "--resume", "x" * 5000) == 1
    monkeypatch.setattr(sys, "argv", ["dataflow", "show", "x" * 5000])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err.count("no file or folder can have a name that long") == 2


@pytest.mark.parametrize("text", ["generator", "generator=", "=3"])
def test_an_unreadable_assignment_is_refused(text: str) -> None:
    assert status_of("--gpus", text, "--explain") == 1


def test_a_parameter_that_is_a_flag_of_every_run_is_refused() -> None:
    def clashing(*, steps: int) -> Graph:
        raise AssertionError

    with pytest.raises(GraphError, match="'clashing' has a parameter 'steps'.*call it otherwise"):
        main(clashing, args=[])


def test_the_command_verifies_and_shows_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(build(), on=inline(), steps=4, runs=tmp_path, quiet=True)
    assert (result.steps, result.verdict.clean) == (4, True)
    for command, said in {"verify": "clean: ", "show": "ledger"}.items():
        monkeypatch.setattr(sys, "argv", ["dataflow", command, str(result.folder)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
        assert said in capsys.readouterr().out


def typed(*words: str) -> int | str | None:
    """The status of the `dataflow` command with these words."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["dataflow", *words])
        cli.main()
    return ended.value.code


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_the_command_alone_says_what_there_is(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(*words) == 0
    told = capsys.readouterr().out
    assert all(f"  {name} " in told for group in cli.COMMANDS.values() for name in group)
    assert "--version" in told and "runs/latest" in told


def test_the_command_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("--version") == 0
    assert re.search(r"dataflow-rl \S+, python \S+, torch \S+, from /", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("verfy", "runs/latest"), "no command 'verfy'; did you mean 'verify'?"),
        (("--verison",), "did you mean '--version'?"),
        (("resume", "--step", "3"), "--steps"),
        (("show", "latest"), "did you mean 'runs/latest'?"),
        (("show", "runs/sortin-2026"), "did you mean 'runs/sorting-2026'?"),
        (("show", "sorting"), "did you mean 'runs/sorting-2026'?"),
        (("scale", "runs/sorting-2026", "x=1"), "takes no commands"),
    ],
)
def test_what_is_mistyped_is_told_with_what_was_meant(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("sorting-2026", "sorting-2026-rollouts"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "sorting-2026" / "config.json").write_text("{}")
    (tmp_path / "runs" / "latest").symlink_to("sorting-2026")
    monkeypatch.chdir(tmp_path)
    assert typed(*words) == 2
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


def test_a_reader_that_has_enough_ends_the_command_without_a_word() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "dataflow", "list", "--help"]
    found = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (found.returncode, found.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_swap_names_a_file_from_where_it_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "dataflow.scheduler.requests.ask_to_swap",
        lambda folder, node, reference: asked.append(reference) or "done",
    )
    monkeypatch.chdir(tmp_path)
    for operator in (
        "new/rewards.py:strict",
        "trl:rewards.py:theirs",
        "rewards:strict",
        "trl:rewards:theirs",
    ):
        assert typed("swap", str(tmp_path), f"reward={operator}") == 0
    assert asked == [
        f"{tmp_path}/new/rewards.py:strict",
        f"trl:{tmp_path}/rewards.py:theirs",
        "rewards:strict",
        "trl:rewards:theirs",
    ]


def test_verify_ends_with_status_1_when_a_group_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(build(), on=inline(), steps=4, runs=tmp_path, quiet=True)
    (result.folder / "rollouts" / "step-000002.arrow").unlink()
    monkeypatch.setattr(sys, "argv", ["dataflow", "verify", str(result.folder)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "BROKEN" in capsys.readouterr().out


def test_a_folder_that_is_no_run_is_an_error_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["dataflow", "verify", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code != 0
    captured = capsys.readouterr()
    assert "nothing" in captured.out + captured.err


def test_a_program_goes_on_with_a_run_of_the_same_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(build(size=64), on=inline(), steps=2, runs=tmp_path, quiet=True)
    assert (
        status_of("--resume", str(result.folder), "--inline", "--size", "48", "--steps", "4") == 1
    )
    assert "'prompts' was 64 and is 48" in re.sub(r"\s+", " ", capsys.readouterr().err).replace(
        "size of ", ""
    )
    assert status_of("--resume", str(result.folder), "--inline", "--size", "64") == 1
    assert "has made its 2 steps" in capsys.readouterr().err


def test_a_run_that_nobody_can_start_again_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(build(), on=inline(), steps=2, runs=tmp_path, quiet=True)
    for command in (cli.resume, cli.replay):
        with pytest.raises(
            RunError, match=r"started by a script that calls run\(...\).*call run\(graph, resume="
        ):
            command(result.folder)


def test_a_run_leaves_its_flags_and_their_file_makes_the_same_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "train.py"
    program.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    Path("mine.toml").write_text("size = 48\ninline = true\nquiet = true\nsteps = 3\n")
    for given in (
        ["--config", "mine.toml", "--group-size", "3"],
        ["--config", "runs/latest/config.yaml"],
    ):
        monkeypatch.setattr(sys, "argv", [str(program), *given])
        main(build)
    first, second = sorted(path for path in Path("runs").iterdir() if not path.is_symlink())
    texts = [(run / "config.yaml").read_text() for run in (first, second)]
    assert f"graph: {program}" in texts[0] and "size: 48\ngroup_size: 3\nsteps: 3" in texts[0]
    assert texts[0] == texts[1]
    begun = [recorded_launch(RunFolder.open(run)) for run in (first, second)]
    assert begun[0] is not None and begun[1] is not None and begun[0].flags == begun[1].flags
    assert begun[0].arguments == ("--size=48", "--inline", "--quiet", "--steps=3", "--group-size=3")
    assert verify(second).clean
    Path("mine.toml").unlink()
    monkeypatch.setattr(
        sys, "argv", [str(program), *begun[0].arguments, "--steps", "5", "--resume", str(first)]
    )
    main(build)
    assert len(RunFolder.open(first).read_metrics()) == 5


def test_the_command_starts_the_program_that_a_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: became.append(words[1:]))
    for program, how in (
        ("graphs.rloo", ["-m", "graphs.rloo"]),
        ("mine/train.py", ["mine/train.py"]),
    ):
        file = tmp_path / "run.yaml"
        file.write_text(f"graph: {program}\nlr: 1e-6\n")
        with contextlib.suppress(SystemExit, TypeError):
            cli.run_file(file, ("--steps", "3"))
        assert became.pop() == [*how, "--config", str(file), "--steps", "3"]
    file.write_text("lr: 1e-6\n")
    assert typed("run", str(file)) == 2 and not became
