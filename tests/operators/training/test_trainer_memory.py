"""Recomputed activations, compiled layers and parked tensors: the same step, bit for bit or nearly,
in less memory.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_rig import gradient, group, rows_of, tiny_learner, tiny_llama, tiny_trainer

from dataflow.model import LoRA, Model
from operators.losses import aipo
from operators.models.folders import ModelError
from operators.trainer import Trainer
from operators.training.learner import memory
from operators.training.learner.build import adamw, fresh_state, make_learner, state_tensors
from operators.training.learner.cpu import multiplies_bfloat16
from operators.training.learner.memory import (
    OffloadedLearner,
    compile_layers,
    prepare,
    recompute_activations,
)
from operators.training.learner.rounded import PART, rounded

ROWS = (group(0, size=4, completion=20), group(1), group(2, size=5, completion=9))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def saved_bytes() -> Iterator[list[int]]:
    """Bytes of each tensor that autograd keeps for a backward pass."""
    found: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


def learner_with(packed: bool = True, module: Any = None, **switches: bool | str) -> Any:
    learner = tiny_learner(tiny_trainer(), module, packed=packed)
    knobs: dict[str, Any] = {"gradient_checkpointing": False, "compile": False} | switches
    prepare(learner.forward.module, **knobs)
    return learner


# Recomputed activations


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("how", [True, "products", "offload"])
def test_recomputed_activations_give_the_same_loss_and_gradient(
    packed: bool, how: bool | str
) -> None:
    plain = gradient(learner_with(packed), rows_of(*ROWS))
    again = gradient(learner_with(packed, gradient_checkpointing=how), rows_of(*ROWS))
    assert plain[0] == again[0] and plain[1].norm() > 0
    torch.testing.assert_close(again[1], plain[1], rtol=1e-6, atol=1e-9)


def test_recomputed_activations_are_not_kept(saved_bytes: list[int]) -> None:
    gradient(learner_with(), rows_of(*ROWS))
    everything = sum(saved_bytes)
    saved_bytes.clear()
    gradient(learner_with(gradient_checkpointing=True), rows_of(*ROWS))
    assert 0 < sum(saved_bytes) < everything / 3


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_products_that_are_kept_are_not_computed_again() -> None:
    counts = {}
    for how in (False, "products", True):
        with Products() as products:
            gradient(learner_with(gradient_checkpointing=how), rows_of(*ROWS))
        counts[how] = products.count
    assert 0 < counts[False] == counts["products"] < counts[True]


def test_what_goes_into_layers_waits_in_main_memory(
    monkeypatch: pytest.MonkeyPatch, saved_bytes: list[int]
) -> None:
    gradient(learner_with(gradient_checkpointing=True), rows_of(*ROWS))
    kept, away = sum(saved_bytes), list[int]()
    copy = memory.host_copy
    monkeypatch.setattr(memory, "host_copy", lambda one: (away.append(one.nbytes), copy(one))[1])
    saved_bytes.clear()
    learner = learner_with(gradient_checkpointing="offload")
    gradient(learner, rows_of(*ROWS))
    assert away and sum(saved_bytes) + sum(away) == kept
    width = learner.forward.module.config.hidden_size
    assert all(nbytes % (4 * width) == 0 for nbytes in away)


def test_adapters_get_the_same_gradient_from_recomputed_activations(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    found = []
    for again in (False, True):
        learner = make_adapted(tmp_path)
        if again:
            recompute_activations(learner.forward.module)
        found.append(gradient(learner, rows_of(*ROWS)))
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-6, atol=1e-9)


def make_adapted(folder: Path) -> Any:
    from operators.models.loading import load_adapted
    from operators.training.learner.build import forward_of, learner_of

    trainer = Trainer(Model(str(folder), lora=LoRA(4)), lr=1e-2)
    return learner_of(trainer, forward_of(trainer, load_adapted(trainer.model)), node="trainer")


def test_a_model_without_layers_cannot_be_switched() -> None:
    with pytest.raises(
        ModelError, match=r"Linear has no layers .* leave gradient_checkpointing and compile out"
    ):
        prepare(torch.nn.Linear(2, 2), gradient_checkpointing=True, compile=False)


# Compiled layers


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
def test_compiled_layers_give_the_same_loss_and_gradient_recomputed_or_not() -> None:
    learners = [
        learner_with(compile=True),
        learner_with(compile=True, gradient_checkpointing=True),
        learner_with(),
    ]
    for few in (ROWS[:1], ROWS):
        first, second, plain = (gradient(learner, rows_of(*few)) for learner in learners)
        for found in (first, second):
            assert found[0] == pytest.approx(plain[0], rel=1e-5)
            torch.testing.assert_close(found[1], plain[1], rtol=1e-4, atol=1e-6)


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: Any, **knobs: Any) -> Any:
        def call(*given: Any) -> Any:
            raise RuntimeError("No working C++ compiler found\nin a long text")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(
        ModelError,
        match=(
            r"none works here; found RuntimeError: No working C\+\+ compiler found; install one"
            r" \(g\+\+"
        ),
    ):
        compile_layers(tiny_llama())


# Parked tensors


def steps(learner: Any, home: OffloadedLearner | None, count: int = 3) -> list[float]:
    """So many updates, parked in between; the losses."""
    losses = []
    for version in range(count):
        if home is not None:
            home.bring(moments=False)
        for part in learner.begin(rows_of(*ROWS), version):
            learner.micro(part)
        if home is not None:
            home.bring(moments=True)
        losses.append(learner.end(1e-2).loss)
        if home is not None:
            home.rest(weights=version > 0)
    return losses


def held(learner: Any) -> tuple[int, int, int]:
    """Bytes of weights, moments and gradients that are on the device."""
    weights = sum(
        {
            w.data_ptr(): w.untyped_storage().nbytes() for w in learner.forward.module.parameters()
        }.values()
    )
    moments = [m for state in learner.optimizer.state.values() for m in state.values() if m.ndim]
    grads = [w.grad for w in learner.parameters.values() if w.grad is not None]
    return weights, sum(m.untyped_storage().nbytes() for m in moments), sum(g.nbytes for g in grads)


def test_a_learner_that_is_parked_between_steps_makes_the_same_weights_bit_for_bit(
    tmp_path: Path,
) -> None:
    plain, other = tiny_learner(tiny_trainer()), tiny_learner(tiny_trainer())
    home = OffloadedLearner(other, tmp_path)
    assert steps(other, home) == steps(plain, None)
    home.bring(moments=False)
    assert all(
        torch.equal(other.parameters[name], weight) for name, weight in plain.parameters.items()
    )


def test_a_parked_learner_holds_nothing_and_the_moments_come_for_the_update_alone(
    tmp_path: Path,
) -> None:
    learner = tiny_learner(tiny_trainer())
    home = OffloadedLearner(learner, tmp_path)
    steps(learner, None, 1)
    weights, moments, grads = held(learner)
    assert moments == 2 * weights and grads == weights
    home.rest(weights=False)
    assert held(learner) == (weights, 0, 0)
    home.rest(weights=True)
    assert held(learner) == (0, 0, 0) and home.nbytes == 0
    home.bring(moments=False)
    assert held(learner) == (weights, 0, 0)
    home.bring(moments=True)
    assert held(learner) == (weights, moments, 0)


def test_what_shares_memory_with_parked_weights_has_their_values_again(tmp_path: Path) -> None:
    learner = tiny_learner(tiny_trainer())
    told = {name: weight.detach() for name, weight in learner.parameters.items()}
    before = {name: weight.clone() for name, weight in told.items()}
    home = OffloadedLearner(learner, tmp_path)
    home.rest(weights=True)
    home.rest(weights=True)
    home.bring(moments=False)
    assert all(torch.equal(told[name], before[name]) for name in told)
    assert all(
        told[name].data_ptr() == weight.data_ptr() for name, weight in learner.parameters.items()
    )


def test_without_a_folder_what_lies_in_main_memory_is_left_there() -> None:
    learner = tiny_learner(tiny_trainer())
    home = OffloadedLearner(learner)
    steps(learner, home, 2)
    assert home.nbytes == 0 and held(learner)[0] > 0


@pytest.mark.gpu
def test_parking_on_a_gpu_gives_its_memory_back_and_the_same_weights() -> None:
    plain, other = (tiny_learner(tiny_trainer(), tiny_llama().cuda()) for _ in range(2))
    home = OffloadedLearner(other)
    losses = steps(other, home, 2)
    before = torch.cuda.memory_allocated()
    home.bring(moments=True)
    assert torch.cuda.memory_allocated() - before >= home.nbytes > 0
    assert losses == pytest.approx(steps(plain, None, 2))
    for name, weight in plain.parameters.items():
        torch.testing.assert_close(other.parameters[name], weight)


# Full precision behind bfloat16


def test_weights_and_moments_are_float32_where_the_model_computes_in_bfloat16(
    tmp_path: Path,
) -> None:
    tiny_llama().save_pretrained(tmp_path)
    trainer = Trainer(
        Model(str(tmp_path), dtype="bfloat16"), loss=functools.partial(aipo, rho=4.0), lr=1e-2
    )
    learner = make_learner(trainer, trainer.model, node="trainer", device="cpu")
    seen: list[torch.dtype] = []
    layer = learner.forward.module.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    steps(learner, None, 2)
    assert set(seen) == {torch.float32 if multiplies_bfloat16() else torch.bfloat16}
    assert (learner.direct is not None and learner.direct.is_rounded) == multiplies_bfloat16()
    kept = [
        *learner.forward.module.parameters(),
        *state_tensors(learner.optimizer, learner.parameters).values(),
    ]
    assert {tensor.dtype for tensor in kept} == {torch.float32}


# Moments in bfloat16: near those that are kept whole, and the same each time

STEPS, NUMBERS = 300, 4096
KNOBS: Any = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def trained(moments: torch.dtype | None) -> torch.Tensor:
    """How far weights move by noisy gradients of a bowl; None: by AdamW in float64."""
    random = torch.Generator().manual_seed(0)
    start = torch.randn(NUMBERS, 2, generator=random, dtype=torch.float64)
    target = torch.randn(NUMBERS, 2, generator=random, dtype=torch.float64)
    weight = torch.nn.Parameter(start.clone() if moments is None else start.float())
    optimizer: torch.optim.Optimizer
    if moments is None:
        optimizer = torch.optim.AdamW([weight], **KNOBS)
    else:
        optimizer = adamw({"w": weight}, moments=moments, **KNOBS)
    for _ in range(STEPS):
        noise = torch.randn(NUMBERS, 2, generator=random, dtype=torch.float64)
        weight.grad = (weight.detach().double() - target + noise).to(weight.dtype)
        optimizer.step()
    return weight.detach().double() - start


def test_weights_move_as_with_whole_moments() -> None:
    """Against float64, of 300 steps of noisy gradients: within 0.75% of the way, and none of it to
    one side.
    """
    exact = trained(None)
    off = trained(torch.bfloat16) - exact
    assert trained(torch.float32).sub(exact).norm() / exact.norm() < 1e-4
    assert off.norm() / exact.norm() < 0.0075
    assert abs((off * exact.sign()).mean()) / exact.abs().mean() < 0.001


def test_values_are_rounded_to_their_neighbours_and_right_in_the_mean() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    turns = [rounded(values, torch.tensor(float(turn))) for turn in range(2000)]
    assert all(torch.equal(turn, turn.bfloat16().float()) for turn in turns[:3])
    gap = values.abs() / 128
    stacked = torch.stack(turns)
    assert ((stacked - values).abs() <= gap).all()
    assert ((stacked.mean(0) - values).abs() <= 0.1 * gap).all()


def test_a_second_moment_falls_when_gradients_vanish() -> None:
    weight = torch.nn.Parameter(torch.zeros(1000, 1))
    optimizer = adamw({"w": weight}, moments=torch.bfloat16, **KNOBS)
    for step in range(1001):
        weight.grad = torch.full_like(weight, float(step == 0))
        optimizer.step()
    kept = optimizer.state[weight]["exp_avg_sq"]
    assert kept.dtype == torch.bfloat16
    assert kept.double().mean().item() == pytest.approx(1e-3 * 0.999**1000, rel=0.02)


def test_parts_of_a_large_weight_are_rounded_as_one() -> None:
    whole = torch.rand(PART + 8)
    turn = torch.tensor(3.0)
    parts = torch.cat([rounded(whole[:PART], turn), rounded(whole[PART:], turn, PART)])
    assert torch.equal(rounded(whole, turn), parts)


def test_a_step_that_goes_on_from_a_saved_state_is_the_same_bit_for_bit() -> None:
    first = tiny_learner(tiny_trainer(moments="bfloat16"))
    weights = first.parameters

    def step(learner: Any, version: int) -> None:
        for part in learner.begin(rows_of(*ROWS), version):
            learner.micro(part)
        learner.end(1e-2)

    for version in range(2):
        step(first, version)
    second = tiny_learner(tiny_trainer(moments="bfloat16"), tiny_llama())
    second.forward.module.load_state_dict(first.forward.module.state_dict())
    into = fresh_state(second.optimizer, second.parameters)
    saved = state_tensors(first.optimizer, weights)
    assert into.keys() == saved.keys()
    for name, tensor in into.items():
        assert tensor.dtype == saved[name].dtype
        tensor.copy_(saved[name])
    for learner in (first, second):
        step(learner, 2)
    for name, weight in weights.items():
        assert torch.equal(weight, second.parameters[name])
