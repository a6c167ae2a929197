"""A file of flags, YAML or TOML: `lr: 1e-6`. Values are read as the words of a command line are, so
that YAML's own reading of `1e-6` (a text), `no` (false) and `010` (eight) never comes between.
"""

import re
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.flags.declared import Flag
from dataflow.flags.words import FlagError, Words, expected, unknown

FILE = "config.yaml"
"""In a run's folder: all flags of the run."""
PROGRAM = "graph"
"""Key of the program that a file is for: a module, or a path to a file of Python."""
NOT_KEPT = ("config", "resume", "explain", "draw", "foresee", "prices")
"""Flags that do not shape a run."""
_NOTHING = ("", "~", "null", "Null", "NULL", "None", "none")


def read(path: Path, flags: Mapping[str, Flag], program: str, called: str) -> dict[str, Words]:
    """What a file gives for which flags. program: as a file of flags names it; empty: whatever it
    names. called: what errors call the program.

    Errors: FlagError with file, line and key: for one that is no flag, for a value that is none of
    its kind, for a file that is for another program.
    """
    words_of: dict[str, Words] = {}
    for key, place, value in keys_of(path):
        name = key.replace("-", "_")
        if name == PROGRAM and name not in flags:
            _check_program(path, value, program)
            continue
        if name not in flags or name in NOT_KEPT:
            problem = f"{place}: {unknown(key, flags, called, f'flag {key!r}')}"
            if name in NOT_KEPT:
                problem = (
                    f"{place}: '{key}' is no part of what a file of flags says; give it on the"
                    " command line"
                )
            raise FlagError(problem)
        if name in words_of:
            raise FlagError(f"{place}: {name} stands there twice; leave one of them out")
        words_of[name] = _words(flags[name], value, place)
        words_of[name].value()
    return words_of


def program_of(path: Path) -> str:
    """The program that a file is for. Errors: FlagError where it does not say."""
    for key, _, value in keys_of(path):
        if key == PROGRAM and isinstance(value, str) and value:
            return value
    raise FlagError(
        f"{path} does not say which program its flags are for; begin it with a line as {PROGRAM}:"
        f" graphs.aipo, or give it to a program: python -m graphs.aipo --config {path}"
    )


Value = str | None | Sequence[str]


def keys_of(path: Path) -> list[tuple[str, str, Value]]:
    """Key, place (for people) and value as words, of each line. Errors: FlagError for a file that
    cannot be read.
    """
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise FlagError(f"there is no file {path}; give a YAML or TOML file of flags") from None
    except (OSError, ValueError) as error:
        raise FlagError(f"{path} cannot be read as a file of flags: {error}") from None
    return _of_toml(path, text) if path.suffix == ".toml" else _of_yaml(path, text)


def _of_toml(path: Path, text: str) -> list[tuple[str, str, Value]]:
    try:
        table = tomllib.loads(text, parse_float=str)
    except tomllib.TOMLDecodeError as error:
        raise FlagError(f"{path} is no TOML: {error}") from None
    return [(key, str(path), _plain(value, key, str(path))) for key, value in table.items()]


def _plain(value: Any, key: str, place: str) -> Value:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int):
        return str(value)
    if isinstance(value, list):
        items = [_plain(part, key, place) for part in value]
        if all(isinstance(item, str) for item in items):
            return [str(item) for item in items]
    raise FlagError(_nested(key, place))


def _of_yaml(path: Path, text: str) -> list[tuple[str, str, Value]]:
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where is not None else ""
        raise FlagError(
            f"{path}{line} is no YAML: {getattr(error, 'problem', None) or error}"
        ) from None
    except RecursionError:
        raise FlagError(
            f"{path} is nested too deeply; a file of flags is one level of keys"
        ) from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise FlagError(
            f"{path} is no list of keys and values; write a flag on each line, as lr: 1e-6"
        )
    triples: list[tuple[str, str, Value]] = []
    for key, value in root.value:
        place = f"{path}, line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise FlagError(
                f"{place}: a key is the name of a flag, as lr; found a list or keys in its place"
            )
        triples.append((key.value, place, _of_node(value, key.value, place)))
    return triples


def _of_node(node: Any, key: str, place: str) -> Value:
    import yaml

    if not node.tag.startswith("tag:yaml.org,2002:") or "python" in node.tag:
        raise FlagError(f"{place}: {key} has the tag {node.tag}; give a plain value")
    if isinstance(node, yaml.ScalarNode):
        return None if node.style is None and node.value in _NOTHING else str(node.value)
    items = (
        [_of_node(child, key, place) for child in node.value]
        if isinstance(node, yaml.SequenceNode)
        else [None]
    )
    if not all(isinstance(item, str) for item in items):
        raise FlagError(_nested(key, place))
    return [str(item) for item in items]


def _nested(key: str, place: str) -> str:
    return (
        f"{place}: {key} has keys or lists of its own, or empty items, but a flag has a value or a"
        " list of values"
    )


def _words(flag: Flag, value: Value, place: str) -> Words:
    """The value as words for this flag."""
    words = Words(flag, place=place)
    if value is None:
        if flag.may_be_none:
            words.words.append("None")
        elif flag.kind is str:
            words.words.append("")
        else:
            raise FlagError(f"{place}: {flag.name} has no value, but takes {expected(flag)}")
    elif isinstance(value, str):
        words.words.append(value)
    elif flag.takes_many or flag.repeats:
        words.words += value
    else:
        raise FlagError(
            f"{place}: {flag.name} is a list, {list(value)!r:.60}, but takes {expected(flag)}"
        )
    return words


def _check_program(path: Path, value: Value, program: str) -> None:
    if program and value not in (program, Path(program).name):
        raise FlagError(
            f"{path} has flags of {value}, and this is {program}; start it with dataflow run"
            f" {path}, or take the line '{PROGRAM}' out to use what both have"
        )


def written(
    flags: Iterable[Flag],
    values: Mapping[str, Any],
    words: Mapping[str, Words],
    program: str,
    folder: str,
) -> str:
    """The text of a file that gives these values again: as they were typed, or else the
    defaults.
    """
    flags = tuple(flags)
    lines = [
        f"# All flags of the run in this folder, which was started in {folder}. The same again:"
        f" dataflow run {FILE}"
    ]
    if program and PROGRAM not in {flag.name for flag in flags}:
        lines.append(f"{PROGRAM}: {_scalar(program, str)}")
    heading = ""
    for flag in flags:
        if flag.name in NOT_KEPT:
            continue
        if flag.heading != heading:
            heading = flag.heading
            lines += ["", f"# {heading}"]
        lines.append(f"{flag.name}: {_shown(flag, values[flag.name], words.get(flag.name))}")
    return "\n".join(lines) + "\n"


def _shown(flag: Flag, value: Any, typed: Words | None) -> str:
    if value is None:
        return "null"
    if flag.is_switch:
        return str(value).lower()
    words = [str(part) for part in value] if isinstance(value, tuple | list | set) else [str(value)]
    if typed is not None and typed.words:
        words = typed.words
    inside = {
        kind
        for kind_or_union in flag.kinds
        for kind in (kind_or_union, *typing.get_args(kind_or_union))
        if isinstance(kind, type)
    }
    kind = float if inside & {int, float} and str not in inside else str
    if flag.takes_many or flag.repeats:
        return f"[{', '.join(_scalar(word, kind) for word in words)}]"
    return _scalar(words[0], kind)


def _scalar(text: str, kind: type) -> str:
    """As YAML has it on one line: numbers as they were typed, texts in quotes where they need
    some.
    """
    import yaml

    if kind is float and re.fullmatch(r"[-+.\w]+", text):
        return text
    shown = yaml.safe_dump(text, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return str(shown.removesuffix("\n").removesuffix("\n..."))
