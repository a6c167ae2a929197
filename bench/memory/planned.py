"""What a plan counts of a trainer's memory, beside what its own code takes on fake tensors.

    python -m bench.memory.planned --json FILE
    python -m bench.memory.planned --models qwen2.5-7b --ranks 4 8

One rank's bytes of a GPU, GiB: tracked (`bench.memory.tracked`), two steps of two micro-batches of
4 rollouts of 2,048 tokens each (of one where `micro_batches` says so), in bfloat16 with float32
weights, gradients and moments, of which load is made before the first step, micro in a micro-batch
and update by the optimiser; planned, what `--explain` counts for the same; over, what the plan
counts more, a share of what was tracked. seconds: of the tracking, on this machine. No GPU is
needed. A compiled layer is not tracked: what Inductor keeps shows on a GPU alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from bench.report import Report
from dataflow import Graph, Model
from dataflow.planning.memory_need import need_of
from dataflow.planning.model_size import measured
from dataflow.planning.placement import Need
from operators import Generator, Prompts, Trainer

GIB = 1 << 30
ROLLOUTS, TOKENS = 4, 2048
"""Of a micro-batch, and of each."""


def _llama(layers: int, width: int, inner: int, heads: int) -> dict[str, Any]:
    """config.json of a Llama-3.1."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
    }


CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-1.7b": {
        "model_type": "qwen3",
        "num_hidden_layers": 28,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "head_dim": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "use_sliding_window": False,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
    },
    "llama-70b": _llama(80, 8192, 28672, 64),
    "llama-405b": _llama(126, 16384, 53248, 128),
}
"""Of models, by their public config.json."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trainer."""

    model: str
    ranks: int
    checkpointed: bool | Literal["products", "offload"] = False
    micro_batches: int = 2
    knobs: tuple[tuple[str, Any], ...] = ()


CASES = [
    Case(model=model, ranks=ranks, checkpointed=checkpointed, micro_batches=micro_batches)
    for model, ranks, micro_batches in (
        ("qwen3-1.7b", 1, 1),
        ("qwen3-1.7b", 1, 2),
        ("qwen2.5-7b", 4, 2),
        ("qwen2.5-7b", 8, 2),
        ("llama-70b", 32, 2),
        ("llama-70b", 64, 2),
        ("llama-405b", 512, 2),
    )
    for checkpointed in (False, True)
]


def write(config: Mapping[str, Any], folder: Path) -> Path:
    """The folder of a model that has a config alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def declared(case: Case, folder: Path) -> tuple[Graph, Trainer]:
    """A graph with the case's trainer, whose steps are of many micro-batches or of one."""
    graph, model = Graph("memory"), Model(str(folder), dtype="bfloat16")
    generator = Generator(model, group_size=ROLLOUTS, max_tokens=TOKENS)
    trainer = Trainer(
        model,
        prompts_per_step=1 if case.micro_batches == 1 else 64,
        micro_batch_tokens=ROLLOUTS * TOKENS,
        gradient_checkpointing=case.checkpointed,
        compile=False,
        skip_zero_advantage=False,
        keep_new_logprobs=False,
        **dict(case.knobs),
    )
    rows = [{"prompt": "a", "advantage": 1.0}]
    trainer(generator(graph.source(Prompts(rows, columns=("advantage",)))))
    return graph, trainer


def planned(case: Case, folder: Path) -> Need:
    """What a plan counts for one rank."""
    graph, trainer = declared(case, folder)
    need = need_of(graph, trainer, measured(str(folder)), case.ranks, on_gpu=True)
    assert need is not None, "the config tells the size"
    return need


def tracked_bytes(case: Case, folder: Path) -> Any:
    """What rank 0 holds at the most, and of what; see `bench.memory.tracked`."""
    from bench.gpu.trainer import Load
    from bench.memory.tracked import tracked

    _, trainer = declared(case, folder)
    load = Load(rollouts=ROLLOUTS * case.micro_batches, tokens=TOKENS)
    return tracked(trainer, case.ranks, load)


def main(arguments: Sequence[str] | None = None) -> None:
    """Track each case and print it beside its plan."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.memory.planned",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    parser.add_argument("--models", nargs="+", choices=[*CONFIGS], default=[*CONFIGS])
    parser.add_argument("--ranks", nargs="+", type=int, help="of the trainer; all when left out")
    options = parser.parse_args(arguments)
    report = Report("memory of trainers", options.json)
    with tempfile.TemporaryDirectory() as temporary:
        for case in CASES:
            if case.model not in options.models or case.ranks not in (
                options.ranks or [case.ranks]
            ):
                continue
            folder = write(CONFIGS[case.model], Path(temporary) / case.model)
            began = time.monotonic()
            held = tracked_bytes(case, folder)
            need = planned(case, folder)
            report.add(
                case="of one rank",
                system=f"{case.model} on {case.ranks}",
                checkpointing="yes" if case.checkpointed else "no",
                micro_batches=case.micro_batches,
                **{phase: round(nbytes / GIB, 2) for phase, nbytes in held.parts.items()},
                tracked=round(held.most / GIB, 2),
                planned=round(need.total / GIB, 2),
                over=round(need.total / held.most - 1, 3),
                seconds=round(time.monotonic() - began, 1),
            )
    report.show(Console(width=max(120, Console().width)))


if __name__ == "__main__":
    main()
