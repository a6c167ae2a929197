"""Runs whose generator computes in int8 or fp8: the trainer sends it that, and nothing else
changes.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
from rigs.graphs import tiny_graph

from dataflow import Devices, Model, inline, run
from dataflow.node import Learn
from dataflow.planning.wiring import quantized_format
from operators import Generator
from transport.weights import WeightWriter

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(180)]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Dtypes by name of what each writer sends."""
    found: list[dict[str, str]] = []
    made = WeightWriter.__init__

    def noted(self: Any, layout: Any, *rest: Any, **knobs: Any) -> None:
        found.append({spec.name: spec.dtype for spec in layout.tensors})
        made(self, layout, *rest, **knobs)

    monkeypatch.setattr(WeightWriter, "__init__", noted)
    monkeypatch.setattr(sys.modules["dataflow.runner"], "this_machine", lambda: Devices(cpus=1))
    return found


@pytest.mark.parametrize(
    "weights",
    ["int8", *(pytest.param(each, marks=pytest.mark.slow) for each in ("int8_dynamic", "fp8"))],
)
def test_a_run_is_the_same_bit_for_bit_whoever_quantises(
    policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sent: list[dict[str, str]],
    weights: str,
) -> None:
    def made(folder: str) -> list[dict[str, Any]]:
        graph = tiny_graph(policy, max_staleness=1, generator_knobs={"weights": weights})
        result = run(graph, steps=3, on=inline(), runs=tmp_path / folder, quiet=True)
        return [line for line in result.metrics if "loss" in line]

    quantized = made("trainer")
    monkeypatch.setattr(Generator, "quantized", None)
    full_ones = made("generator")
    by_trainer, by_generator = (
        [line["loss"] for line in lines] for lines in (quantized, full_ones)
    )
    (whole,) = {line["weights_moved_bytes"] for line in full_ones if line["weights_sent"]}
    assert {
        line["weights_full_bytes"] for line in (*quantized, *full_ones) if line["weights_sent"]
    } == {whole}
    (moved,) = {line["weights_moved_bytes"] for line in quantized if line["weights_sent"]}
    assert moved < whole, "what quantization spares is told beside the full size"
    assert len(by_trainer) == 3
    assert by_trainer == by_generator
    narrow, full = sent
    value = "float8_e4m3fn" if weights == "fp8" else "int8"
    scales = {name for name in narrow if name.endswith(":scale")}
    assert scales
    assert all(narrow[name.removesuffix(":scale")] == value for name in scales)
    assert set(full) == set(narrow) - scales
    assert set(full.values()) == {"float32"}


@pytest.mark.parametrize(
    ("wanted", "format_"),
    [
        (["int8", "int8_dynamic"], "int8"),
        (["fp8"], "fp8"),
        (["int8", "fp8"], None),
        (["int8", "model"], None),
    ],
)
def test_weights_travel_narrow_where_all_readers_want_the_same(
    policy: Path, wanted: list[str], format_: str | None
) -> None:
    g = tiny_graph(policy, generator_knobs={"weights": wanted[0]})
    trainer = g.operators["trainer"]
    assert isinstance(trainer, Learn)
    for n, weights in enumerate(wanted[1:]):
        other = Generator(Model(str(policy)), weights=weights, name=f"other{n}")
        g.feedback(trainer.weights, other, max_staleness=1)
    assert quantized_format(g, "trainer") == format_


@pytest.mark.slow
def test_a_generator_in_bfloat16_takes_the_versions_of_a_trainer_in_float32(
    policy: Path, tmp_path: Path, sent: list[dict[str, str]]
) -> None:
    graph = tiny_graph(policy, max_staleness=1, generator_knobs={"weights": "bfloat16"})
    result = run(graph, steps=3, on=inline(), runs=tmp_path, quiet=True)
    lines = [line for line in result.metrics if "loss" in line]
    mismatches = [line["mismatch"] for line in lines if line["mismatch"] is not None]
    assert len(lines) == 3 and mismatches and all(0 < mismatch < 0.05 for mismatch in mismatches)
    assert {dtype for layout in sent for dtype in layout.values()} == {"float32"}
