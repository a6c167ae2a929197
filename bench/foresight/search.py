"""How long a search takes: Llama-405B on 1,024 H200, and a thousand placements of Llama-8B.

python -m bench.foresight --search --json OUT         # nothing is run but the search
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench.report import Report
from dataflow import Graph, Model
from dataflow.foresight.choice.search import Objective, choose
from dataflow.foresight.command import read_devices
from dataflow.foresight.foresee import foresee

STEPS = 200


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama, and how its parts are cut by hand."""

    name: str
    layers: int
    width: int
    inner: int
    heads: int
    generator_ranks: int = 8
    trainer_ranks: int = 8
    fp8: bool = False

    @property
    def config(self) -> Mapping[str, object]:
        """Of its folder."""
        return {
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
        }

    def folder(self, within: Path) -> Path:
        """Of its config."""
        return within / self.name.replace(" ", "-")


LARGE = Size(name="405 B", layers=126, width=16384, inner=53248, heads=128, fp8=True)
SMALL = Size(
    name="8 B", layers=32, width=4096, inner=14336, heads=32, generator_ranks=1, trainer_ranks=1
)


def search(path: Path | None) -> int:
    """Foresee one placement, and search among many."""
    report, console, devices = (
        Report("foresight", path),
        Console(width=170),
        read_devices("1024xH200"),
    )
    with tempfile.TemporaryDirectory(prefix="search-") as folder:
        graph = build(LARGE, Path(folder))
        began, worked = time.perf_counter(), time.process_time()
        single = foresee(graph, devices, gpus={"generator": 512, "trainer": 512}, steps=STEPS)
        report.add(
            case="1,024 H200",
            system="405 B, 512 generate, 512 train",
            placements=1,
            step_s=single.step_s,
            seconds=time.perf_counter() - began,
            cpu_s=time.process_time() - worked,
        )
        for name, built, objective in (
            ("405 B, --gpus auto", graph, Objective()),
            ("405 B, --gpus auto:cost", graph, Objective(cost=True)),
            ("8 B, --gpus auto:cost", build(SMALL, Path(folder)), Objective(cost=True)),
        ):
            began, worked = time.perf_counter(), time.process_time()
            choice = choose(built, devices, steps=STEPS, objective=objective)
            report.add(
                case="1,024 H200",
                system=name,
                placements=choice.tried,
                refused=sum(choice.refused.values()),
                simulated=choice.simulated,
                step_s=choice.ways[0].foreseen.step_s,
                seconds=time.perf_counter() - began,
                cpu_s=time.process_time() - worked,
                asked=choice.ways[0].flags,
            )
        report.add(
            case="1,024 H200",
            system="405 B, python -m graphs.aipo --gpus auto",
            **command(Path(folder)),
        )
    report.show(console)
    return 0


def command(folder: Path) -> dict[str, float]:
    """Seconds of the command as a user types it, from the start of its process; folder: `build` was
    called with it.
    """
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "2+2=", "answer": "4"}) + "\n")
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "graphs.aipo",
            "--policy",
            LARGE.folder(folder),
            "--prompts",
            prompts,
            "--reward",
            "exact",
            "--dtype",
            "bfloat16",
            "--max-tokens",
            "2048",
            "--prompts-per-step",
            "128",
            "--foresee",
            "1024xH200",
            "--gpus",
            "auto",
            "--steps",
            str(STEPS),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": time.perf_counter() - began,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def build(size: Size, folder: Path) -> Graph:
    """Policy, exact answers, trainer; of the model there is a config.json alone."""
    from operators import Generator, Prompts, Trainer
    from operators.credit import advantage
    from operators.rewards import find

    source = size.folder(folder)
    source.mkdir(exist_ok=True)
    (source / "config.json").write_text(json.dumps(size.config))
    graph, model = Graph("search"), Model(str(source), dtype="bfloat16")
    generator = Generator(
        model,
        group_size=8,
        max_tokens=2048,
        tensor_parallel=size.generator_ranks,
        weights="fp8" if size.fp8 else "model",
    )
    trainer = Trainer(
        model,
        prompts_per_step=128,
        lr=1e-6,
        gradient_checkpointing=True,
        tensor_parallel=size.trainer_ranks,
    )
    prompts = Prompts([{"prompt": "2+2=", "answer": "4"}], columns=("answer",))
    trainer(advantage(find("exact")(generator(graph.source(prompts)))))
    graph.feedback(trainer.weights, generator, max_staleness=2)
    return graph
