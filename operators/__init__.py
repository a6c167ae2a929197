"""Operators that know reinforcement learning: declarations here, torch only where a worker builds them."""

from operators.evaluate import Evaluate
from operators.generator import Generator
from operators.prompts import Prompts
from operators.trainer import Trainer

__all__ = ["Evaluate", "Generator", "Prompts", "Trainer"]
