"""Reward functions written for other systems as scorers, unchanged: an adapter for each form of
call.
"""

from operators.rewards.foreign.forms import (
    from_areal,
    from_openrlhf,
    from_slime,
    from_trl,
    from_verl,
)
from operators.rewards.foreign.verifiers_form import from_verifiers

__all__ = ["from_areal", "from_openrlhf", "from_slime", "from_trl", "from_verifiers", "from_verl"]
