"""What a group is sampled with: the knobs of a generator that may change while the run goes on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from dataflow.folder.knob_changes import KnobChange
from operators.engine.build import sampling_of
from operators.engine.knobs import GeneratorKnobs
from operators.engine.sampling_params import Sampling


@dataclass(frozen=True, kw_only=True)
class SampledWith:
    """All rollouts of a group have the same."""

    sampling: Sampling
    max_tokens: int

    @classmethod
    def of(cls, declaration: GeneratorKnobs) -> SampledWith:
        """Those of a declaration."""
        return cls(sampling=sampling_of(declaration), max_tokens=declaration.max_tokens)

    @classmethod
    def over(cls, declaration: GeneratorKnobs, changes: Iterable[KnobChange]) -> list[SampledWith]:
        """Those that the run has had, newest last. declaration: with the values in force; changes:
        that led there.
        """
        settings = [cls.of(declaration)]
        for change in reversed(list(changes)):
            if change.knob in declaration.settable():
                changed = declaration.with_knob(change.knob, change.was)
                assert isinstance(changed, GeneratorKnobs), "it is the same with another value"
                declaration = changed
                settings.append(cls.of(declaration))
        return settings[::-1]

    def __str__(self) -> str:
        """For a checksum; knobs that are off leave no trace."""
        return repr([*sorted(asdict(self.sampling).items()), self.max_tokens])
