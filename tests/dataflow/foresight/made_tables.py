"""Tables in the format of the optional package, made up, and put on the path in its place."""

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

GEMM_S, ATTENTION_S, PROMPTS_S, EXPERTS_S, EXCHANGE_S = 10e-6, 20e-6, 300e-6, 40e-6, 5e-6
"""Of a kernel at any shape, in tables that are flat."""
WIDE = (1.0, 1e6)


def put(where: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty package at the head of the path: its folder."""
    folder = where / "aiconfigurator_core"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('it is read, not imported')\n")
    monkeypatch.syspath_prepend(str(where))
    importlib.invalidate_caches()
    return folder


def write(
    package: Path,
    name: str,
    rows: Sequence[Mapping[str, Any]],
    system: str = "h100_sxm",
    version: str = "0.24.0",
) -> None:
    """One table of vLLM; `latency` in milliseconds."""
    family = {"gemm_perf": "gemm", "moe_perf": "moe", "custom_allreduce_perf": "comm"}.get(
        name, "mla" if name.startswith("mla") else "attention"
    )
    folder = package / "systems" / "data" / system / family / "vllm" / version
    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(
        pa.Table.from_pylist([dict(row) for row in rows]), folder / f"{name}.parquet"
    )


def product(
    n: float, k: float, m: float, seconds: float, dtype: str = "bfloat16"
) -> dict[str, Any]:
    return {"gemm_dtype": dtype, "n": int(n), "k": int(k), "m": int(m), "latency": 1e3 * seconds}


def write_flat(package: Path, times: float = 1.0) -> None:
    """All tables of H100, in which no shape takes longer than another."""
    both = [(a, b) for a in WIDE for b in WIDE]
    write(package, "gemm_perf", [product(n, k, m, times * GEMM_S) for n, k in both for m in WIDE])
    for name, length, seconds in (
        ("generation_attention_perf", "step", ATTENTION_S),
        ("context_attention_perf", "isl", PROMPTS_S),
    ):
        write(
            package,
            name,
            [
                {
                    "num_key_value_heads": kv,
                    "num_heads": heads,
                    "batch_size": int(batch),
                    length: int(tokens),
                    "head_dim": 128,
                    "window_size": 0,
                    "kv_cache_dtype": "bfloat16",
                    "latency": 1e3 * times * seconds,
                }
                for kv in (1, 8)
                for heads in (1, 64)
                for batch, tokens in both
            ],
        )
    write(
        package,
        "moe_perf",
        [
            {
                "moe_dtype": "bfloat16",
                "hidden_size": 2048,
                "inter_size": 768,
                "topk": 8,
                "num_experts": 128,
                "moe_tp_size": ranks,
                "moe_ep_size": 1,
                "distribution": "power_law_1.01",
                "num_tokens": int(tokens),
                "latency": 1e3 * times * EXPERTS_S,
            }
            for ranks in (1, 2)
            for tokens in WIDE
        ],
    )
    write(
        package,
        "custom_allreduce_perf",
        [
            {
                "num_gpus": ranks,
                "message_size": int(size),
                "kernel_source": source,
                "latency": 1e3 * times * EXCHANGE_S,
            }
            for ranks in (2, 8)
            for size in (1.0, 1e9)
            for source in ("vLLM_custom_graph", "vLLM_custom_eager")
        ],
    )


def write_served(
    package: Path, rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> None:
    """Measured runs of a model `made/model`."""
    (package / "systems").mkdir(exist_ok=True)
    (package / "model_configs").mkdir(exist_ok=True)
    (package / "model_configs" / "made--model_config.json").write_text(json.dumps(config))
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    (package / "systems" / "silicon_sample.csv").write_text("\n".join(lines) + "\n")
