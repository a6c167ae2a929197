"""Reward functions written for other systems as scorers, unchanged: an adapter for each form of
call.
"""

from operators.rewards.foreign.areal_form import from_areal
from operators.rewards.foreign.openrlhf_form import from_openrlhf
from operators.rewards.foreign.slime_form import from_slime
from operators.rewards.foreign.trl_form import from_trl
from operators.rewards.foreign.verifiers_form import from_verifiers
from operators.rewards.foreign.verl_form import from_verl

__all__ = ["from_areal", "from_openrlhf", "from_slime", "from_trl", "from_verifiers", "from_verl"]
