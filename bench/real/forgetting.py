"""What a model has lost of what it knew: perplexity of texts, and how far it has gone from where it
started.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.learning.algorithms import budget
from bench.real.evaluation import accuracies
from bench.real.parity import error, mean
from bench.real.runs import Line, chosen, made_once, run_to_end, setting_of
from bench.real.task import Task, folder_of, task_of
from bench.report import Figure, Report

CASE = "forgetting"
START = "start"
ENGLISH = Path(__file__).parent / "english.txt"
"""Written for this bench: a tale of 1,700 words, which no model has been trained on."""
WINDOW_TOKENS = 512
SOLUTIONS = 128
"""Of GSM8K's test split, the first."""
KL_QUESTIONS = 128
KL_SAMPLES = 2
SHOWN = ("accuracy", "greedy", "english_ppl", "gsm8k_ppl", "kl")


def forgetting(
    options: argparse.Namespace, flags: Sequence[str], about: Mapping[str, Figure]
) -> list[Line]:
    """The model at the start, and after training with each --kl."""
    names = chosen(options, (START, *(f"kl-{kl:g}" for kl in options.kl)))
    trained = [(name, seed) for seed in range(options.seeds) for name in names if name != START]
    runs = [(name, 0) for name in names if name == START] + trained
    lines = made_once(options, CASE, runs, flags=flags, about=about, describe=told)
    table = Report("real")
    for name in dict.fromkeys(line["system"] for line in lines):
        mine = [line for line in lines if line["system"] == name and "failed" not in line]
        row: dict[str, Any] = {"runs": len(mine)}
        for key in SHOWN:
            row |= {key: mean(mine, key), f"{key} error": error(mine, key)}
        table.add(case=f"{CASE}: {setting_of(options)}", system=name, **row)
    table.show(Console(width=max(150, Console().width)))
    if options.gsm8k is None:
        print("gsm8k_ppl, skipped: give --gsm8k FOLDER with its test.jsonl or Parquet files")
    return lines


def told(line: Line) -> str:
    """One run in a line."""
    return (
        f"accuracy {line['accuracy']:.3f}, perplexity {line['english_ppl']:.2f} of English"
        + (f", {line['gsm8k_ppl']:.3f} of solutions" if line.get("gsm8k_ppl") else "")
        + f", {line['kl']:.4f} nats a token from the start"
    )


def run_forgetting(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train unless this is the start, and measure what the weights know."""
    task = task_of(options)
    start = folder_of(task.policy)
    if name == START:
        return knows(task, start, start, options)
    rows = budget(task.train, options.steps * task.prompts_per_step, seed)
    prompts = task.prompts(rows, epochs=1)
    graph = task.graph(
        "forgetting",
        prompts,
        max_staleness=options.max_staleness,
        kl=float(name.removeprefix("kl-")),
    )
    with tempfile.TemporaryDirectory() as runs:
        result, last = run_to_end(graph, seed, runs)
        return knows(task, last, start, options) | {"seconds": result.seconds}


def knows(task: Task, folder: Path, start: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Accuracy, perplexities, and the distance from the start on answers of its own."""
    model, tokenizer = loaded(folder)
    torch.set_num_threads(options.threads)
    figures: dict[str, Any] = {
        "english_ppl": perplexity(model, windows(tokenizer, ENGLISH.read_text("utf-8")))
    }
    if options.gsm8k is not None:
        figures["gsm8k_ppl"] = perplexity(model, solutions(tokenizer, options.gsm8k))
    first, _ = loaded(start)
    figures["kl"], figures["kl_tokens"] = kl_of(model, first, answers(task, folder))
    del model, first
    return figures | accuracies(task, str(folder), samples=options.samples)


def loaded(folder: Path) -> tuple[Any, Any]:
    """Model in float32 and tokenizer."""
    from bench.end_to_end.plain_loop import load

    model, tokenizer = load(folder)
    return model.eval().requires_grad_(False), tokenizer


Scored = tuple[list[int], int]
"""(tokens, how many at the beginning are given and not scored)."""


def windows(tokenizer: Any, text: str) -> Iterator[Scored]:
    """A text in pieces; the first token of each is given."""
    ids = tokenizer.encode(" ".join(text.split()), add_special_tokens=False)
    for begin in range(0, len(ids) - 1, WINDOW_TOKENS - 1):
        yield ids[begin : begin + WINDOW_TOKENS], 1


def solutions(tokenizer: Any, folder: Path) -> Iterator[Scored]:
    """GSM8K's worked solutions, each given its question; what they note for a calculator is left
    out.
    """
    for row in rows_of_gsm8k(folder)[:SOLUTIONS]:
        question = tokenizer.encode(row["question"] + "\n", add_special_tokens=False)
        solution = tokenizer.encode(re.sub(r"<<.*?>>", "", row["answer"]), add_special_tokens=False)
        yield question + solution, len(question)


def rows_of_gsm8k(folder: Path) -> list[dict[str, str]]:
    """Questions and answers of the test split."""
    if files := sorted(folder.rglob("*test*.jsonl")):
        return [json.loads(line) for line in files[0].read_text(encoding="utf-8").splitlines()]
    if files := sorted(folder.rglob("*test*.parquet")):
        import pyarrow.parquet

        rows: list[dict[str, str]] = pyarrow.parquet.read_table(files[0]).to_pylist()
        return rows
    raise SystemExit(
        f"--gsm8k {folder} has no test split; found no *test*.jsonl and no *test*.parquet"
    )


@torch.inference_mode()
def perplexity(model: Any, texts: Iterator[Scored]) -> float:
    """exp of the mean negative log-probability of the scored tokens."""
    total, count = 0.0, 0
    for ids, prompt_tokens in texts:
        tokens = torch.tensor(ids)
        logprobs = model(input_ids=tokens[None, :-1], use_cache=False).logits[0].log_softmax(-1)
        scored = logprobs.gather(1, tokens[1:, None])[prompt_tokens - 1 :, 0].double()
        total, count = total - float(scored.sum()), count + len(scored)
    return math.exp(total / count)


def answers(task: Task, folder: Path) -> list[Scored]:
    """What the model in a folder answers to held-out questions, sampled."""
    from dataflow import Graph, collect

    held_out_task = replace(task, policy=str(folder), weights="model", dtype="float32")
    g = Graph("answers")
    prompts = task.prompts(
        task.held_out[:KL_QUESTIONS], name="held_out", epochs=1, group_size=KL_SAMPLES
    )
    table = collect(
        held_out_task.generator()(g.source(prompts)),
        rows=KL_SAMPLES * min(KL_QUESTIONS, len(task.held_out)),
    )
    tokens, masks = table.column("tokens").to_pylist(), table.column("mask").to_pylist()
    return [
        (ids, mask.index(True)) for ids, mask in zip(tokens, masks, strict=True) if True in mask
    ]


@torch.inference_mode()
def kl_of(model: Any, first: Any, texts: Sequence[Scored]) -> tuple[float, int]:
    """Mean of KL(model || first) over the scored tokens' places, nats, each over the whole
    vocabulary; their number.
    """
    total, count = 0.0, 0
    for ids, prompt_tokens in texts:
        tokens = torch.tensor(ids)[None, :-1]
        new, old = (
            part(input_ids=tokens, use_cache=False).logits[0, prompt_tokens - 1 :].log_softmax(-1)
            for part in (model, first)
        )
        total, count = total + float((new.exp() * (new - old)).double().sum()), count + len(new)
    return total / count, count
