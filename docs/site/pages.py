"""The pages that `make docs` reads: those of the tree, and one for each public module, made from
its docstrings.
"""

import dataclasses
import importlib
import inspect
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dataflow.node import Operator

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "pages"
"""What mkdocs.yml reads."""
FOLDERS = ("", "docs", "graphs", "bench")
"""Where pages lie."""
PUBLIC: Mapping[str, tuple[str, ...]] = {
    "dataflow": (),
    "operators": (),
    "operators.losses": (),
    "operators.credit": (),
    "operators.rewards": (),
    "operators.filters": ("has_signal",),
    "operators.environments": (),
    "operators.tools": (),
    "operators.sandbox": (),
    "operators.warm_start": (),
    "dataflow.trackers": (),
    "dataflow.node": (
        "Operator",
        "Source",
        "Transform",
        "Generate",
        "Learn",
        "Sink",
        "Traits",
        "Split",
        "SamplingTraits",
        "CapacityTraits",
        "TrainingTraits",
        "SourceTraits",
    ),
    "dataflow.runtime": (
        "Runtime",
        "Batch",
        "Context",
        "RunSettings",
        "GraphFacts",
        "DeviceShare",
        "WeightEnds",
    ),
    "dataflow.testing": ("FakePrompts", "FakeGenerator", "FakeTrainer"),
}
"""The modules that users import from, with the names that they find there; empty: those of
`__all__`."""
SHOWN = {"Plan": ["placements", "explain"]}
"""Of classes that have more than users ask for."""


def sources() -> Iterator[Path]:
    """Pages of the tree, their pictures and the site's style."""
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).glob("*.md"))
    for ending in ("svg", "png", "css"):
        yield from sorted((ROOT / "docs").rglob(f"*.{ending}"))


def names_of(module: str) -> tuple[str, ...]:
    """The public names of a module."""
    return PUBLIC[module] or tuple(importlib.import_module(module).__all__)


def api_pages() -> dict[str, str]:
    """The reference by place of each page: headings, and a directive for each public name."""
    return {f"api/{module}.md": "\n".join(_page(module)) for module in PUBLIC}


def _page(module: str) -> Iterator[str]:
    yield f"# {module}\n"
    yield (
        f"::: {module}\n    options: {{members: false, show_root_heading: false,"
        " show_root_toc_entry: false}\n"
    )
    for name in names_of(module):
        found = getattr(importlib.import_module(module), name)
        yield (
            f"::: {_place(module, name, found)}\n    options:\n      heading: {name}\n     "
            f" toc_label: {name}"
        )
        if inspect.isclass(found):
            yield (
                f"      members: {SHOWN.get(name) or _members(found)}\n      inherited_members:"
                " true"
            )
        yield ""


def _place(module: str, name: str, found: Any) -> str:
    """Where it is found: of a function with the name of its module (`dataflow.runner`) where it is
    defined.
    """
    is_module = (ROOT / module.replace(".", "/") / f"{name}.py").exists()
    return f"{found.__module__}.{name}" if is_module else f"{module}.{name}"


def _members(found: type) -> list[str]:
    """What a reader needs: an operator's knobs; of others their fields, and what they can do."""
    fields = (
        [each.name for each in dataclasses.fields(found) if each.init]
        if dataclasses.is_dataclass(found)
        else []
    )
    if issubclass(found, Operator) and found.__module__ != "dataflow.node":
        return [name for name in fields if not name.startswith("_")]
    own = [name for base in found.__mro__[:-1] for name in vars(base) if not name.startswith("_")]
    return list(
        dict.fromkeys(name for name in (*fields, *own) if name not in ("to_plain", "from_plain"))
    )


def main() -> None:
    """Lay pages and pictures out, each where it lies in the tree, with the reference beside
    them.
    """
    shutil.rmtree(OUT, ignore_errors=True)
    texts = {str(path.relative_to(ROOT)): path.read_bytes() for path in sources()}
    texts |= {place: text.encode() for place, text in api_pages().items()}
    for place, text in texts.items():
        (OUT / place).parent.mkdir(parents=True, exist_ok=True)
        (OUT / place).write_bytes(text)


if __name__ == "__main__":
    main()
