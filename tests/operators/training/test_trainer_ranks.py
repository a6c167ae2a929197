"""A trainer of several ranks makes the steps that one rank makes, and names the rank that broke
them.
"""

import copy
import dataclasses
import functools
import os
import signal

import numpy as np
import pytest
import torch
from ranks_rig import in_a_fork, led, sent, train, weights
from torch.distributed.fsdp import FSDPModule
from trainer_rig import VOCABULARY, group, rows_of, tiny_learner, tiny_llama, tiny_trainer
from transformers import (
    AutoModelForCausalLM,
    LlamaForTokenClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dataflow.errors import DeadlineError, RunError, WorkerDied
from dataflow.model import Model
from operators.losses import aipo, value_loss
from operators.models.folders import ModelError
from operators.trainer import Trainer
from operators.training.checkpoints import checkpoint
from operators.training.learner import build, policy
from operators.training.learner.build import forward_of, learner_of
from operators.training.learner.cpu import multiplies_bfloat16
from operators.training.steps import NewLogprobs

RTOL = 1e-5


EPS = 1e-3


"""Of AdamW: with a small one, gradients that are rounding alone would move weights as far as all
others."""


SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def sequence_level(new_logprobs, logprobs, advantage, group_index, rollout_index):
    """Of whole groups and rollouts: the ratio of each rollout's mean, times the group's own
    size.
    """
    rollouts = int(rollout_index.max()) + 1
    count = torch.zeros(rollouts).index_add(0, rollout_index, torch.ones_like(new_logprobs))
    mean = torch.zeros(rollouts).index_add(0, rollout_index, new_logprobs - logprobs) / count
    sizes = torch.bincount(group_index).to(new_logprobs.dtype)
    return -mean.exp()[rollout_index] * advantage * sizes[group_index] / 10


def steps(count=3, groups=4):
    """Rollouts of very different lengths."""
    return [
        rows_of(
            *[
                group(groups * step + number, size=4, completion=3 + 8 * (number % 3))
                for number in range(groups)
            ]
        )
        for step in range(count)
    ]


def same_logprobs(one, other):
    """Of the last step, of each rollout that was computed."""
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert one.rollouts and one.rollouts.keys() == other.rollouts.keys()
        for number, values in one.rollouts.items():
            np.testing.assert_allclose(other.rollouts[number], values, rtol=1e-4, atol=1e-5)


def head_ranks(learner, rank, ranks):
    """How many share out the rows of the head."""
    alike = learner.forward._forward.alike
    return 1 if alike is None else alike.size()


def compare(trainer, ranks, given=None, make=None, **heads):
    """Losses, norms, measures and weights of so many ranks are those of one."""
    given = given or steps()
    one = make() if make else tiny_learner(trainer)
    expected = train(one, given)
    with led(trainer, ranks, make, **heads) as learner:
        if trainer.model.head == "lm":
            assert learner.everywhere(head_ranks) == [trainer.tensor_parallel] * ranks
        found = train(learner, given)
        held = weights(learner)
        computed = NewLogprobs.of(learner)
        got, nbytes = sent(learner, 2)
    assert (NewLogprobs.of(one) is not None) == (
        trainer.keep_new_logprobs and trainer.model.head == "lm"
    )
    same_logprobs(NewLogprobs.of(one), computed)
    for name, whole in held[0].items():
        assert all(
            torch.equal(got[rank][name], rows) for rank, rows in enumerate(whole.chunk(2))
        ), name
    assert max(nbytes) - min(nbytes) < 0.1 * sum(nbytes), (
        f"ranks share the work of sending: {nbytes}"
    )
    for wanted, outcome in zip(expected, found, strict=True):
        assert outcome.culprit is None
        np.testing.assert_allclose(outcome.loss, wanted.loss, rtol=RTOL, atol=1e-7)
        np.testing.assert_allclose(outcome.grad_norm, wanted.grad_norm, rtol=RTOL)
        assert outcome.measures.keys() == wanted.measures.keys()
        for name, value in wanted.measures.items():
            if value is None:
                assert outcome.measures[name] is None
                continue
            np.testing.assert_allclose(
                outcome.measures[name], value, rtol=1e-4, atol=1e-6, err_msg=name
            )
    for of_rank in held:
        for name, weight in one.parameters.items():
            torch.testing.assert_close(
                of_rank[name], weight.detach(), rtol=RTOL, atol=2e-6, msg=name
            )
            assert torch.equal(of_rank[name], held[0][name])


@pytest.mark.parametrize(
    ("ranks", "knobs"),
    [
        (2, {"micro_batch_tokens": 40}),
        pytest.param(4, {"micro_batch_tokens": 40, "max_grad_norm": 0.1}, marks=SLOW),
        pytest.param(
            4, {"micro_batch_tokens": 40, "max_grad_norm": 0.1, "dp_replicate": 2}, marks=SLOW
        ),
        pytest.param(2, {"dp_replicate": 2}, marks=SLOW),
        (2, {"micro_batch_tokens": 40, "gradient_checkpointing": "offload"}),
        (
            2,
            {
                "micro_batch_tokens": 40,
                "loss": sequence_level,
                "normalize": "rollouts",
                "whiten": True,
            },
        ),
        pytest.param(
            3,
            {"loss": functools.partial(aipo, rho=2.0), "normalize": "rollout_means"},
            marks=pytest.mark.slow,
        ),
    ],
)
@in_a_fork
def test_ranks_that_shard_the_data_make_the_steps_of_one(ranks, knobs):
    compare(tiny_trainer(weight_decay=0.1, eps=EPS, **knobs), ranks)


@pytest.mark.parametrize(
    ("ranks", "knobs"),
    [
        (2, {"gradient_checkpointing": "products"}),
        pytest.param(4, {}, marks=SLOW),
        pytest.param(4, {"dp_replicate": 2}, marks=SLOW),
    ],
    ids=str,
)
@in_a_fork
def test_ranks_that_share_out_matrices_make_the_steps_of_one(ranks, knobs, monkeypatch):
    """They share out the rows of the head too, as they do where all logits would be too many."""
    monkeypatch.setattr(policy, "MOST_LOGITS", 0)
    compare(
        tiny_trainer(micro_batch_tokens=40, tensor_parallel=2, max_grad_norm=0.1, eps=EPS, **knobs),
        ranks,
    )


@in_a_fork
def test_ranks_round_their_moments_alike_each_time():
    """Each rounds its own slice, so that their weights are near those of one rank."""
    trainer = tiny_trainer(eps=EPS, moments="bfloat16")
    one = tiny_learner(trainer)
    expected = train(one, steps())
    runs = []
    for _ in range(2):
        with led(trainer, 2) as learner:
            found = train(learner, steps())
            runs.append(weights(learner)[0])
    for wanted, outcome in zip(expected, found, strict=True):
        np.testing.assert_allclose(outcome.loss, wanted.loss, rtol=1e-2, atol=1e-4)
    for name, weight in one.parameters.items():
        assert torch.equal(runs[0][name], runs[1][name])
        torch.testing.assert_close(runs[0][name], weight.detach(), rtol=0, atol=3e-3)


def of_heads(module, key_value_heads):
    """The same kind of model with another number of key/value heads, and biases in its
    attention.
    """
    config = copy.deepcopy(module.config)
    config.num_key_value_heads, config.attention_bias = key_value_heads, True
    torch.manual_seed(0)
    made = type(module)(config).eval()
    for name, weight in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.2)
    return made


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "key_value_heads", "knobs"),
    [
        (4, 4, 2, {"micro_batch_tokens": 40}),
        (4, 2, 1, {"max_grad_norm": 0.1, "dp_replicate": 2}),
        pytest.param(4, 2, 1, {"gradient_checkpointing": True}, marks=SLOW),
        pytest.param(8, 4, 2, {"max_grad_norm": 0.1}, marks=SLOW),
    ],
)
@in_a_fork
@pytest.mark.slow
def test_ranks_that_hold_the_same_key_value_head_make_the_steps_of_one(
    ranks, tensor_parallel, key_value_heads, knobs
):
    trainer = tiny_trainer(tensor_parallel=tensor_parallel, eps=EPS, **knobs)

    def make():
        return tiny_learner(
            trainer, of_heads(qwen3() if tensor_parallel == 4 else tiny_llama(), key_value_heads)
        )

    compare(trainer, ranks, steps(2), make, key_value_heads=key_value_heads)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("ranks", "knobs"),
    [
        (2, {"dp_replicate": 2}),
        (2, {"tensor_parallel": 2}),
        (4, {"dp_replicate": 2}),
        (4, {"tensor_parallel": 4}),
    ],
    ids=str,
)
def test_gpus_of_a_mesh_make_the_steps_of_one_rank(ranks, knobs):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    in_a_fork(on_gpus)(ranks, knobs)


def on_gpus(ranks, knobs):
    """Losses and norms of ranks on GPUs are those of one on the CPU."""
    trainer, heads = tiny_trainer(eps=EPS, **knobs), 1 if ranks == 2 else 2

    def make():
        return tiny_learner(trainer, of_heads(tiny_llama(), heads))

    expected = train(make(), steps(2))
    with led(trainer, ranks, make, key_value_heads=heads, device="cuda:0") as learner:
        found = train(learner, steps(2))
    for wanted, outcome in zip(expected, found, strict=True):
        np.testing.assert_allclose(
            [outcome.loss, outcome.grad_norm], [wanted.loss, wanted.grad_norm], rtol=1e-3
        )


def qwen3():
    """Its norms of queries and keys see a rank's own heads alone."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=SLOW)])
@in_a_fork
def test_activations_computed_again_and_norms_of_a_ranks_own_heads_change_nothing(ranks):
    trainer = tiny_trainer(tensor_parallel=2, eps=EPS, gradient_checkpointing=True)
    compare(trainer, ranks, steps(2), lambda: tiny_learner(trainer, qwen3()))


def biased():
    """Its biases beside matrices that are cut by columns lie whole on every rank."""
    config = copy.deepcopy(tiny_llama().config)
    config.attention_bias = config.mlp_bias = True
    module = type(tiny_llama())(config).eval()
    for name, weight in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.2)
    return module


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=SLOW)])
@in_a_fork
def test_biases_that_every_rank_holds_whole_are_counted_once(ranks):
    trainer = tiny_trainer(tensor_parallel=2, eps=EPS, max_grad_norm=0.1)
    compare(trainer, ranks, steps(2), lambda: tiny_learner(trainer, biased()))


def critic():
    """A number per token."""
    torch.manual_seed(0)
    config = copy.deepcopy(tiny_llama().config)
    config.num_labels = 1
    return LlamaForTokenClassification(config).eval()


@pytest.mark.parametrize(
    "knobs", [{"micro_batch_tokens": 40}, pytest.param({"tensor_parallel": 2}, marks=SLOW)]
)
@in_a_fork
def test_ranks_train_a_critic_as_one_does(knobs):
    trainer = Trainer(Model("tiny", head="value"), loss=value_loss, lr=1e-2, eps=EPS, **knobs)
    draw = np.random.default_rng(0)
    given = [
        dataclasses.replace(
            rows, columns_S=rows.columns_S | {"values": draw.normal(size=len(rows.tokens.ids))}
        )
        for rows in steps()
    ]
    compare(
        trainer,
        2,
        given,
        lambda: learner_of(trainer, forward_of(trainer, critic()), node="trainer"),
    )


@pytest.mark.parametrize("has_kernels", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
@in_a_fork
def test_in_bfloat16_ranks_make_the_steps_of_one_around_weights_in_float32(
    tmp_path, name, has_kernels
):
    """Kernels of our own do not round what they give, as torch does on ranks; without them, as on
    a GPU, one rank computes as each of several does.
    """
    if has_kernels and not multiplies_bfloat16():
        return
    if not has_kernels:
        build.multiplies_bfloat16 = lambda: False  # in this fork
    {"Llama": tiny_llama, "Qwen3": qwen3}[name]().save_pretrained(tmp_path)
    model = Model(str(tmp_path), dtype="bfloat16")
    trainer = Trainer(model, lr=1e-2, eps=EPS, skip_zero_advantage=False)
    make = functools.partial(build.make_learner, trainer, model, node="trainer", device="cpu")
    one = make()
    wanted = train(one, steps(2))
    assert (one.direct is not None) == has_kernels
    with led(trainer, 2, functools.partial(make, is_alone=False)) as learner:
        found = train(learner, steps(2))
        held = weights(learner)[0]
        assert {weight.dtype for weight in learner.parameters.values()} == {torch.float32}
    apart = max(
        float((held[at] - weight.detach()).abs().max()) for at, weight in one.parameters.items()
    )
    loose = 3 if has_kernels else 1
    for mine, its in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine.loss, its.loss, rtol=0, atol=6e-4 * loose)
        np.testing.assert_allclose(mine.grad_norm, its.grad_norm, rtol=8e-3 * loose)
    assert apart < 1e-2, "two steps of at most as much"


@in_a_fork
def test_ranks_without_rollouts_take_part_with_empty_micro_batches():
    """One rollout for four ranks; then a step of which nothing has to be computed."""
    one = rows_of(group(0, size=1, advantages=[1.0]))
    none = rows_of(group(1, size=2, advantages=[0.0, 0.0]))
    compare(tiny_trainer(eps=EPS), 4, [one, none, one])


@in_a_fork
def test_numbers_that_are_not_finite_leave_the_weights_of_all_ranks_alone_and_are_named():
    bad = rows_of(
        *[group(number, size=4, advantages=[1.0, -1.0, float("nan"), 1.0]) for number in range(4)]
    )
    with led(tiny_trainer(), 2) as learner:
        before = weights(learner)
        (outcome,) = train(learner, [bad])
        after = weights(learner)
        (good,) = train(learner, steps(1))
    assert outcome.culprit is not None and outcome.culprit.startswith("the loss of rollouts")
    assert all(str(rollout) in outcome.culprit for rollout in (2, 6, 10, 14))
    assert good.culprit is None
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("tensor_parallel", [1, pytest.param(2, marks=SLOW)])
@in_a_fork
def test_a_checkpoint_of_two_ranks_goes_on_with_one_as_if_nothing_had_been(
    tensor_parallel, tmp_path
):
    trainer = tiny_trainer(eps=EPS, tensor_parallel=tensor_parallel)
    one = tiny_learner(trainer)
    expected = train(one, steps(4))
    with led(trainer, 2) as learner:
        train(learner, steps(2))
        learner.everywhere(checkpoint.save, folder=tmp_path, tokenizer=None, facts={"step": 2})
    resumed = tiny_learner(trainer, AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    resumed.everywhere(checkpoint.restore, folder=tmp_path)
    for wanted, outcome in zip(expected[2:], train(resumed, steps(4)[2:]), strict=True):
        np.testing.assert_allclose(
            [outcome.loss, outcome.grad_norm], [wanted.loss, wanted.grad_norm], rtol=1e-4
        )


@SLOW
@in_a_fork
def test_a_checkpoint_of_one_rank_goes_on_with_four(tmp_path):
    trainer = tiny_trainer(eps=EPS, tensor_parallel=2)
    one = tiny_learner(trainer)
    train(one, steps(2))
    one.everywhere(checkpoint.save, folder=tmp_path, tokenizer=None, facts={"step": 2})
    expected = train(one, steps(4)[2:])

    def make():
        return tiny_learner(trainer, AutoModelForCausalLM.from_pretrained(tmp_path).eval())

    with led(trainer, 4, make) as learner:
        learner.everywhere(checkpoint.restore, folder=tmp_path)
        found = train(learner, steps(4)[2:])
    for wanted, outcome in zip(expected, found, strict=True):
        np.testing.assert_allclose(
            [outcome.loss, outcome.grad_norm], [wanted.loss, wanted.grad_norm], rtol=1e-4
        )


@in_a_fork
def test_no_rank_holds_more_than_its_part_of_any_matrix():
    with led(tiny_trainer(), 2) as learner:
        parts = learner.everywhere(_sizes)
        whole = {name: weight.numel() for name, weight in tiny_llama().named_parameters()}
        for name, size in whole.items():
            assert sum(part[name] for part in parts) == size
            assert max(part[name] for part in parts) <= (size + 32 * 2) // 2
        gathered = [
            each for each in learner.forward.module.modules() if isinstance(each, FSDPModule)
        ]
        assert gathered == list(learner.forward.module.model.layers)


def _sizes(learner, rank, ranks):
    return {name: weight.to_local().numel() for name, weight in learner.parameters.items()}


@in_a_fork
def test_a_killed_rank_is_named_and_the_learner_is_done():
    with led(tiny_trainer(), 2) as learner:
        (given,) = steps(1)
        train(learner, [given])
        pid, folder = learner.everywhere(_pid)[1], learner._exchange.team.folder
        parts = learner.begin(given, 1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            WorkerDied, match=rf"rank 1 of 'trainer' \(pid {pid}\) ended by signal 9 .* of step 2"
        ):
            for part in parts:
                learner.micro(part)
            learner.end(0.0)
        with pytest.raises(RunError, match="not in step any more"):
            learner.begin(given, 1)
        assert not folder.exists()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def _pid(learner, rank, ranks):
    return os.getpid()


@pytest.mark.slow
@in_a_fork
def test_a_silent_rank_is_named_when_the_time_out_has_passed():
    with led(tiny_trainer(), 3, timeout_s=3.0) as learner:
        pid = learner.everywhere(_pid)[2]
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(
            DeadlineError, match=rf"waited 3 s for rank 2 \(pid {pid}\) in .* of step 1"
        ):
            train(learner, steps(1))
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@in_a_fork
def test_an_error_of_the_users_loss_on_another_rank_comes_with_its_words():
    def broken(new_logprobs, advantage):
        if os.getpid() != first:
            raise ValueError("no such luck")
        return -advantage * new_logprobs

    first = os.getpid()
    with (
        led(tiny_trainer(loss=broken, skip_zero_advantage=False), 2) as learner,
        pytest.raises(WorkerDied, match=r"rank 1 of 'trainer' .*ValueError: no such luck"),
    ):
        train(learner, steps(1))


@in_a_fork
def test_a_model_that_cannot_be_dealt_out_is_refused_and_no_rank_is_left():
    trainer = tiny_trainer(tensor_parallel=3)
    with (
        pytest.raises(
            ModelError,
            match=r"4 attention heads and 2 key/value heads.*tensor_parallel=1 or 2 or 4",
        ),
        led(trainer, 3),
    ):
        pass
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@in_a_fork
def test_a_model_that_keeps_its_own_attention_is_refused():
    trainer = tiny_trainer()
    make = functools.partial(tiny_learner, trainer, packed=False)
    with (
        pytest.raises(ModelError, match="keeps its own attention.*train it on one rank"),
        led(trainer, 2, make),
    ):
        pass
