"""Laws of combined losses: they read what their parts read, keep their knobs, and are used like any
other loss.
"""

from functools import partial

import loss_oracles as oracle
import pytest
import torch
from trainer_rig import tiny_trainer

from dataflow.errors import GraphError
from operators import losses
from operators.training.learner.loss_function import read_loss


def test_a_combined_loss_reads_the_columns_of_its_parts_once_and_has_their_knobs():
    read = read_loss(losses.with_entropy(losses.with_kl(losses.grpo, beta=0.1)), "trainer")
    assert read.columns == ("logprobs", "advantage", "ref_logprobs")
    assert read.computed == ("new_logprobs", "entropy")
    assert read.knobs == {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_beta": 0.1,
        "entropy_weight": 0.001,
    }
    assert read.name == "grpo+kl_to_reference+entropy_bonus"
    assert "clipped.py:" in read.where
    assert not read.faults


def test_knobs_can_be_set_before_and_after_combining():
    before = losses.with_kl(partial(losses.grpo, clip_high=0.3), beta=0.1)
    after = partial(losses.with_kl(losses.grpo), clip_high=0.3, kl_beta=0.1)
    assert read_loss(before, "trainer").knobs == read_loss(after, "trainer").knobs
    known = oracle.flat(oracle.draw(0))
    given = {
        name: known[name] for name in ("new_logprobs", "logprobs", "advantage", "ref_logprobs")
    }
    assert torch.equal(before(**given), after(**given))
    assert not torch.equal(before(**given), losses.with_kl(losses.grpo)(**given))
    shown = tiny_trainer(loss=before).knobs()["loss"]
    assert shown == "grpo+kl_to_reference(clip_high=0.3, kl_beta=0.1)"


def test_a_weight_of_zero_leaves_the_loss_as_it_was():
    known = oracle.flat(oracle.draw(0))
    given = {name: known[name] for name in ("new_logprobs", "logprobs", "advantage")}
    found = losses.with_entropy(losses.with_kl(losses.aipo, beta=0.0), weight=0.0)(
        **given, ref_logprobs=known["ref_logprobs"], entropy=known["entropy"]
    )
    assert torch.equal(found, losses.aipo(**given))


def test_a_knob_that_both_parts_have_is_refused():
    with pytest.raises(GraphError, match="both have 'kl_beta'.*rename"):
        losses.with_kl(losses.with_kl(losses.grpo))
    with pytest.raises(GraphError, match="both have 'advantage'"):
        losses.plus(losses.aipo, partial(losses.rloo, advantage=1.0))


def test_a_misspelt_knob_of_a_combined_loss_is_found_by_the_trainer():
    (fault,) = read_loss(partial(losses.with_kl(losses.grpo), kl_bta=0.1), "trainer").faults
    assert "kl_bta" in fault
    assert "did you mean 'kl_beta'?" in fault


def test_a_parameter_that_names_no_column_is_still_found():
    def spread(new_logprobs, *rest, **more):
        return new_logprobs

    faults = " ".join(read_loss(losses.with_entropy(spread), "trainer").faults)
    assert "'*rest'" in faults
    assert "'**more'" in faults


def test_a_critics_loss_with_a_term_of_the_policy_has_the_wrong_head():
    faults = " ".join(tiny_trainer(loss=losses.with_kl(losses.value_loss)).faults())
    assert "reads 'new_values'" in faults


def test_with_one_update_truncated_importance_sampling_has_aipos_gradient():
    known = oracle.flat(oracle.draw(4))
    given = {name: known[name] for name in ("new_logprobs", "logprobs", "advantage")}
    for loss in (losses.truncated_is, losses.decoupled_ppo):
        updated = partial(losses.one_update(loss), cap=1.5)
        assert "proximal_logprobs" not in read_loss(updated, "trainer").columns
        found, wanted = (
            torch.autograd.grad(each.sum(), known["new_logprobs"])[0]
            for each in (updated(**given), losses.aipo(**given, rho=1.5))
        )
        assert torch.allclose(found, wanted, rtol=1e-12)


def test_one_update_of_a_loss_without_a_proximal_policy_is_refused():
    with pytest.raises(GraphError, match="'aipo' reads .* and no 'proximal_logprobs'"):
        losses.one_update(losses.aipo)


def test_a_users_own_term_is_added_like_any_other():
    def shorter(new_logprobs, rollout_index, price=0.1):
        return price * torch.ones_like(new_logprobs)

    known = oracle.flat(oracle.draw(0))
    loss = losses.plus(partial(losses.gspo, clip_high=0.5), shorter)
    read = read_loss(loss, "trainer")
    given = {name: known[name] for name in read.columns + read.computed}
    assert torch.allclose(loss(**given), losses.gspo(**given, clip_high=0.5) + 0.1)
    assert read.computed == ("new_logprobs", "rollout_index")
