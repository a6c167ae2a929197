"""Operators that know reinforcement learning: declarations here, torch only where a worker builds
them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from operators.agents.declaration import Endpoint, agent
    from operators.demonstrations import Demonstrations
    from operators.episodes.declaration import episode, tool_use
    from operators.evaluate import Evaluate
    from operators.forward import Logprobs, RewardModel, Values
    from operators.generator import Generator
    from operators.prompts import Prompts
    from operators.trainer import Trainer

__all__ = [
    "Demonstrations",
    "Endpoint",
    "Evaluate",
    "Generator",
    "Logprobs",
    "Prompts",
    "RewardModel",
    "Trainer",
    "Values",
    "agent",
    "episode",
    "tool_use",
]

_MODULES = {
    "Endpoint": "agents.declaration",
    "Logprobs": "forward",
    "RewardModel": "forward",
    "Values": "forward",
    "agent": "agents.declaration",
    "episode": "episodes.declaration",
    "tool_use": "episodes.declaration",
}
"""Where a name stands, unless in a module of its own."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'operators' has no attribute '{name}'; it has {__all__}")
    return getattr(importlib.import_module(f"operators.{_MODULES.get(name, name.lower())}"), name)
