"""Laws of the column sampling_mask: the trainer's distribution is the truncated one that a token
was drawn from.
"""

import numpy as np
import pyarrow as pa
import pytest
import torch
from trainer_rig import VOCABULARY, gradient, group, rows_of, tiny_learner, tiny_llama, tiny_trainer

from dataflow.errors import RecordError
from dataflow.records import SAMPLING_MASK, SAMPLING_MASK_TYPE
from dataflow.tokens.ragged import gather
from dataflow.tokens.rollout_tokens import SamplingMask
from operators.engine.sampler import Sampling, draw
from operators.training.learner.policy import Policy
from operators.training.learner.rows import pack


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _generated(
    sampling: Sampling, *, size: int = 4, seed: int = 0, prompt: int = 4
) -> pa.RecordBatch:
    """One group whose completions a tiny policy wrote, with its log-probabilities and masks."""
    module = tiny_llama()
    given = torch.randint(2, VOCABULARY, (prompt,), generator=torch.Generator().manual_seed(seed))
    rows = group(seed, size=size, advantages=[1.0] * size).to_pylist()
    for position, row in enumerate(rows):
        tokens, logprobs, masks = given.tolist(), [0.0] * prompt, [None] * prompt
        for count in range(3 + position):
            with torch.no_grad():
                logits = module(torch.tensor([tokens])).logits[0, -1:]
            seen = torch.zeros(1, VOCABULARY, dtype=torch.bool)
            seen[0, tokens] = True
            seeds = torch.tensor([100 * seed + position])
            drawn = draw(logits, sampling, seeds, torch.tensor([count]), seen=seen, keep=True)
            tokens.append(int(drawn.tokens))
            logprobs.append(float(drawn.logprobs))
            masks.append(
                None if drawn.kept_tokens is None else drawn.kept_tokens[0].nonzero()[:, 0].tolist()
            )
        row |= {
            "tokens": tokens,
            "logprobs": logprobs,
            "mask": [at >= prompt for at in range(len(tokens))],
        }
        row |= {
            "versions": [0 if at >= prompt else -1 for at in range(len(tokens))],
            SAMPLING_MASK: masks,
        }
    fields = [*group(0).schema, pa.field(SAMPLING_MASK, SAMPLING_MASK_TYPE)]
    return pa.RecordBatch.from_pylist(rows, schema=pa.schema(fields))


def _with_masks(batch: pa.RecordBatch, masks: list) -> pa.RecordBatch:
    return batch.drop_columns([SAMPLING_MASK]).append_column(
        SAMPLING_MASK, pa.array(masks, SAMPLING_MASK_TYPE)
    )


TRUNCATED = [
    Sampling(),
    Sampling(top_k=3),
    Sampling(top_p=0.6),
    Sampling(min_p=0.3),
    Sampling(temperature=0.7, top_k=8, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("sampling", TRUNCATED, ids=str)
def test_at_equal_weights_the_trainers_logprobs_are_those_recorded(sampling, packed):
    rows = rows_of(*(_generated(sampling, seed=seed) for seed in range(3)))
    tree = pack(rows.tokens.ids, rows.tokens.mask, rows.offsets)
    policy = Policy(tiny_llama(), temperature=sampling.temperature, packed=packed)
    kept = (
        None if rows.tokens.sampling_mask is None else rows.tokens.sampling_mask.take(tree.flat_T)
    )
    found, _ = policy.logprobs(tree, kept)
    recorded = torch.from_numpy(rows.tokens.logprobs[tree.flat_T])
    torch.testing.assert_close(found.detach(), recorded, atol=1e-5, rtol=0)
    unmasked, _ = policy.logprobs(tree)
    assert (sampling == Sampling()) == bool((unmasked - recorded).abs().max() < 1e-5)


def test_a_step_at_equal_weights_sees_ratio_one_under_truncation():
    batch = _generated(Sampling(top_k=4))
    for given, is_one in ((batch, True), (batch.drop_columns([SAMPLING_MASK]), False)):
        learner = tiny_learner(tiny_trainer(skip_zero_advantage=False))
        for part in learner.begin(rows_of(given), 0):
            learner.micro(part)
        outcome = learner.end(0.0)
        assert (abs(outcome.measures["ratio_mean"] - 1) < 1e-5) == is_one
        assert (abs(outcome.measures["kl"]) < 1e-6) == is_one


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_entropy_and_gradients_are_those_of_a_float64_reference(temperature):
    random = np.random.default_rng(5)
    tokens = np.r_[[3, 4, 5, 6, 7], [3, 4, 5, 6, 9, 2], [3, 4, 8, 8]]
    tree = pack(tokens, np.tile(True, 15), np.array([0, 5, 11, 15]))
    sizes = [0, 1, 4, 0, 9, 0, 5, VOCABULARY, 3, 0, 2, 0, 6, 2, 12]
    ids = [
        np.union1d(random.choice(VOCABULARY, size, replace=False), [token][:size]).astype(np.int32)
        for token, size in zip(tokens, sizes, strict=True)
    ]
    kept = SamplingMask(ids=np.concatenate(ids), offsets=np.r_[0, np.cumsum([len(x) for x in ids])])
    logits = torch.from_numpy(
        3 * random.normal(size=(len(tree.heads_U), VOCABULARY))
    ).requires_grad_()
    weights = torch.from_numpy(random.normal(size=(2, len(tree.flat_T))))

    logprobs, entropies = [], []
    for flat, head in zip(tree.flat_T, tree.head_T, strict=True):
        allowed = torch.from_numpy(ids[flat]).long() if len(ids[flat]) else torch.arange(VOCABULARY)
        logs = torch.log_softmax(logits[head, allowed] / temperature, -1)
        logprobs.append(logs[(allowed == tokens[flat]).nonzero()[0, 0]])
        entropies.append(-(logs.exp() * logs).sum())
    total = (weights[0] * torch.stack(logprobs) + weights[1] * torch.stack(entropies)).sum()
    (wanted,) = torch.autograd.grad(total, logits)

    policy = Policy(tiny_llama(), temperature=temperature)
    policy.logits = lambda packed: logits
    found, entropy = policy.logprobs(tree, kept.take(tree.flat_T), entropy=True)
    (gradients,) = torch.autograd.grad((weights[0] * found + weights[1] * entropy).sum(), logits)
    torch.testing.assert_close(found, torch.stack(logprobs), atol=1e-12, rtol=0)
    torch.testing.assert_close(entropy, torch.stack(entropies), atol=1e-12, rtol=0)
    torch.testing.assert_close(gradients, wanted, atol=1e-12, rtol=0)


def test_siblings_that_share_a_node_keep_their_own_masks():
    tokens, mask = np.array([5, 6, 7, 5, 6, 7]), np.array([False, False, True] * 2)
    tree = pack(tokens, mask, np.array([0, 3, 6]))
    assert len(tree.heads_U) == 1
    kept = SamplingMask(ids=np.array([7, 7, 8, 9], np.int32), offsets=np.array([0, 1, 4]))
    found, _ = Policy(tiny_llama()).logprobs(tree, kept)
    logits = tiny_llama()(torch.tensor([[5, 6]])).logits[0, -1]
    wanted = torch.stack([logits[7] - logits[7], logits[7] - logits[7:10].logsumexp(0)])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_small_restricted_shares_do_not_underflow():
    tree = pack(np.array([5, 7]), np.array([False, True]), np.array([0, 2]))
    policy = Policy(tiny_llama())
    policy.logits = lambda packed: torch.tensor([[500.0] + [0.0] * 6 + [1.0] + [0.0] * 15])
    found, entropy = policy.logprobs(
        tree, SamplingMask(ids=np.array([6, 7]), offsets=np.array([0, 2])), entropy=True
    )
    share = 1 / (1 + np.e)
    assert float(found) == pytest.approx(np.log(1 - share), abs=1e-6)
    assert float(entropy) == pytest.approx(
        -share * np.log(share) - (1 - share) * np.log(1 - share), abs=1e-6
    )


def test_rows_without_a_mask_train_as_if_there_were_no_such_column():
    batch = _generated(Sampling(top_k=4))
    bare = batch.drop_columns([SAMPLING_MASK])
    _, wanted, _ = gradient(tiny_learner(tiny_trainer()), rows_of(bare))
    assert rows_of(bare).tokens.sampling_mask is None
    for nothing in (None, [None], [[]]):
        masks = [
            None if nothing is None else nothing * len(tokens)
            for tokens in batch.column("tokens").to_pylist()
        ]
        rows = rows_of(_with_masks(batch, masks))
        assert rows.tokens.sampling_mask is None
        _, found, _ = gradient(tiny_learner(tiny_trainer()), rows)
        assert torch.equal(found, wanted)
    _, restricted, _ = gradient(tiny_learner(tiny_trainer()), rows_of(batch))
    assert not torch.allclose(restricted, wanted)


def test_masks_stay_with_their_tokens_when_rows_fail_or_have_none():
    first, second = _generated(Sampling(top_k=3), seed=1), _generated(Sampling(top_p=0.7), seed=2)
    masks = first.column(SAMPLING_MASK).to_pylist()
    masks[1] = None
    errors = [None, None, "it failed", None]
    first = _with_masks(first, masks).set_column(
        first.schema.get_field_index("error"), "error", pa.array(errors, pa.string())
    )
    rows = rows_of(first, second)
    wanted = [
        masks[0],
        [None] * len(first["tokens"][1]),
        masks[3],
        *second.column(SAMPLING_MASK).to_pylist(),
    ]
    flat = [mask or [] for row in wanted for mask in row]
    assert rows.tokens.sampling_mask is not None
    for at, mask in enumerate(flat):
        found, _ = gather(rows.tokens.sampling_mask.offsets, np.array([at]))
        assert rows.tokens.sampling_mask.ids[found].tolist() == mask


def test_a_mask_of_another_length_or_without_the_token_drawn_is_refused_by_rollout():
    batch = _generated(Sampling(top_k=3), seed=1)
    masks = batch.column(SAMPLING_MASK).to_pylist()
    with pytest.raises(RecordError, match=r"'sampling_mask' of rollout 5 has 2 .* tokens"):
        rows_of(_with_masks(batch, [masks[0], masks[1][:2], *masks[2:]]))
    token = batch.column("tokens")[2][-1].as_py()
    masks[2][-1] = [other for other in range(VOCABULARY) if other != token]
    with pytest.raises(
        RecordError, match=rf"'sampling_mask' of rollout 6 leaves out token {token} at 8"
    ):
        rows_of(_with_masks(batch, masks))
