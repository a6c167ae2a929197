"""Every graph as its command makes it: it is checked, explained, and runs; wrong flags are refused
in words.
"""

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.forwards import saved, tokenizer_of
from rigs.graphs import words
from rigs.heads import classifier
from rigs.policy import ALPHABET, tiny_policy

from dataflow import Graph, main, verify
from dataflow.folder.run_folder import RunFolder
from graphs.tasks.text import TextTask
from operators import Generator, Trainer
from operators.credit import leave_one_out, normalized_advantage
from operators.forward import ForwardOperator
from operators.losses import cispo, gspo, rloo

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(180)]

STEPS = 2
TEXT = ("aipo", "grpo", "rloo", "dapo", "ppo", "distill", "sft")
"""Graphs over text files."""
OWN = ("sorting", "calculator", "guess", "products", "lake", "played_by_programs")
"""Graphs that make their policy themselves."""
REAL = ("arithmetic",)
"""Graphs of a real model, which `tests/graphs/test_arithmetic.py` tries."""
REWARD = '''"""Rewards."""


def early(completion: str) -> float:
    """The share of letters that stand early in the alphabet."""
    return sum(letter in "abcdefgh" for letter in completion) / max(1, len(completion))
'''

Flags = Callable[..., list[str]]


@pytest.fixture
def flags(policy: Path, tmp_path: Path) -> Flags:
    """The command line of a text graph on the tiny policy, as a function of its name and more
    flags.
    """
    torch.set_num_threads(1)
    (tmp_path / "rewards.py").write_text(REWARD)
    for name, count in (("train", 24), ("test", 4)):
        lines = (json.dumps(row) + "\n" for row in words(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))

    def made(name: str, *more: str) -> list[str]:
        given = {
            "policy": policy,
            "prompts": tmp_path / "train.jsonl",
            "held-out": tmp_path / "test.jsonl",
            "reward": f"{tmp_path / 'rewards.py'}:early",
            "prompts-per-step": 4,
            "group-size": 4,
            "max-tokens": 8,
            "eval-every": 1,
            "steps": STEPS,
            "runs": tmp_path / "runs",
        }
        if name == "sft":
            del given["group-size"]
        teacher = (
            ["--teacher", str(tiny_policy(tmp_path / "teacher", seed=1))]
            if name == "distill"
            else []
        )
        return (
            [part for flag, value in given.items() for part in (f"--{flag}", str(value))]
            + teacher
            + list(more)
        )

    return made


def build_of(name: str) -> Callable[..., Graph]:
    found: Callable[..., Graph] = importlib.import_module(f"graphs.{name}").build
    return found


def ran(tmp_path: Path) -> tuple[RunFolder, list[dict[str, Any]]]:
    """The only run of the test, whose ledger is clean, and its lines of metrics."""
    (folder,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    assert verify(folder).clean, verify(folder).line
    return RunFolder.open(folder), RunFolder.open(folder).read_metrics()


def refused(name: str, arguments: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status, and what was said on one line."""
    with pytest.raises(SystemExit) as ended:
        main(build_of(name), args=arguments)
    return int(str(ended.value.code)), " ".join(capfd.readouterr().err.split())


def test_every_graph_is_tried_here() -> None:
    files = {path.stem for path in Path(importlib.import_module("graphs").__path__[0]).glob("*.py")}
    assert files - {"__init__"} == {*TEXT, *OWN, *REAL}


@pytest.mark.parametrize("name", TEXT)
def test_a_graph_trains_and_evaluates_and_its_ledger_is_clean(
    name: str, flags: Flags, tmp_path: Path
) -> None:
    main(build_of(name), args=flags(name, "--inline", "--quiet"))
    _, lines = ran(tmp_path)
    leader = "actor" if name == "ppo" else "trainer"
    steps = [line for line in lines if line.get("node") == leader]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert all(line["grad_norm"] > 0 for line in steps)
    assert {line["step"] for line in lines if "eval_accuracy" in line} == set(range(STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "dapo"])
def test_a_graph_of_many_operators_runs_in_processes(
    name: str, flags: Flags, tmp_path: Path, machine: None
) -> None:
    main(build_of(name), args=flags(name, "--quiet"))
    _, lines = ran(tmp_path)
    assert {line["step"] for line in lines if "loss" in line} == set(range(1, STEPS + 1))


@pytest.mark.parametrize("name", TEXT)
def test_a_graph_explains_where_it_would_run(
    name: str, flags: Flags, capsys: pytest.CaptureFixture[str]
) -> None:
    main(build_of(name), args=flags(name, "--explain"))
    told = capsys.readouterr().out
    assert (
        "worker" in told
        and ("critic -> values" if name == "ppo" else "trainer -> generator") in told
    )


@pytest.mark.parametrize("name", OWN)
def test_a_graph_that_makes_its_policy_is_checked(
    name: str, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "lake":
        pytest.importorskip(
            "textarena", reason="textarena is not installed; pip install dataflow-rl[textarena]"
        )
    owner = f"graphs.tasks.{'guess' if name == 'played_by_programs' else name}"
    monkeypatch.setattr(importlib.import_module(owner), "warm_start", lambda folder, **how: policy)
    monkeypatch.setattr(
        importlib.import_module("graphs.tasks.guess"), "lay_out_chats", lambda folder: None
    )
    graph = build_of(name)()
    graph.check()
    assert {"trainer", "generator", "eval"} <= set(graph.operators)


def test_a_reward_model_may_take_the_place_of_the_reward(flags: Flags, tmp_path: Path) -> None:
    judge = saved(classifier("Llama", "SequenceClassification"), tmp_path / "judge")
    more = ["--judge", str(judge), "--answer", "", "--reward", "number", "--inline", "--quiet"]
    main(build_of("ppo"), args=flags("ppo", *more))
    folder, _ = ran(tmp_path)
    table = folder.rollouts_of("actor").read(1)
    assert (
        len(set(table.column("reward").to_pylist()))
        == len(set(table.column("completion").to_pylist()))
        > 1
    )


@pytest.mark.parametrize("name", ["aipo", "grpo"])
def test_a_reference_is_kept_where_distance_from_it_costs(
    name: str, flags: Flags, tmp_path: Path
) -> None:
    main(build_of(name), args=flags(name, "--kl", "0.1", "--lr", "1e-2", "--inline", "--quiet"))
    _, lines = ran(tmp_path)
    told = [line["kl_reference"] for line in lines if "loss" in line]
    assert told[0] == pytest.approx(0, abs=1e-5) and told[-1] > 1e-5


def test_the_policy_becomes_the_reference_of_grpo_again_and_again(
    flags: Flags, tmp_path: Path
) -> None:
    more = ("--kl", "0.1", "--lr", "1e-2", "--refresh-reference", "1", "--inline", "--quiet")
    main(build_of("grpo"), args=flags("grpo", *more))
    _, lines = ran(tmp_path)
    told = [(line["forward_versions"], line["kl_reference"]) for line in lines if "loss" in line]
    assert [versions for versions, _ in told] == [{"ref_logprobs": step} for step in range(STEPS)]
    assert all(far == pytest.approx(0, abs=1e-5) for _, far in told)


KNOBS = {
    "schedule": "linear",
    "warmup_steps": 3,
    "min_lr": 1e-9,
    "betas": (0.8, 0.9),
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "micro_batch_tokens": 64,
    "gradient_checkpointing": True,
    "offload": True,
    "checkpoint_every": 5,
    "save_total_limit": 2,
    "lr": 3e-4,
    "prompts_per_step": 4,
}
SAMPLED = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "slots": 7, "max_tokens": 9}


@pytest.mark.parametrize("name", TEXT)
def test_every_flag_of_training_and_generation_reaches_the_operators(
    name: str, tmp_path: Path
) -> None:
    module = importlib.import_module(f"graphs.{name}")
    kind = module.Task if name == "sft" else TextTask
    given = {"held_out": "h", "policy": "p", "prompts": "q", "lora_rank": 4, **SAMPLED}
    more = {"teacher": "t"} if name == "distill" else {}
    graph = module.build(task=kind(**given, **KNOBS), **more)
    trainers = [each for each in graph.operators.values() if isinstance(each, Trainer)]
    assert len(trainers) == 1 + (name == "ppo")
    for trainer in trainers:
        for knob, value in KNOBS.items():
            assert getattr(trainer, knob) == value or (knob, trainer.name) == ("lr", "critic"), knob
        assert trainer.temperature == (1.0 if name == "sft" else 0.7)
        assert (trainer.model.lora is None) == (trainer.name == "critic")
    (generator,) = [each for each in graph.operators.values() if isinstance(each, Generator)]
    assert {knob: getattr(generator, knob) for knob in SAMPLED} == SAMPLED
    for own, knobs in (
        ({"engine": "vllm"}, {"engine": "vllm"}),
        ({"generator_weights": "int8"}, {"weights": "int8"}),
    ):
        other = module.build(
            task=kind(held_out="h", policy="p", prompts="q", **own), **more
        ).operators["generator"]
        assert {knob: getattr(other, knob) for knob in knobs} == knobs
    for reader in (each for each in graph.operators.values() if isinstance(each, ForwardOperator)):
        assert reader.micro_batch_tokens == 64 and getattr(reader, "temperature", 0.7) == 0.7


@pytest.mark.parametrize("name", ["aipo", "grpo", "rloo", "dapo"])
def test_entropy_and_distance_from_the_start_stand_in_the_loss(
    name: str, flags: Flags, tmp_path: Path
) -> None:
    more = (
        "--kl",
        "0.1",
        "--entropy",
        "0.01",
        "--lora-rank",
        "2",
        "--temperature",
        "0.8",
        "--inline",
        "--quiet",
    )
    main(build_of(name), args=flags(name, *more))
    _, lines = ran(tmp_path)
    assert all("kl_reference" in line and line["grad_norm"] > 0 for line in lines if "loss" in line)


def test_dapo_drops_groups_that_are_all_right_or_all_wrong_whatever_their_lengths() -> None:
    undecided = importlib.import_module("graphs.dapo").undecided
    assert set(undecided.reads()) == {"accuracy"}
    assert (
        undecided(np.array([0.0, 1.0])) and not undecided(np.ones(3)) and not undecided(np.zeros(3))
    )


def test_a_file_may_call_its_columns_otherwise(flags: Flags, tmp_path: Path) -> None:
    rows = [{"question": row["prompt"], "solution": row["answer"]} for row in words(8)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = [str(tmp_path / "other.jsonl")] * 2
    named = ["--question", "question", "--answer", "solution", "--reward", "exact"]
    files = ["--prompts", other[0], "--held-out", other[1]]
    main(build_of("sft"), args=flags("sft", *files, *named, "--inline", "--quiet"))
    folder, _ = ran(tmp_path)
    table = folder.rollouts_of().read(1)
    assert table.column("answer").to_pylist() == table.column("completion").to_pylist()


def test_prompts_are_trained_in_another_order_than_the_files(flags: Flags, tmp_path: Path) -> None:
    main(build_of("sft"), args=flags("sft", "--epochs", "1", "--steps", "6", "--inline", "--quiet"))
    folder, _ = ran(tmp_path)
    prompts = [
        prompt
        for step in range(1, 7)
        for prompt in folder.rollouts_of().read(step).column("prompt").to_pylist()
    ]
    stand = [row["prompt"] for row in words(24)]
    assert prompts != stand and sorted(prompts) == sorted(stand)


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("rloo", ["--reward", "exat"], "no reward is called 'exat'.*did you mean 'exact'"),
        ("rloo", ["--answer", "answr"], "has no column 'answr'.*did you mean 'answer'"),
        ("rloo", ["--question", "text"], "has no column 'text': it has"),
        ("rloo", ["--answer", "", "--reward", "exact"], "'reward'.*reads column 'answer'"),
        ("sft", ["--answer", ""], "'demonstrations' reads column 'answer'"),
        ("dapo", ["--overlong-share", "2"], "lower buffer_tokens, or raise max_tokens"),
        ("ppo", ["--max-staleness", "-1"], "max_staleness counts versions and cannot be -1"),
        ("ppo", ["--judge", "m"], "--reward .* would have no effect: --judge gives it"),
        (
            "grpo",
            ["--refresh-reference", "2"],
            "--refresh-reference 2 would have no effect without --kl",
        ),
        (
            "rloo",
            ["--held-out", "", "--eval-every", "7"],
            "--eval-every 7 would have no effect: nothing is evaluated",
        ),
        (
            "sft",
            ["--held-out", "", "--top-p", "0.9"],
            "would have no effect: nothing is evaluated without --held-out",
        ),
        ("distill", ["--held-out", ""], "--reward .* would have no effect: the teacher judges"),
        (
            "rloo",
            ["--save-total-limit", "2"],
            "--save-total-limit 2 would have no effect without --checkpoint-every",
        ),
        (
            "rloo",
            ["--min-lr", "1e-8"],
            "--min-lr 1e-08 would have no effect without --schedule linear or cosine",
        ),
        (
            "rloo",
            ["--form", "trl", "--question", "q"],
            "--question q would have no effect: rows of --form trl",
        ),
        ("rloo", ["--lora-alpha", "0"], "LoRA has alpha=0.0, which scales nothing"),
    ],
)
def test_wrong_flags_are_refused_in_words(
    name: str, more: list[str], message: str, flags: Flags, capfd: pytest.CaptureFixture[str]
) -> None:
    status, told = refused(name, flags(name, *more), capfd)
    assert status == 1
    assert re.search(message, told), told


def test_a_teacher_with_another_vocabulary_is_refused(
    flags: Flags, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    teacher = tiny_policy(tmp_path / "other")
    tokenizer_of(ALPHABET[::-1]).save_pretrained(teacher)
    status, told = refused(
        "distill", [*flags("distill", "--inline", "--quiet"), "--teacher", str(teacher)], capfd
    )
    assert status == 1
    assert (
        "'teacher', whose tokenizer is another" in told
        and "give a model with the policy's tokenizer" in told
    )


@pytest.mark.parametrize(
    ("loss", "credit", "normalize"),
    [
        (gspo, normalized_advantage, "rollout_means"),
        (cispo, normalized_advantage, "tokens"),
        (rloo, leave_one_out, "rollouts"),
    ],
)
def test_a_swap_of_loss_and_credit_makes_another_algorithm_and_leaves_the_first_alone(
    loss: Any, credit: Any, normalize: str, flags: Flags, tmp_path: Path
) -> None:
    ours = build_of("aipo")(
        task=TextTask(policy="policy", prompts=str(tmp_path / "train.jsonl")), max_staleness=0
    )
    old = ours.operators["trainer"]
    assert isinstance(old, Trainer) and flags
    other = ours.swap("trainer", replace(old, loss=loss, normalize=normalize)).swap(
        "advantage", credit
    )
    other.check()
    new = other.operators["trainer"]
    assert isinstance(new, Trainer)
    assert (new.loss, new.normalize, new.lr) == (loss, normalize, old.lr)
    assert other.operators["advantage"].identity() != ours.operators["advantage"].identity()
    assert ours.operators["trainer"] is old
