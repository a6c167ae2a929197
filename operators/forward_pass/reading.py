"""How a forward operator asks a module that is loaded already; imports torch."""

from __future__ import annotations

from typing import Any

import torch

from dataflow.model import Model
from operators.forward_pass.knobs import ForwardKnobs, LogprobsKnobs, RewardKnobs
from operators.forward_pass.own_text import OwnText
from operators.forward_pass.own_tokens import OwnTokens
from operators.forward_pass.query import Reading
from operators.models.borders import longest
from operators.models.errors import ModelError
from operators.models.loading import load_tokenizer
from operators.training.cpu.direct_gradients import DirectGradients
from operators.training.cpu.products import multiplies_bfloat16
from operators.training.learner.critic import Critic
from operators.training.learner.learner import Forward
from operators.training.learner.policy import Policy


def reading_of(
    declaration: ForwardKnobs, node: str, module: Any, *, is_alone: bool = False
) -> Reading:
    """How a declared operator asks a module that is loaded already; is_alone: and is not shared
    out."""
    config = module.config.get_text_config()
    most = longest(declaration.model, config)
    if isinstance(declaration, RewardKnobs):
        if config.pad_token_id is None:
            # classifiers of sequences refuse several rows without one; nothing is padded here
            config.pad_token_id = 0
        judge, policy = declaration.model, declaration.policy or declaration.model
        tokenizer = load_tokenizer(judge)
        return OwnText(
            declaration,
            forward_of(declaration, module, is_alone),
            node=node,
            tokenizer=tokenizer,
            policy_tokenizer=tokenizer if policy == judge else load_tokenizer(policy),
            context_tokens=most,
        )
    return OwnTokens(
        forward_of(declaration, module, is_alone),
        node=node,
        model=declaration.model.name,
        tokenizer=_tokenizer(declaration.model),
        context_tokens=most,
    )


def forward_of(declaration: ForwardKnobs, module: Any, is_alone: bool) -> Forward:
    """The module as a trainer of the same model would see it: where weights agree, so do the
    numbers.

    A trainer keeps float32 weights and multiplies in the model's type under autocast, so that what
    the layers add up stays in float32. Here the weights themselves are in the model's type; with
    embeddings turned to float32 the rest is the same.
    """
    compute = None
    if declaration.model.dtype != "float32":
        compute = getattr(torch, declaration.model.dtype)
        module.get_input_embeddings().register_forward_hook(lambda layer, given, made: made.float())
    if isinstance(declaration, LogprobsKnobs):
        forward: Policy | Critic = Policy(
            module, temperature=declaration.temperature, compute=compute
        )
    else:
        forward = Critic(module, compute=compute)
    on_cpu = next(module.parameters()).device.type == "cpu"
    if is_alone and on_cpu and compute == torch.bfloat16 and multiplies_bfloat16():
        forward.direct = DirectGradients(module, is_rounded=True)
    return forward


def _tokenizer(model: Model) -> Any | None:
    """Only to see whether it is the policy's: a folder without one is taken at its word."""
    try:
        return load_tokenizer(model)
    except ModelError:
        return None
