"""The figures of a step against their definitions, written out in float64."""

import functools
import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from trainer_rig import (
    gradient,
    group,
    reference_logprobs,
    rows_of,
    tiny_learner,
    tiny_llama,
    tiny_trainer,
)

from operators.losses import aipo, gspo, truncated_is
from operators.training.batches import by_staleness, staleness_figures
from operators.training.learner.diagnostics import Diagnostics, ratio_bounds, sums_of
from operators.training.learner.loss_function import read_loss
from operators.training.learner.rows import whitened


def tokens(count: int, seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [-3.0 * torch.rand(count, generator=draw) for _ in range(4)]


def measured(*parts: Diagnostics) -> dict[str, float | None]:
    """As ranks do it: the sums of all, the largest of all."""
    totals = [part.totals() for part in parts]
    sums, largest = (
        torch.stack([s for s, _ in totals]).sum(0),
        torch.stack([m for _, m in totals]).max(),
    )
    return dict(parts[0].measures(sums.tolist(), float(largest)))


@pytest.mark.parametrize("cuts", [(40,), (13, 27), (1, 38, 39)])
def test_a_policys_figures_are_those_of_all_its_tokens_however_they_were_cut(
    cuts: tuple[int, ...],
) -> None:
    new, old, reference, entropy = tokens(40, 0)
    oldest = torch.arange(40) % 3
    names = sums_of(("new_logprobs", "entropy"), ("logprobs", "ref_logprobs"))
    parts, begin = [], 0
    for end in (*cuts, 40):
        part = Diagnostics((0.0, 1.5), 2, names)
        cut = slice(begin, end)
        if end > begin:
            part.policy(
                new[cut], old[cut], oldest[cut], entropy_T=entropy[cut], reference_T=reference[cut]
            )
        parts.append(part)
        begin = end
    n, o, r, e = (each.double().numpy() for each in (new, old, reference, entropy))
    ratio, same = np.exp(n - o), oldest.numpy() == 2
    wanted = {
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "ess": ratio.sum() ** 2 / (40 * (ratio**2).sum()),
        "kl": (ratio - 1 - np.log(ratio)).mean(),
        "truncated_share": (ratio > 1.5).mean(),
        "mismatch": np.abs(n - o)[same].mean(),
        "entropy": e.mean(),
        "kl_reference": (np.exp(r - n) - 1 - (r - n)).mean(),
    }
    found = measured(*parts)
    assert found.keys() == wanted.keys()
    assert all(found[name] == pytest.approx(value, rel=1e-5) for name, value in wanted.items())


def test_a_critics_figures_are_those_of_its_values_and_targets() -> None:
    value, target, _, _ = tokens(30, 1)
    whole = Diagnostics(None, 0, sums_of(("new_values",), ("values", "advantage")))
    for cut in (slice(0, 7), slice(7, 30)):
        whole.critic(value[cut], target[cut])
    v, t = value.double().numpy(), target.double().numpy()
    found = measured(whole)
    assert found["value_mean"] == pytest.approx(v.mean(), rel=1e-5)
    assert found["value_max"] == pytest.approx(np.abs(v).max(), rel=1e-6)
    assert found["explained_variance"] == pytest.approx(1 - np.var(t - v) / np.var(t), rel=1e-4)


def test_without_tokens_and_without_tokens_of_these_weights_nothing_is_claimed() -> None:
    names = sums_of(("new_logprobs",), ("logprobs",))
    assert measured(Diagnostics(None, 0, names)) == {}
    other = Diagnostics(None, 5, names)
    new, old, _, _ = tokens(4, 2)
    other.policy(new, old, torch.zeros(4))
    assert (measured(other)["mismatch"], measured(other)["truncated_share"]) == (None, None)


def test_the_share_beyond_the_bounds_is_of_the_ratio_that_the_loss_bounds_or_left_out() -> None:
    def bounds(loss):
        read = read_loss(loss, "trainer")
        return ratio_bounds(read.knobs, read.columns + read.computed)

    assert bounds(functools.partial(aipo, rho=3.0)) == (0.0, 3.0)
    assert (bounds(gspo), bounds(truncated_is)) == (None, None)


def test_rollouts_are_counted_by_the_age_of_their_oldest_token() -> None:
    rows = rows_of(
        group(0, version=3, advantages=[1.0, -1.0, 0.5]),
        group(1, version=5, advantages=[0.25, 0.25, -0.5]),
    )
    found = by_staleness(5, rows)
    assert {age: each["rollouts"] for age, each in found.items()} == {"0": 3, "2": 3}
    assert found["2"]["advantage_mean"] == pytest.approx(0.5 / 3)
    assert found["2"]["advantage_size"] == pytest.approx(2.5 / 3)


def test_both_parts_of_staleness_are_those_of_each_rollout_and_their_means_add_up() -> None:
    def drawn(number: int, versions: list[int]) -> pa.RecordBatch:
        """Completions of as many tokens as there are versions, all of those."""
        records = group(number, size=3)
        plain = records.to_pylist()
        for row in plain:
            row |= {
                "tokens": [5, *([7] * len(versions))],
                "mask": [False, *([True] * len(versions))],
            }
            row |= {"logprobs": [0.0, *([-1.0] * len(versions))], "versions": [-1, *versions]}
        return pa.RecordBatch.from_pylist(plain, schema=records.schema)

    rows = rows_of(drawn(0, [2, 2, 4]), drawn(1, [3, 5]), drawn(2, [5]))
    assert rows.newest_R.tolist() == [4] * 3 + [5] * 6
    found = staleness_figures(5, rows)
    assert found == {
        "staleness_mean": pytest.approx(5 / 3),
        "staleness_max": 3,
        "staleness_generating_mean": pytest.approx(4 / 3),
        "staleness_generating_max": 2,
        "staleness_waiting_mean": pytest.approx(1 / 3),
        "staleness_waiting_max": 1,
    }
    none = staleness_figures(5, rows_of(drawn(0, [])))
    assert set(none.values()) == {0} and none.keys() == found.keys()


def test_tokens_after_an_update_are_those_of_newer_weights_than_the_first_of_their_turn() -> None:
    def drawn(number: int, versions: list[int]) -> pa.RecordBatch:
        records = group(number, size=2)
        plain = records.to_pylist()
        for row in plain:
            mask = [version >= 0 for version in versions]
            row |= {
                "tokens": [7] * len(mask),
                "mask": mask,
                "logprobs": [-1.0 * each for each in mask],
            }
            row |= {"versions": versions}
        return pa.RecordBatch.from_pylist(plain, schema=records.schema)

    rows = rows_of(
        drawn(0, [-1, 2, 2, 4, 5]),
        drawn(1, [-1, 3, -1, 4, 4, -1]),
        drawn(2, [6, 6]),
        drawn(3, [-1]),
    )
    first, second = [False, False, False, True, True], [False] * 6
    assert rows.after_update_S.tolist() == [*first * 2, *second * 2, *[False] * 4, False, False]


def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_trained_tokens() -> None:
    rows = whitened(rows_of(*[group(number, size=4) for number in range(5)]))
    tokens_T = np.repeat(rows.columns_R["advantage"], rows.trained_R)
    assert tokens_T.mean() == pytest.approx(0.0, abs=1e-9)
    assert tokens_T.std() == pytest.approx(1.0, rel=1e-6)


def test_a_trainer_that_whitens_has_the_gradient_of_whitened_advantages() -> None:
    batches = [group(number, size=4) for number in range(3)]
    rows = rows_of(*batches)
    module = tiny_llama()
    advantages, lengths = (
        np.concatenate([b.column("advantage").to_numpy() for b in batches]),
        rows.trained_R,
    )
    mean = (advantages * lengths).sum() / lengths.sum()
    deviation = math.sqrt((lengths * (advantages - mean) ** 2).sum() / lengths.sum())
    total = torch.zeros(())
    for batch, at in zip(batches, range(0, 12, 4), strict=True):
        for row in range(4):
            tokens_, mask, old = (
                batch.column(name)[row].as_py() for name in ("tokens", "mask", "logprobs")
            )
            new = reference_logprobs(module, tokens_, mask)
            drawn = torch.tensor([old[t] for t in range(1, len(tokens_)) if mask[t]])
            weight = (new.detach() - drawn).exp().clamp(max=4.0)
            total = total - (weight * (advantages[at + row] - mean) / deviation * new).sum()
    (total / lengths.sum()).backward()
    wanted = torch.cat([weight.grad.flatten() for weight in module.parameters()])
    _, found, _ = gradient(tiny_learner(tiny_trainer(whiten=True)), rows)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
