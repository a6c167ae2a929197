"""Data sets on the hub as sources of rows: what an id names, whether it can be had, and its
rows.
"""

import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from dataflow.errors import RecordError
from dataflow.model_files import hub_refusal

PREFIX = "hf:"
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_NAMED = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(/(?P<config>[\w.-]+))?(:(?P<split>[\w.-]+))?")
_USUAL = ("default", "main")
"""Configurations that are taken of several, where none is named."""
_CARD = "README.md"


@dataclass(frozen=True)
class HubData:
    """A data set on the hub, and which part of it."""

    name: str
    config: str | None
    split: str | None
    chooses: bool
    """Where no configuration or split is named: the usual one of several, and train."""

    @classmethod
    def named(
        cls, source: str, config: str | None = None, split: str | None = None
    ) -> "HubData | None":
        """What `hf:NAME[/CONFIG][:SPLIT]`, or an id alone, names; None for a text that is neither.

        >>> HubData.named("hf:openai/gsm8k/main:test")
        HubData(name='openai/gsm8k', config='main', split='test', chooses=True)
        >>> HubData.named("hf:openai") is None, HubData.named("hf:a/b/c/d") is None
        (False, True)
        >>> HubData.named("what is 2+2?")
        """
        if source.startswith(PREFIX):
            match = _NAMED.fullmatch(source, len(PREFIX))
            return match and cls(
                match["name"], config or match["config"], split or match["split"], True
            )
        return cls(source, config, split, False) if _ID.fullmatch(source) else None

    @property
    def fault(self) -> str | None:
        """Why a run cannot start with it, in three parts: the library that reads it is not here, or
        it cannot be had.
        """
        if importlib.util.find_spec("datasets") is None:
            return _no_library(self.name)
        if (why := hub_refusal(self.name, (_CARD,), kind="dataset")) is None:
            return None
        return (
            f"'{self.name}' is no file or folder here, and the hub gives no data set of that id"
            f" ({why}); check the id and the connection, or give the path of a file"
        )

    def rows(self) -> Iterable[Any]:
        """Its rows. RecordError where it cannot be had, or has several parts and none is chosen."""
        try:
            import datasets  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise RecordError(_no_library(self.name)) from error
        try:
            chosen = (
                self._configured(datasets.get_dataset_config_names(self.name))
                if self.chooses
                else self
            )
            dataset = datasets.load_dataset(chosen.name, chosen.config)
        except RecordError:
            raise
        except Exception as error:
            raise RecordError(
                f"'{self.name}' is no file or folder here, and the hub did not give it as a data"
                f" set ({type(error).__name__}: {error}); check the id, the configuration"
                f" ({PREFIX}{self.name}/CONFIG), and the connection"
            ) from error
        if isinstance(dataset, Mapping):
            split = self.split or ("train" if self.chooses and "train" in dataset else None)
            return cast(Iterable[Any], dataset[one_split(self.name, list(dataset), split)])
        return cast(Iterable[Any], dataset)

    def _configured(self, names: Sequence[str]) -> "HubData":
        if self.config is not None or not names:
            return self
        usual = (
            names[0] if len(names) == 1 else next((name for name in _USUAL if name in names), None)
        )
        if usual is None:
            raise RecordError(
                f"data set '{self.name}' has the configurations {list(names)[:12]}, and none is"
                f" chosen; choose one as {PREFIX}{self.name}/{names[0]}"
            )
        return replace(self, config=usual)


def one_split(source: str, splits: Sequence[str], split: str | None) -> str:
    """The split that is meant. RecordError where there are several and none, or another, is
    named.
    """
    if split is None and len(splits) == 1:
        return splits[0]
    if split is None or split not in splits:
        raise RecordError(
            f"data set '{source}' has the splits {list(splits)}, and split={split!r} names none of"
            f" them; choose one with Prompts(..., split={splits[0]!r})"
        )
    return split


def _no_library(name: str) -> str:
    return (
        f"'{name}' is no file or folder here, and reading it from the hub needs `datasets`, which"
        " is not installed; "
        f'pip install "dataflow-rl[hub]", or give the path of a file'
    )
