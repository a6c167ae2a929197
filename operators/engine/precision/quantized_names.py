"""Which of a model's tensors a quantised generator takes quantised. The trainer asks this without
the weights.
"""

from __future__ import annotations

from typing import Any

import torch

from dataflow.model import Model
from operators.engine.precision.intake import linear_weights
from operators.models.loading import load_configs


def quantized_names(model: Model) -> frozenset[str]:
    """The names that `linear_weights` gives for `model`, from its config alone. ModelError as
    `load_configs`.
    """
    from transformers import AutoModelForCausalLM

    config, _ = load_configs(model)
    with torch.device("meta"):
        build: Any = AutoModelForCausalLM.from_config
        return linear_weights(build(config, trust_remote_code=model.trust_remote_code))
