"""What the scheduler says to which nodes, and when: decisions as a state machine without sockets or
clocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dataflow.planning.plan import Plan
from dataflow.structure import Structure, leading, sources_of
from dataflow.worker.messages import NodeCommand

_KEPT = ("step", "done", "asked_checkpoint")
"""What a trainer has reported once stays true when it is started again."""


@dataclass
class _Evaluation:
    """One Evaluate sink and where its rounds stand."""

    every_steps: int
    sources: tuple[str, ...]
    asked_step: int | None = None
    """Step of the last round that was requested."""
    finished: int | None = None
    """Step of the last round that is complete."""

    @property
    def open(self) -> bool:
        return self.asked_step is not None and self.asked_step != self.finished


@dataclass
class RunStateMachine:
    """Evaluates before the first step, every so many steps and after the last, and knows when the
    run is over.

    consumes: what nodes report of themselves (`hear`), end of streams (`ended`), the user's wish to
        stop (`drain`)
    produces: commands for nodes
    waits for: the first evaluation before training starts; the trainers; the last evaluation
    unblocked by: the reports
    """

    graph: Structure
    plan: Plan
    phase: str = "starting"
    """starting | first_evaluation | training | last_evaluation | over"""
    draining: bool = False
    _trainers: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _leading: list[str] = field(default_factory=list)
    _evaluations: dict[str, _Evaluation] = field(default_factory=dict)
    _open_sinks: set[str] = field(default_factory=set)
    checkpoint: int = 0
    """Number of the last requested checkpoint; 0: none was."""
    _dropped: dict[str, int] = field(default_factory=dict)
    """By source: the most that one of its trainers has dropped, as it was told."""

    def __post_init__(self) -> None:
        self._leading = leading(self.graph)
        for name, operator in self.graph.operators.items():
            if operator.trains:
                self._trainers[name] = {}
            every = operator.traits.every_steps
            if operator.kind == "sink" and every:
                self._evaluations[name] = _Evaluation(every, tuple(sources_of(self.graph, name)))
            elif operator.kind == "sink":
                self._open_sinks.add(name)

    @property
    def step(self) -> int:
        """Steps that every trainer which feeds a generator has made."""
        return min((int(self._trainers[name].get("step", 0)) for name in self._leading), default=0)

    @property
    def progress(self) -> int:
        """How far the run has come: grows with each step and with each round of evaluation, and
        never shrinks.
        """
        rounds = (evaluation.finished for evaluation in self._evaluations.values())
        return self.step + sum(finished + 1 for finished in rounds if finished is not None)

    @property
    def over(self) -> bool:
        """Whether the run is complete."""
        return self.phase == "over"

    def without_checkpoint(self, number: int) -> list[str]:
        """Trainers that have not written the checkpoint with this number."""
        return [
            name
            for name, status in self._trainers.items()
            if int(status.get("asked_checkpoint", 0)) < number
        ]

    def checkpoints(self) -> dict[str, int]:
        """By trainer, the step of the last requested checkpoint."""
        return {name: int(status.get("asked_step", 0)) for name, status in self._trainers.items()}

    def wish_checkpoint(self, number: int) -> list[NodeCommand]:
        """Somebody wants a checkpoint of each trainer after the step under way."""
        self.checkpoint = max(self.checkpoint, number)
        return [
            command
            for name in self.without_checkpoint(number)
            for command in self._checkpoint(name)
        ]

    def _checkpoint(self, trainer: str) -> list[NodeCommand]:
        return [NodeCommand(trainer, {"checkpoint": self.checkpoint})]

    def is_done(self, trainer: str) -> bool:
        """Whether a trainer has made its last step, with its checkpoint."""
        return bool(self._trainers[trainer].get("done"))

    def to_plain(self) -> dict[str, Any]:
        """All it knows, for the next scheduler; `take_up` reads it."""
        return {
            "phase": self.phase,
            "draining": self.draining,
            "dropped": dict(self._dropped),
            "checkpoint": self.checkpoint,
            "trainers": {
                name: {key: status.get(key, 0) for key in _KEPT}
                for name, status in self._trainers.items()
            },
            "evaluations": {
                name: [evaluation.asked_step, evaluation.finished]
                for name, evaluation in self._evaluations.items()
            },
            "open_sinks": sorted(self._open_sinks),
        }

    def take_up(self, plain: Mapping[str, Any]) -> None:
        """Continue from what `to_plain` gave."""
        self.phase, self.draining, self._dropped = (
            plain["phase"],
            plain["draining"],
            dict(plain["dropped"]),
        )
        self.checkpoint = plain["checkpoint"]
        self._trainers = dict(plain["trainers"])
        for name, (asked_step, finished) in plain["evaluations"].items():
            self._evaluations[name].asked_step, self._evaluations[name].finished = (
                asked_step,
                finished,
            )
        self._open_sinks = set(plain["open_sinks"])

    def go_on(self, steps: Mapping[str, int], rounds: Mapping[str, int]) -> None:
        """Before `start`: a run goes on whose trainers have made these steps, and evaluations these
        last rounds.
        """
        for trainer, step in steps.items():
            self._trainers[trainer] = {"step": step}
        for name, step in rounds.items():
            self._evaluations[name].asked_step = self._evaluations[name].finished = step

    def start(self) -> list[NodeCommand]:
        """The first commands, once all workers are ready; evaluations that have had a round have no
        first one.
        """
        if self.over:
            return []
        self.phase = "first_evaluation"
        commands = [
            NodeCommand(source, {"pause": bool(self._evaluations)})
            for source in self._training_sources()
        ]
        # A trainer that goes on may have said this before its source could hear it.
        commands += [
            NodeCommand(source, {"dropped": dropped}) for source, dropped in self._dropped.items()
        ]
        for evaluation in self._evaluations.values():
            if evaluation.asked_step is None:
                evaluation.asked_step = self.step
                commands += [
                    NodeCommand(source, {"evaluate": self.step}) for source in evaluation.sources
                ]
        return commands + self._advance()

    def hear(self, node: str, status: Mapping[str, Any]) -> list[NodeCommand]:
        """Take in what a node says of itself; one that was started again may be behind where it
        was.
        """
        commands: list[NodeCommand] = []
        if node in self._trainers:
            counts = self._trainers[node]
            furthest = {key: max(int(counts.get(key, 0)), int(status.get(key, 0))) for key in _KEPT}
            self._trainers[node] = {**status, **furthest}
            dropped = int(status.get("dropped", 0))
            for source in sources_of(self.graph, node):
                if dropped > self._dropped.get(source, 0):
                    self._dropped[source] = dropped
                    commands.append(NodeCommand(source, {"dropped": dropped}))
        elif node in self._evaluations and "round" in status:
            evaluation = self._evaluations[node]
            evaluation.finished = max(
                int(status["round"]), -1 if evaluation.finished is None else evaluation.finished
            )
        return commands + self._advance()

    def ended(self, node: str) -> list[NodeCommand]:
        """A node's inputs have ended and it has nothing more to do."""
        self._open_sinks.discard(node)
        return self._advance()

    def commands_for(self, node: str, *, again: bool = True) -> list[NodeCommand]:
        """What a node that was started again has to hear before it begins: as if it had heard all
        commands so far.

        again: it does not know what it had done in an open round. False: it goes on, and may have
        missed a command.
        """
        if self.phase == "starting":
            return []
        commands: list[NodeCommand] = []
        if node in self._training_sources() and self._evaluations:
            commands.append(NodeCommand(node, {"pause": self.phase == "first_evaluation"}))
        if node in self._dropped:
            commands.append(NodeCommand(node, {"dropped": self._dropped[node]}))
        for evaluation in self._evaluations.values():
            if evaluation.open and evaluation.asked_step is not None and node in evaluation.sources:
                evaluate: dict[str, bool | int] = {"evaluate": evaluation.asked_step}
                commands.append(NodeCommand(node, evaluate | ({"again": True} if again else {})))
        if node in self.without_checkpoint(self.checkpoint):
            commands += self._checkpoint(node)
        if self.draining and node in self._who_drains():
            commands.append(NodeCommand(node, {"drain": True}))
        return commands

    def drain(self) -> list[NodeCommand]:
        """The user wants to stop: finish the step under way, write a checkpoint, end."""
        self.draining = True
        if not self._trainers or self.phase == "starting":
            self.phase = "over"
        return [NodeCommand(name, {"drain": True}) for name in self._who_drains()] + self._advance()

    def _who_drains(self) -> list[str]:
        """Sources and trainers, and those that a trainer takes turns with: it needs one more for
        its checkpoint.
        """
        in_turn = [
            node for group in self.plan.turns for node in group if node not in self._trainers
        ]
        return [*self._training_sources(), *self._trainers, *in_turn]

    def _training_sources(self) -> list[str]:
        return [
            n
            for n, op in self.graph.operators.items()
            if op.kind == "source" and n not in self.plan.on_demand
        ]

    def _ask(self, step: int) -> list[NodeCommand]:
        commands = []
        for evaluation in self._evaluations.values():
            if not evaluation.open and evaluation.asked_step != step:
                evaluation.asked_step = step
                commands += [
                    NodeCommand(source, {"evaluate": step}) for source in evaluation.sources
                ]
        return commands

    def _advance(self) -> list[NodeCommand]:
        """Advance as far as the reports allow."""
        commands: list[NodeCommand] = []
        if self.phase == "first_evaluation" and (self.draining or not self._waiting()):
            self.phase = "training"
            commands += [
                NodeCommand(source, {"pause": False})
                for source in self._training_sources()
                if self._evaluations
            ]
        if self.phase == "training":
            if self._finished_training():
                self.phase = "last_evaluation"
                if not self.draining:
                    commands += self._ask(self.step)
            else:
                commands += self._due()
        if self.phase == "last_evaluation":
            if not self.draining and not self._waiting():
                commands += self._ask(self.step)
            if self.draining or not self._waiting():
                self.phase = "over"
        return commands

    def _waiting(self) -> bool:
        return any(evaluation.open for evaluation in self._evaluations.values())

    def _finished_training(self) -> bool:
        if self._trainers:
            return all(self.is_done(trainer) for trainer in self._trainers)
        return not self._open_sinks

    def _due(self) -> list[NodeCommand]:
        """Rounds whose step has come; one that is still running is not asked for again."""
        commands = []
        for evaluation in self._evaluations.values():
            due = self.step - self.step % evaluation.every_steps
            if not evaluation.open and due > (evaluation.asked_step or 0):
                evaluation.asked_step = due
                commands += [
                    NodeCommand(source, {"evaluate": due}) for source in evaluation.sources
                ]
        return commands
