"""The declaration of a generator: light, and honest about its knobs."""

import re
import subprocess
import sys
from dataclasses import make_dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType

import pyarrow as pa
import pytest

from dataflow.model import Model
from dataflow.records import PROMPT_COLUMNS, ROLLOUT_COLUMNS, TEMPERATURE
from operators.generator import Generator

MODEL = Model("somewhere/policy")


def test_declaring_a_generator_imports_no_torch():
    code = (
        "import sys, operators.generator, operators.models.loading; sys.exit('torch' in"
        " sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_plain_generator_has_no_faults():
    assert Generator(MODEL).faults() == []
    assert (
        Generator(
            MODEL,
            temperature=0.0,
            top_k=3,
            top_p=0.5,
            stop=("END",),
            in_flight=4,
            context_tokens=64,
        ).faults()
        == []
    )


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("group_size", 0),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("segment_tokens", 0),
        ("slots", 0),
        ("slots", True),
        ("in_flight", 0),
        ("context_tokens", 1),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("stop", "END"),
        ("stop", ("",)),
        ("stop", (1.5,)),
        ("on_update", "forget"),
        ("min_p", 1.1),
        ("weights", "int4"),
        ("engine", "sglang"),
        ("tensor_parallel", 0),
        ("min_p", True),
        ("repetition_penalty", 0),
        ("cache_bytes", 0),
        ("model", Model("somewhere/critic", head="value")),
    ],
)
def test_a_knob_that_cannot_be_right_is_named_with_a_way_out(knob, value):
    knobs = {"model": MODEL, knob: value}
    (fault,) = Generator(**knobs).faults()
    assert knob in fault and ";" in fault and "'generator'" in fault


def test_it_adds_the_rollout_columns_and_shows_its_knobs():
    generator = Generator(MODEL, group_size=4, top_p=0.9, sampling_mask=False)
    made = {**PROMPT_COLUMNS, **ROLLOUT_COLUMNS, TEMPERATURE: pa.float64()}
    assert dict(generator.provides(PROMPT_COLUMNS)) == made
    assert generator.rollouts_per_prompt == 4
    assert generator.reads() == {"prompt": str}
    assert generator.knobs()["top_p"] == 0.9


VLLM = [("sampling_mask", True), ("weights", "int8"), ("arrives_in", "host"), ("compile", True)]


@pytest.mark.parametrize(("knob", "value"), VLLM)
def test_what_vllm_does_not_serve_is_named(knob, value):
    (fault,) = Generator(MODEL, engine="vllm", **{knob: value}).faults()
    assert f"does not serve {knob}" in fault and 'engine="native"' in fault


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"max_model_len": 64},
            "'max_model_len', which this project decides; found 64; give context",
        ),
        ({"async_scheduling": True}, "weights change between two steps"),
        ({"quantisation": "fp8"}, "'quantisation', which is none of its arguments.*quantization"),
    ],
)
def test_an_argument_of_vllm_that_is_decided_here_or_unknown_is_named(arguments, said, monkeypatch):
    args = ModuleType("vllm.engine.arg_utils")
    args.EngineArgs = make_dataclass("EngineArgs", ["quantization", "max_model_len"])
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", args)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: ModuleSpec(name, None, origin="/v")
    )
    (fault,) = Generator(MODEL, engine="vllm", vllm=arguments).faults()
    assert re.search(said, fault)
    assert not Generator(MODEL, engine="vllm", vllm={"quantization": "fp8"}).faults()


def test_arguments_of_vllm_are_for_vllm():
    (fault,) = Generator(MODEL, vllm={"quantization": "fp8"}).faults()
    assert "runs on engine='native'" in fault and 'engine="vllm"' in fault


def test_vllm_has_ranks_of_its_own():
    split = Generator(MODEL, engine="vllm", tensor_parallel=2).traits.split
    assert split.apart and split.least_ranks == 2 and not Generator(MODEL).traits.split.apart


@pytest.mark.parametrize(("knob", "value"), [("weights", "int8"), ("tensor_parallel", 2)])
def test_what_is_not_compiled_is_named(knob, value):
    (fault,) = Generator(MODEL, compile=True, **{knob: value}).faults()
    assert f"got {knob}={value!r}" in fault and "leave it out, or compile" in fault


def test_a_compiled_generator_keeps_its_device():
    assert Generator(MODEL).traits.sleeps and not Generator(MODEL, compile=True).traits.sleeps
