"""The curves of a run that matter first, from what its folder says, and its knobs as short text."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.draw.charts import Chart, Line
from dataflow.runs.tables import series
from dataflow.runs.texts import visible

_MODEL = re.compile(r"Model\(.*?\bname='([^']+)'")
_LONGEST = 300
"""Characters of a name."""


@dataclass(frozen=True)
class Figure:
    """A figure of metrics.jsonl that is drawn."""

    name: str
    title: str
    from_zero: bool = False


FIGURES = (
    Figure("reward_mean", "reward, mean of a step"),
    Figure("eval_accuracy", "accuracy on held-out prompts", True),
    Figure("loss", "loss"),
    Figure("kl", "KL(generator, trainer), nats per token"),
    Figure("entropy", "entropy, nats per token"),
    Figure("grad_norm", "norm of the gradient", True),
    Figure("completion_tokens_mean", "tokens of a completion, mean", True),
    Figure("staleness_mean", "staleness, versions, mean", True),
    Figure("truncated_share", "share of tokens out of the loss's bounds", True),
    Figure("ess", "effective share of tokens (ess)", True),
    Figure("trained_tokens_per_s", "tokens trained per second", True),
    Figure("generated_tokens_per_s", "tokens generated per second", True),
    Figure("efficiency", "time at work of what bounds the run", True),
    Figure("seconds_step", "seconds of a step", True),
    Figure("signal_share", "groups whose rewards differ", True),
    Figure("staleness_max", "staleness, versions, most", True),
    Figure("staleness_generating_mean", "versions made while a rollout was generated, mean", True),
    Figure("staleness_waiting_mean", "versions made while it waited for its step, mean", True),
    Figure(
        "weights_trainer_seconds", "seconds of an exchange of weights, as the trainer sees it", True
    ),
    Figure("weights_reader_seconds", "the same, as the reader sees it", True),
    Figure("weights_moved_bytes", "bytes of an exchange of weights", True),
)
"""Those that matter first, in their order."""
DOZEN = 12
"""So many of those that a run has are shown without a question."""


def charts_of(
    lines: Mapping[str, Sequence[Mapping[str, Any]]], marks: Sequence[tuple[float, str]] = ()
) -> list[Chart]:
    """A chart for each of the dozen figures that matter first, of those that some run has.

    lines: of metrics.jsonl, by run.
    """
    charts = []
    for figure in FIGURES:
        drawn = [
            Line(name, series(its, figure.name), stream)
            for stream, (name, its) in enumerate(lines.items())
        ]
        if any(line.points for line in drawn):
            dots = figure.name == "eval_accuracy"
            charts.append(Chart(figure.title, drawn, figure.from_zero, dots=dots, marks=marks))
    return charts[:DOZEN]


def knob_text(value: object) -> str:
    """A knob as short as it can be: of a model its name."""
    text = str(value)
    model = _MODEL.match(text)
    if model is not None:
        text = f"{model[1]}, frozen" if "is_frozen=True" in text else model[1]
    return visible(text, _LONGEST)
