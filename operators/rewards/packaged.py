"""Scorers that need a package which is installed by an optional extra: refused where it is
missing.
"""

import importlib.util
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from dataflow.scorer import Scorer

P = ParamSpec("P")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class PackagedScorer(Scorer[P, T_co]):
    """A scorer whose function imports a package when it is called."""

    package: str = field(repr=False)
    """As it is imported."""
    extra: str = field(repr=False)
    """That installs it."""

    def faults(self) -> list[str]:
        """Those of any scorer, and that the package is not there."""
        faults = super().faults()
        if importlib.util.find_spec(self.package) is None:
            faults.append(
                f"'{self.name}' imports '{self.package}', which is not installed; pip install "
                f'"dataflow-rl[{self.extra}]"'
            )
        return faults
