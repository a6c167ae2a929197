"""Narrow weights: the a generator's in bfloat16, or its linear layers in int8 or fp8, filled from
every version.
"""

from operators.engine.precision.intake import Intake, Sliced, cast, fault, linear_weights, quantise
from operators.engine.precision.linear import FORMATS, Weights, unrounded

__all__ = [
    "FORMATS",
    "Intake",
    "Sliced",
    "Weights",
    "cast",
    "fault",
    "linear_weights",
    "quantise",
    "unrounded",
]
