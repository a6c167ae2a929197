"""Laws of the sliced head: numbers and gradients of all logits, without ever holding them."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks_rig import in_a_fork, led
from torch import Tensor
from trainer_rig import VOCABULARY, group, rows_of, tiny_learner, tiny_llama, tiny_trainer
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from dataflow.tokens.rollout_tokens import SamplingMask
from operators.training.learner import head, policy
from operators.training.learner import policy as sliced_head
from operators.training.learner.head import (
    Shape,
    Wanted,
    logprobs_of_hidden,
    logprobs_of_logits,
    slice_width,
)
from operators.training.learner.policy import Policy
from operators.training.learner.rows import TokenTree, pack

ROWS, IDS, WIDTH = 7, 53, 5


SMALL = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


MODELS = {
    "llama_tied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=67,
            n_positions=128,
            n_embd=32,
            n_layer=2,
            n_head=4,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=1,
        )
    ),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **SMALL,
            head_dim=8,
            sliding_window=7,
            query_pre_attn_scalar=8,
            final_logit_softcapping=4.0,
        )
    ),
    "gemma2_packed": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **SMALL,
            head_dim=8,
            sliding_window=7,
            query_pre_attn_scalar=8,
            attn_logit_softcapping=None,
        )
    ),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.1)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=3.0)),
}


"""Last layers that are tied, that are not, with logits that are capped, multiplied and divided."""


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[8, 53, 512])
def width(request, monkeypatch):
    """Ids of a slice: several slices with a rest, one that fits exactly, one that is wider than the
    vocabulary.
    """
    monkeypatch.setattr(head, "LEAST_IDS", request.param)
    monkeypatch.setattr(head, "CPU_SLICE", 1)
    return request.param


def _made(dtype: torch.dtype, *, bias: bool = False, kept: bool = False, spread: float = 1.0):
    """Hidden states, weight, bias and what is wanted; rows repeat, and one pair is wanted twice."""
    draw = torch.Generator().manual_seed(1)
    tensors = [
        torch.randn(ROWS, WIDTH, generator=draw),
        torch.randn(IDS, WIDTH, generator=draw) * spread,
    ]
    if bias:
        tensors.append(torch.randn(IDS, generator=draw))
    tensors = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    rows, targets = torch.tensor([0, 2, 2, 2, 6, 5, 3]), torch.tensor([0, 9, 9, 8, 52, 16, 7])
    if not kept:
        return tensors, Wanted(rows, targets)
    segments, ids = torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([9, 3, 8, 52, 0, 51])
    return tensors, Wanted(rows, targets, torch.tensor([1, 3, 4]), segments, ids)


def _by_hand(tensors: list[Tensor], wanted: Wanted, shape: Shape) -> tuple[Tensor, Tensor]:
    """Token by token, from the definition, over the ids that were left."""
    logits = F.linear(*tensors)
    if shape.cap is not None:
        logits = shape.cap * torch.tanh(logits / shape.cap)
    left = {}
    if wanted.tokens_M is not None:
        left = {
            int(token): wanted.ids_K[wanted.segment_K == at]
            for at, token in enumerate(wanted.tokens_M)
        }
    logprobs, entropies = [], []
    for token, (row, target) in enumerate(zip(wanted.head_T, wanted.targets_T, strict=True)):
        ids = left.get(token, torch.arange(IDS))
        logs = (shape.scale * logits[row, ids]).log_softmax(-1)
        logprobs.append(logs[(ids == target).nonzero()[0, 0]])
        entropies.append(-(logs.exp() * logs).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def _all(found: tuple[Tensor, Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Numbers, and gradients of a weighted sum of both."""
    weights = torch.randn(2, len(found[0]), generator=torch.Generator().manual_seed(2)).to(
        found[0].dtype
    )
    total = (weights[0] * found[0]).sum() + (weights[1] * found[1]).sum()
    return [*(values.detach() for values in found), *torch.autograd.grad(total, tensors)]


@pytest.mark.parametrize("shape", [Shape(), Shape(scale=1.7), Shape(scale=0.8, cap=3.0)], ids=str)
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str
)
def test_numbers_and_gradients_are_those_of_a_float64_reference(
    width, dtype, tolerance, bias, kept, shape
):
    tensors, wanted = _made(dtype, bias=bias, kept=kept)
    found = _all(logprobs_of_hidden(*(*tensors, None)[:3], wanted, shape, entropy=True), tensors)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    for ours, theirs in zip(found, _all(_by_hand(exact, wanted, shape), exact), strict=True):
        assert ours.dtype == dtype
        assert (ours - theirs).abs().max() <= tolerance * max(1.0, theirs.abs().max().item())


def test_the_gradient_is_that_of_finite_differences(width):
    tensors, wanted = _made(torch.float64, bias=True, kept=True)

    def both(*given):
        return logprobs_of_hidden(*given, wanted, Shape(scale=0.7, cap=5.0), entropy=True)

    assert torch.autograd.gradcheck(both, tensors, atol=1e-7)


@pytest.mark.parametrize("spread", [30.0, 300.0])
def test_logits_far_apart_neither_overflow_nor_vanish(width, spread):
    tensors, wanted = _made(torch.float32, spread=spread)
    found = _all(logprobs_of_hidden(*tensors, None, wanted, Shape(), entropy=True), tensors)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    for ours, theirs in zip(found, _all(_by_hand(exact, wanted, Shape()), exact), strict=True):
        assert (ours - theirs).abs().max() <= 1e-6 * spread * max(1.0, theirs.abs().max().item())


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_in_bfloat16_it_is_no_further_from_float64_than_all_logits_are(width, weights):
    tensors, wanted = _made(weights)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    truth = _all(_by_hand(exact, wanted, Shape(scale=2.0)), exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = _all(
            logprobs_of_hidden(*tensors, None, wanted, Shape(scale=2.0), entropy=True), tensors
        )
        plain = _all(logprobs_of_logits(F.linear(*tensors), wanted, 0.5, entropy=True), tensors)
    for found, usual, right in zip(ours, plain, truth, strict=True):
        assert (found - right).norm() <= 1.5 * (usual - right).norm() + 1e-4
    assert ours[0].dtype == torch.float32
    assert [grad.dtype for grad in ours[2:]] == [weights, weights]


@pytest.mark.parametrize("wants_entropy", [False, True])
def test_only_gradients_that_are_needed_are_computed(wants_entropy):
    tensors, wanted = _made(torch.float64, bias=True)
    every = torch.autograd.grad(
        logprobs_of_hidden(*tensors, wanted, Shape(), entropy=wants_entropy)[0].sum(), tensors
    )
    for index, wanted_grad in enumerate(every):
        given = [tensor.detach().requires_grad_(at == index) for at, tensor in enumerate(tensors)]
        logprobs_of_hidden(*given, wanted, Shape(), entropy=wants_entropy)[0].sum().backward()
        torch.testing.assert_close(given[index].grad, wanted_grad)
        assert all(tensor.grad is None for at, tensor in enumerate(given) if at != index)


def _shared_out(learner: object, rank: int, ranks: int) -> list[list[list[float]]]:
    """Numbers and gradients that a rank has, of weight and bias the mean; of few rows and of many,
    with what truncation left and without.
    """
    found = []
    for kept in (False, True):
        for rows in (ROWS, 2):
            (hidden, weight, bias), wanted = _made(torch.float64, bias=True, kept=kept)
            if rows < ROWS:
                wanted = dataclasses.replace(wanted, head_T=wanted.head_T % rows)
            given = [each.detach().requires_grad_() for each in (hidden[:rows], weight, bias)]
            shape = Shape(scale=0.8, cap=3.0)
            one = _all(logprobs_of_hidden(*given, wanted, shape, entropy=True), given)
            shared = logprobs_of_hidden(
                *given, wanted, shape, entropy=True, alike=torch.distributed.group.WORLD
            )
            of_rank = _all(shared, given)
            for gradient in of_rank[3:]:
                torch.distributed.all_reduce(gradient)
                gradient /= ranks
            found += [[each.flatten().tolist() for each in all_] for all_ in (one, of_rank)]
    return found


@in_a_fork
def test_ranks_that_share_the_rows_out_have_the_numbers_and_gradients_of_one():
    with led(tiny_trainer(), 3) as learner:
        for of_rank in learner.everywhere(_shared_out):
            for one, shared in zip(of_rank[::2], of_rank[1::2], strict=True):
                for wanted, found in zip(one, shared, strict=True):
                    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)


def test_without_tokens_there_is_nothing_and_the_weights_gradient_is_zero():
    hidden, weight = (
        torch.zeros(0, WIDTH, requires_grad=True),
        torch.ones(IDS, WIDTH, requires_grad=True),
    )
    none = torch.zeros(0, dtype=torch.long)
    found, entropy = logprobs_of_hidden(
        hidden, weight, None, Wanted(none, none), Shape(), entropy=True
    )
    assert found.shape == entropy.shape == (0,)
    (found.sum() + entropy.sum()).backward()
    assert not weight.grad.any()


@pytest.mark.parametrize("wrong", [-1, IDS])
def test_an_id_outside_of_the_vocabulary_is_refused(wrong):
    (hidden, weight), _ = _made(torch.float32)
    wanted = Wanted(torch.tensor([0, 1]), torch.tensor([3, wrong]))
    with pytest.raises(IndexError, match=f"not all within a vocabulary of {IDS}"):
        logprobs_of_hidden(hidden, weight, None, wanted, Shape(), entropy=False)


@pytest.mark.parametrize("rows", [1, 1000, 10**6])
def test_a_slice_is_as_wide_as_its_share_of_memory_and_never_narrow(rows):
    for gpu, most in ((False, head.CPU_SLICE), (True, head.GPU_SLICE)):
        found = slice_width(rows, gpu)
        assert found >= head.LEAST_IDS
        assert found == head.LEAST_IDS or found * rows <= most


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the most numbers of any tensor made within."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor):
                self.most = max(
                    self.most, tensor.untyped_storage().nbytes() // tensor.element_size()
                )
        return made


def test_no_tensor_is_as_large_as_all_logits_forward_or_backward(monkeypatch):
    monkeypatch.setattr(head, "CPU_SLICE", 2**14)
    monkeypatch.setattr(head, "LEAST_IDS", 64)
    hidden, weight = (
        torch.randn(200, 8, requires_grad=True),
        torch.randn(5000, 8, requires_grad=True),
    )
    wanted = Wanted(torch.arange(200), torch.arange(200))
    with _Largest() as seen:
        found, entropy = logprobs_of_hidden(hidden, weight, None, wanted, Shape(), entropy=True)
        (found.sum() + entropy.sum()).backward()
    assert seen.most <= head.KEPT_OF_WEIGHT * weight.numel() < 200 * 5000 / 10
    with _Largest() as seen:
        F.linear(hidden, weight).logsumexp(-1).sum().backward()
    assert seen.most == 200 * 5000


def _tree(seed: int = 3, ids: int = 67):
    """Ragged rollouts that share prompts, with some tokens trained; and what truncation left of
    some.
    """
    draw = np.random.default_rng(seed)
    rows = [draw.integers(2, ids, size) for size in (12, 9, 30, 7, 70, 9)]
    rows[1][:6] = rows[0][:6]
    rows[5][:] = rows[1]
    rows[5][8] = 2 if rows[1][8] != 2 else 3
    offsets = np.r_[0, np.cumsum([len(row) for row in rows])]
    tree = pack(np.concatenate(rows), draw.random(offsets[-1]) < 0.7, offsets)
    lengths = draw.integers(0, 4, len(tree.targets_T))
    left = [draw.choice(ids, size, replace=False) for size in lengths]
    for target, few in zip(tree.targets_T, left, strict=True):
        few[:1] = target
    left = [np.unique(few) for few in left]
    kept = SamplingMask(
        ids=np.concatenate(left).astype(np.int32),
        offsets=np.r_[0, np.cumsum([len(few) for few in left])],
    )
    return tree, kept


def _model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def _numbers(module: torch.nn.Module, *, packed: bool | None, masks: bool) -> list[Tensor]:
    """Log-probabilities, entropies and all gradients."""
    tree, kept = _tree()
    found = Policy(module, temperature=0.7, packed=packed).logprobs(
        tree, kept if masks else None, entropy=True
    )
    return _all(found, list(module.parameters()))


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_packed_padded_and_sliced_give_one_loss_and_one_gradient(name, masks, monkeypatch):
    monkeypatch.setattr(head, "LEAST_IDS", 16)
    monkeypatch.setattr(head, "CPU_SLICE", 1)
    wanted = _numbers(_model(name), packed=False, masks=masks)
    for packed, most in ((None, policy.MOST_LOGITS), (None, 0), (False, 0)):
        monkeypatch.setattr(policy, "MOST_LOGITS", most)
        module = _model(name)
        found = _numbers(module, packed=packed, masks=masks)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=1e-4, atol=1e-5 * max(1.0, theirs.abs().max().item())
            )


@pytest.mark.parametrize("name", MODELS)
def test_every_shape_of_last_layer_is_sliced_and_packed_where_its_attention_allows(name):
    module = _model(name)
    made = Policy(module)
    assert made.slices
    assert made.packs == (name != "gemma2")
    assert "forward" not in vars(module.get_output_embeddings())


def test_a_loss_sees_the_same_step_sliced_and_with_all_logits(monkeypatch):
    rows = rows_of(*(group(number, size=4) for number in range(5)))
    outcomes = []
    for most in (policy.MOST_LOGITS, 0):
        monkeypatch.setattr(policy, "MOST_LOGITS", most)
        learner = tiny_learner(tiny_trainer(micro_batch_tokens=40))
        for part in learner.begin(rows, 0):
            learner.micro(part)
        outcomes.append(learner.end(1e-3))
    assert outcomes[0].loss == pytest.approx(outcomes[1].loss, rel=1e-5)
    assert outcomes[0].grad_norm == pytest.approx(outcomes[1].grad_norm, rel=1e-5)


def test_large_micro_batches_never_ask_the_model_for_its_logits(monkeypatch):
    monkeypatch.setattr(policy, "MOST_LOGITS", 0)
    module, sizes = tiny_llama(), []
    module.register_forward_hook(lambda _, __, out: sizes.append(out.logits.shape[-1]))
    made = Policy(module)
    tree, _ = _tree(ids=VOCABULARY)
    sizes.clear()
    made.logprobs(tree)
    made.logprobs(tree, entropy=True)
    assert sizes == [1, 2]


def _paths(tree: TokenTree) -> list[list[int]]:
    """Tokens before each trained one."""
    flat = np.concatenate([bucket.ravel() for bucket in tree.buckets])
    starts = np.concatenate(
        [np.repeat(np.arange(0, b.size, b.shape[1]), b.shape[1]) for b in tree.buckets]
    )
    bases = np.repeat(
        np.cumsum([0, *(b.size for b in tree.buckets[:-1])]), [b.size for b in tree.buckets]
    )
    at_T = tree.back_N[tree.heads_U[tree.head_T]]
    return [tree.tokens_N[flat[bases[at] + starts[at] : at + 1]].tolist() for at in at_T]


class _Squared(LlamaForCausalLM):
    """Does something to its logits that is neither a cap nor a factor."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits.square()
        return out


class _Doubled(torch.nn.Linear):
    """A last layer of another kind."""

    def forward(self, hidden):
        return 2.0 * super().forward(hidden)


def _squared() -> torch.nn.Module:
    torch.manual_seed(0)
    return _Squared(LlamaConfig(**SMALL)).eval()


def _doubled() -> torch.nn.Module:
    module = _model("llama_tied")
    module.lm_head.__class__ = _Doubled
    return module


@pytest.mark.parametrize("make", [_squared, _doubled])
def test_a_model_that_does_more_to_its_logits_keeps_them_and_stays_right(make, monkeypatch):
    monkeypatch.setattr(policy, "MOST_LOGITS", 0)
    tree, _ = _tree()
    oracle = make()
    wanted = [
        oracle(input_ids=torch.tensor([path])).logits[0, -1].log_softmax(-1)[target]
        for path, target in zip(_paths(tree), tree.targets_T, strict=True)
    ]
    for packed in (True, False):
        made = Policy(make(), packed=packed)
        assert not made.slices
        found, _ = made.logprobs(tree)
        torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-4, atol=1e-4)


def test_a_call_that_fails_leaves_the_model_as_it_was(monkeypatch):
    monkeypatch.setattr(policy, "MOST_LOGITS", 0)
    module = tiny_llama()
    made = Policy(module)

    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(sliced_head, "logprobs_of_hidden", fail)
    with pytest.raises(MemoryError):
        made.logprobs(_tree(ids=VOCABULARY)[0])
    assert "forward" not in vars(module.get_output_embeddings())
