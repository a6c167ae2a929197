"""Runs of a model with adapters: they alone are trained, sent and kept, and generator and trainer
agree.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.graphs import tiny_graph
from safetensors.torch import load_file

from dataflow import Devices, Model, inline, run
from dataflow.folder.run_folder import RunFolder
from dataflow.model import LoRA
from dataflow.runner import Result
from transport.weights import WeightWriter

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(180)]

LORA = LoRA(4, alpha=8)
WIDTH, MLP, WORD = 32, 64, 4
BYTES = WORD * LORA.rank * (4 * (WIDTH + WIDTH) + 3 * (WIDTH + MLP))
"""Of a version: A and B of the only layer's seven matrices in float32."""


def adapted_graph(policy: Path, **knobs: Any) -> Any:
    return tiny_graph(policy, model_knobs={"lora": LORA}, **knobs)


@pytest.fixture(scope="module")
def sent() -> list[int]:
    return []


@pytest.fixture(scope="module")
def inlined(
    policy: Path, tmp_path_factory: pytest.TempPathFactory, sent: list[int]
) -> Iterator[Result]:
    made = WeightWriter.__init__

    def noted(self: Any, layout: Any, *rest: Any, **knobs: Any) -> None:
        sent.append(sum(spec.nbytes for spec in layout.tensors))
        made(self, layout, *rest, **knobs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightWriter, "__init__", noted)
        patch.setattr(sys.modules["dataflow.runner"], "this_machine", lambda: Devices(cpus=1))
        graph = adapted_graph(policy, max_staleness=0, prompts_per_step=8, lr=3e-2)
        yield run(graph, steps=12, on=inline(), runs=tmp_path_factory.mktemp("runs"), quiet=True)


def steps_of(result: Result) -> list[dict[str, Any]]:
    return [line for line in result.metrics if "loss" in line]


def test_a_version_has_the_bytes_of_the_adapters(inlined: Result, sent: list[int]) -> None:
    assert inlined.verdict.clean and sent == [BYTES]


def test_generator_and_trainer_agree_after_every_version(inlined: Result) -> None:
    assert max(line["mismatch"] for line in steps_of(inlined)) < 1e-5
    assert max(abs(line["ratio_max"] - 1) for line in steps_of(inlined)) < 1e-4


def test_adapters_learn(inlined: Result) -> None:
    rewards = [line["reward_mean"] for line in steps_of(inlined)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


def test_a_checkpoint_holds_the_adapters_alone_and_peft_loads_it(
    inlined: Result, policy: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder = RunFolder.open(inlined.folder).latest_checkpoint()
    assert folder is not None and not (folder / "model.safetensors").exists()
    adapters = load_file(folder / "adapter_model.safetensors")
    assert sum(tensor.nbytes for tensor in adapters.values()) == BYTES
    assert all(tensor.count_nonzero() for tensor in adapters.values())
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        trained = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits
        base = AutoModelForCausalLM.from_pretrained(policy)(input_ids=ids).logits
    assert not torch.allclose(trained, base, atol=1e-2)


def test_a_checkpoint_is_a_model_to_generate_with(inlined: Result, policy: Path) -> None:
    """Its log-probabilities of what the last version would say are those of base and adapters."""
    from transformers import AutoModelForCausalLM

    from operators.models.loading import load_model, load_tokenizer

    folder = RunFolder.open(inlined.folder).latest_checkpoint()
    assert folder is not None
    model = Model(str(folder))
    ids = torch.tensor([load_tokenizer(model).encode("a1=")])
    with torch.no_grad():
        merged = load_model(model)(input_ids=ids).logits
        torch.testing.assert_close(
            merged, AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits
        )


def test_processes_train_adapters_as_one_process_does(
    policy: Path, machine: None, tmp_path: Path
) -> None:
    losses = []
    for on, name in ((None, "processes"), (inline(), "inline")):
        result = run(
            adapted_graph(policy, max_staleness=0), steps=3, on=on, runs=tmp_path / name, quiet=True
        )
        assert (result.steps, result.verdict.clean) == (3, True), result.verdict.line
        losses.append([line["loss"] for line in steps_of(result)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_matrices_train_adapters_as_one_process_and_go_on_after_a_checkpoint(
    policy: Path, machine: None, tmp_path: Path, ranks: int
) -> None:
    """Its generator has every version; its checkpoint is one that peft loads, and that a resume
    goes on with.
    """

    def graph(tensor_parallel: int) -> Any:
        return adapted_graph(
            policy, max_staleness=0, lr=1e-3, eps=1e-3, tensor_parallel=tensor_parallel
        )

    alone = run(graph(1), steps=5, seed=1, on=inline(), runs=tmp_path / "alone", quiet=True)
    begun = run(graph(2), ranks={"trainer": ranks}, steps=3, seed=1, runs=tmp_path, quiet=True)
    checkpoint = RunFolder.open(begun.folder).latest_checkpoint()
    assert checkpoint is not None
    saved = load_file(checkpoint / "adapter_model.safetensors")
    assert sum(tensor.nbytes for tensor in saved.values()) == BYTES
    resumed = run(graph(2), ranks={"trainer": ranks}, steps=5, resume=begun.folder, quiet=True)
    assert resumed.verdict.clean, resumed.verdict.line
    found, wanted = steps_of(resumed), steps_of(alone)
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5]
    assert max(line["mismatch"] for line in found) < 1e-5
    for name in ("loss", "grad_norm", "reward_mean"):
        assert [line[name] for line in found] == pytest.approx(
            [line[name] for line in wanted], rel=1e-3, abs=1e-6
        )
