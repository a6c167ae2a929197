"""What the display shows, as plain values; None or NaN: not known yet."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class NodeSnapshot:
    """One operator, all its replicas together."""

    name: str
    replicas: int = 1
    """How many of it are at work."""
    state: str = ""
    """A word: starting, running, waiting, draining, done, dead, ..."""
    rate: float | None = None
    """Rows per second."""
    queue: int | None = None
    """Rows that wait inside it."""
    busy: float | None = None
    """Share of the last seconds spent at work, 0 to 1."""
    waiting: float | None = None
    """Share spent without input, or without its turn."""
    starved: float | None = None
    """Share in which it had input, and only newer weights would have let it begin."""
    blocked: float | None = None
    """Share spent waiting for room further on (back-pressure)."""
    note: str = ""
    """A few words, such as `v39` or `12 slots`."""


@dataclass(frozen=True, kw_only=True)
class EdgeSnapshot:
    """One data edge."""

    producer: str
    consumer: str
    source: str = ""
    """The source, where two edges join the same nodes."""
    depth: float | None = None
    """Rows on their way."""
    capacity: float | None = None
    """Most rows that may be on their way."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The run at one moment."""

    graph: str = ""
    """Name of the graph."""
    step: int | None = None
    """Steps done."""
    steps: int | None = None
    """Steps to do; None: until the prompts end."""
    doing: str = ""
    """What goes on beside the steps, in a few words: `starting trainer`, `first evaluation`; empty:
    steps are made."""
    version: int | None = None
    """Version that the generator uses."""
    staleness_mean: float | None = None
    """Mean staleness of the last step, in versions."""
    staleness_max: float | None = None
    """Largest staleness of the last step, in versions."""
    staleness_bound: int | None = None
    """max_staleness of the graph."""
    reward: float | None = None
    """Mean of the last step."""
    accuracy: float | None = None
    """eval_accuracy of the last round."""
    accuracy_before: float | None = None
    """eval_accuracy before the first step."""
    tokens_per_s: float | None = None
    """Generated tokens per second, of rollouts that have not ended too."""
    rollouts_per_s: float | None = None
    """Rollouts a second that reach the trainer."""
    rollouts_active: int | None = None
    """Rollouts that are being generated now."""
    elapsed_s: float | None = None
    left_s: float | None = None
    """Estimated seconds to the end."""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Prompt groups by ledger state."""
    warnings: tuple[str, ...] = ()
    """The last warnings, newest last."""
    look: str = ""
    """The command that shows more of it."""
    nodes: tuple[NodeSnapshot, ...] = ()
    edges: tuple[EdgeSnapshot, ...] = ()

    @property
    def only_begun(self) -> bool:
        """Whether rollouts are being generated, and none has reached the trainer lately: their rate
        is unknown.
        """
        return bool(self.rollouts_active) and not self.rollouts_per_s


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The run at its end."""

    graph: str = ""
    outcome: str = "finished"
    """finished, stopped, failed."""
    steps: int | None = None
    wall_s: float | None = None
    rollouts: int | None = None
    """Rollouts that were trained on."""
    dropped: int | None = None
    """Groups dropped."""
    failed: str = ""
    """Rollouts that failed, by node and cause."""
    does_not_apply: str = ""
    """Rollouts that a scorer does not apply to, by scorer."""
    reward_before: float | None = None
    """Mean over the first `reward_steps`."""
    reward_after: float | None = None
    """Mean over the last ones."""
    reward_steps: int = 0
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    efficiency: float | None = None
    """Share of the time in which the run's bottleneck was at work."""
    bounded_by: str = ""
    """The bottleneck."""
    staleness_mean: float | None = None
    staleness_max: float | None = None
    foreseen: tuple[str, ...] = ()
    """The forecast beside the measurements; empty: there was none."""
    restarts: int | None = None
    """How often a worker was started again."""
    faults: tuple[str, ...] = ()
    """What failed, how the run went on, and what was repeated."""
    changes: tuple[tuple[str, str], ...] = ()
    """What was changed on the way, in order: swapped or set, and to what."""
    hosts: str = ""
    """Which node was planned where, in a run over hosts."""
    signal: str = ""
    """Scorers that told no rollout from its siblings, where the whole run could learn nothing."""
    verdict: str = ""
    """The ledger's verdict, one line."""
    is_clean: bool | None = None
    """Whether the verdict is good."""
    models: tuple[str, ...] = ()
    """Paths of the models that were trained, as they are now."""
    folder: str = ""
    """Path of the run folder."""
    folder_bytes: int | None = None
    """Its size."""
    not_kept: str = ""
    """The part of it that was not kept, in a few words."""
    commands: tuple[tuple[str, str], ...] = ()
    """Commands that look further, each with what it shows."""
