"""vLLM's process with an interpreter that has no vLLM."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from operators.engine.sampler import Sampling
from operators.engine.vllm.engine import VllmEngine
from operators.models.folders import ModelError


def test_an_interpreter_without_vllm_says_so_with_the_lines_that_install_it(folder):
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is not None:
        pytest.skip("this interpreter has vLLM")
    with pytest.raises(
        ModelError, match=r"(?s)ModuleNotFoundError: No module named 'vllm.*pip install vllm; "
    ):
        VllmEngine(
            folder,
            python=sys.executable,
            slots=1,
            context_tokens=8,
            sampling=Sampling(),
            end_tokens=[],
        )
