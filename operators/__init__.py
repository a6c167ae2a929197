"""Operators that know reinforcement learning: declarations here, torch only where a worker builds them."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from operators.evaluate import Evaluate
    from operators.generator import Generator
    from operators.prompts import Prompts
    from operators.trainer import Trainer

__all__ = ["Evaluate", "Generator", "Prompts", "Trainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'operators' has no attribute '{name}'; it has {__all__}")
    return getattr(importlib.import_module(f"operators.{name.lower()}"), name)
