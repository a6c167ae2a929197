"""Quantised weights: the generator's linear layers in int8 or fp8, filled anew from every version of the trainer's."""

from operators.engine.precision.formats import FORMATS, Weights
from operators.engine.precision.intake import Intake, Sliced, fault, linear_weights, quantise
from operators.engine.precision.linear import unrounded

__all__ = ["FORMATS", "Intake", "Sliced", "Weights", "fault", "linear_weights", "quantise", "unrounded"]
