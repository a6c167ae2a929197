"""Ways to break code, each described by what it is done to: a condition, a statement, an argument,
and the names in it.

A part of a definition is found by the names, attributes, keywords, strings and comparisons that it
mentions, so that it may move and be written in another way; ValueError where none, or more than
one, mentions them all. In what takes a part's place, `_` stands for the part. A word after a `!` is
not to be mentioned.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from .places import Place

Change = Callable[[Place], None]
T = TypeVar("T")
N = TypeVar("N", bound=ast.AST)
_SIGNS = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.AugAssign: "+=",
    ast.And: "and",
    ast.Or: "or",
    ast.Not: "not",
}
_HEADS = ("test", "items", "target", "iter", "subject")
"""Fields of a statement with a block that stand before the block."""
Block = list[ast.stmt]


def condition(becomes: str, *words: str) -> Change:
    """The condition (of an if, while, case, comprehension) that mentions the words becomes another
    one.
    """

    def change(at: Place) -> None:
        found = [
            (parts, put) for parts, put in _conditions(at.definition) if _mentions(words, *parts)
        ]
        (*_, old), put = _only(_innermost(found), words, "conditions")
        put(_expression(becomes, old))

    return change


def never(*words: str) -> Change:
    """The condition that mentions the words does not hold."""
    return condition("False", *words)


def always(*words: str) -> Change:
    """The condition that mentions the words holds."""
    return condition("True", *words)


def instead(code: str, *words: str) -> Change:
    """Other statements take the place of the statement that mentions the words; of one with a
    block, in its first line.

    In the code, a statement `_` stands for the old one.
    """

    def change(at: Place) -> None:
        block, index = _statement(at, words)
        old = block[index]
        made = ast.parse(code)
        for mark in [each for each in _all(made, ast.Expr) if ast.unparse(each) == "_"]:
            _Replaced(mark, old).visit(made)
        block[index : index + 1] = made.body

    return change


def without(*words: str) -> Change:
    """The statement that mentions the words is left out, with its block where it has one."""
    return instead("pass", *words)


def before(code: str, *words: str) -> Change:
    """Other statements come before the one that mentions the words."""
    return instead(f"{code}\n_", *words)


def last(*words: str) -> Change:
    """The statement that mentions the words comes last in its block."""

    def change(at: Place) -> None:
        block, index = _statement(at, words)
        block.append(block.pop(index))

    return change


def unguarded(*words: str) -> Change:
    """The block of the `with` that mentions the words is done without it."""

    def change(at: Place) -> None:
        block, index = _statement(at, words)
        block[index : index + 1] = getattr(block[index], "body")  # noqa: B009

    return change


def returned(value: str, *words: str) -> Change:
    """The return that mentions the words returns another value."""

    def change(at: Place) -> None:
        found = [
            each
            for each in _all(at.definition, ast.Return)
            if each.value and _mentions(words, each)
        ]
        one = _only(found, words, "returns")
        one.value = _expression(value, one.value)

    return change


def assigned(name: str, value: str, *words: str) -> Change:
    """The assignment to a variable or an attribute of this name, which mentions the words, gives it
    another value.
    """

    def change(at: Place) -> None:
        found = [
            each
            for each in _all(at.definition, ast.Assign, ast.AnnAssign)
            if _mentions([name], *_targets(each)) and _mentions(words, each)
        ]
        one = _only(found, (name, *words), "assignments")
        one.value = _expression(value, one.value)

    return change


def argument(call: str, which: int | str, value: str) -> Change:
    """The call of a function or a method of this name gets another argument, by its position or its
    keyword.
    """

    def change(at: Place) -> None:
        found = [
            each
            for each in _all(at.definition, ast.Call)
            if call == getattr(each.func, "attr", getattr(each.func, "id", ""))
        ]
        one = _only(found, (call,), "calls")
        if isinstance(which, int):
            one.args[which] = _expression(value, one.args[which])
            return
        named = _only(
            [each for each in one.keywords if each.arg == which], (call, which), "keywords"
        )
        named.value = _expression(value, named.value)

    return change


def default(parameter: str, value: str) -> Change:
    """A parameter that is given by its keyword alone gets a default."""

    def change(at: Place) -> None:
        signature = at.definition.args  # type: ignore[union-attr]
        index = [each.arg for each in signature.kwonlyargs].index(parameter)
        signature.kw_defaults[index] = _expression(value)

    return change


def expression(becomes: str, *words: str, kind: type[ast.expr] = ast.expr) -> Change:
    """The smallest expression (of a kind) that mentions the words becomes another one."""

    def change(at: Place) -> None:
        found = [([each], None) for each in _all(at.definition, kind) if _mentions(words, each)]
        [one], _ = _only(_innermost(found), words, "expressions")
        _Replaced(one, _expression(becomes, one)).visit(at.definition)

    return change


def lacking(*words: str) -> Change:
    """The member of a list, tuple, dict, call, `and` or `or` that mentions the words is left
    out.
    """

    def change(at: Place) -> None:
        found = [
            (part, remove)
            for holder in ast.walk(at.definition)
            for part, remove in _members(holder)
            if _mentions(words, *part)
        ]
        _, remove = _only(_innermost(found), words, "members")
        remove()

    return change


def spelled(old: str, new: str) -> Change:
    """A piece of a string becomes another one; one string has it."""

    def change(at: Place) -> None:
        found = [each for each in _all(at.definition, ast.Constant) if old in str(each.value)]
        one = _only(found, (old,), "strings")
        one.value = str(one.value).replace(old, new)

    return change


def undecorated(*words: str) -> Change:
    """The definition is left without the decorator that mentions the words."""

    def change(at: Place) -> None:
        decorators: list[ast.expr] = at.definition.decorator_list  # type: ignore[union-attr]
        decorators.remove(
            _only([each for each in decorators if _mentions(words, each)], words, "decorators")
        )

    return change


def imports(name: str) -> Change:
    """The definition's module imports another module at its top."""

    def change(at: Place) -> None:
        body = at.module.body
        after = max(
            (
                index
                for index, each in enumerate(body)
                if isinstance(each, ast.Import | ast.ImportFrom)
            )
        )
        body.insert(after + 1, ast.Import(names=[ast.alias(name)]))

    return change


def lengthened(lines: int) -> Change:
    """The definition's module has so many more lines."""

    def change(at: Place) -> None:
        at.module.body += [ast.Pass() for _ in range(lines)]

    return change


def both(*changes: Change) -> Change:
    """One change after the other."""

    def change(at: Place) -> None:
        for each in changes:
            each(at)

    return change


def _only(found: Sequence[Any], words: Sequence[str], what: str) -> Any:
    if len(found) != 1:
        raise ValueError(
            f"{len(found)} {what} mention {' and '.join(map(repr, words)) or 'nothing'}; one has to"
        )
    return found[0]


def _mentions(words: Sequence[str], *nodes: ast.AST | None) -> bool:
    said = {word for node in nodes if node is not None for word in _words(node)}
    return all(
        word in said or (word[:1] == "!" and word != "!=" and word[1:] not in said)
        for word in words
    )


def _words(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        for field in ("id", "attr", "arg", "name"):
            if isinstance(word := getattr(each, field, None), str):
                yield word
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value
        yield _SIGNS.get(type(each), "")


def _all(node: ast.AST, *kinds: type[N]) -> list[N]:
    return [each for each in ast.walk(node) if isinstance(each, kinds)]


def _innermost(found: Sequence[tuple[Sequence[ast.AST], T]]) -> list[tuple[Sequence[ast.AST], T]]:
    """Those in which none of the others stands."""
    ends = {id(node) for parts, _ in found for node in parts}
    inner = [
        {id(each) for node in parts for each in ast.walk(node) if each is not node}
        for parts, _ in found
    ]
    return [each for each, within in zip(found, inner, strict=True) if not ends & within]


def _expression(text: str, old: ast.expr | None = None) -> ast.expr:
    made = ast.parse(text, mode="eval").body
    if old is None:
        return made
    if isinstance(made, ast.Name) and made.id == "_":
        return old
    for name in [each for each in _all(made, ast.Name) if each.id == "_"]:
        _Replaced(name, old).visit(made)
    return made


class _Replaced(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self._new if node is self._old else self.generic_visit(node)


def _targets(statement: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return statement.targets if isinstance(statement, ast.Assign) else [statement.target]


def _blocks(node: ast.AST) -> Iterator[Block]:
    for each in ast.walk(node):
        for _, value in ast.iter_fields(each):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def _head(statement: ast.stmt) -> list[ast.AST]:
    """What a statement says itself; of one with a block, what stands before the block."""
    if not hasattr(statement, "body"):
        return [statement]
    parts = [getattr(statement, field, None) for field in _HEADS]
    flat = [each for part in parts for each in (part if isinstance(part, list) else [part])]
    return [each for each in flat if isinstance(each, ast.AST)]


def _statement(at: Place, words: Sequence[str]) -> tuple[Block, int]:
    """The block of the only statement that mentions the words, and its place in it."""
    found = [
        (block, index)
        for block in _blocks(at.definition)
        for index, each in enumerate(block)
        if _mentions(words, *_head(each))
    ]
    one: tuple[Block, int] = _only(found, words, "statements")
    return one


def _conditions(
    node: ast.AST,
) -> Iterator[tuple[list[ast.expr | ast.pattern], Callable[[ast.expr], None]]]:
    """Of every condition: what it consists of, itself last, and how to put another one in its
    place.
    """
    for each in ast.walk(node):
        match each:
            case ast.If() | ast.While() | ast.IfExp():
                yield [each.test], lambda new, each=each: setattr(each, "test", new)  # type: ignore[misc]
            case ast.match_case(guard=ast.expr()):
                yield [each.pattern, each.guard], lambda new, each=each: setattr(each, "guard", new)  # type: ignore
            case ast.comprehension():
                for index, test in enumerate(each.ifs):
                    yield [test], lambda new, ifs=each.ifs, index=index: ifs.__setitem__(index, new)  # type: ignore


def _members(holder: ast.AST) -> Iterator[tuple[list[ast.AST], Callable[[], Any]]]:
    """Of everything that a list, tuple, dict, call, `and` or `or` holds: its nodes, and how to
    leave it out.
    """

    def remove(values: list[Any], value: Any) -> Callable[[], Any]:
        return lambda: values.remove(value)

    match holder:
        case ast.List() | ast.Tuple() | ast.Set():
            yield from (([each], remove(holder.elts, each)) for each in holder.elts)
        case ast.BoolOp():
            yield from (([each], remove(holder.values, each)) for each in holder.values)
        case ast.Call():
            yield from (([each], remove(holder.args, each)) for each in holder.args)
            yield from (([each], remove(holder.keywords, each)) for each in holder.keywords)
        case ast.Dict():
            for index, (key, value) in enumerate(zip(holder.keys, holder.values, strict=True)):
                pair = [value] if key is None else [key, value]
                yield pair, lambda index=index: (holder.keys.pop(index), holder.values.pop(index))  # type: ignore[misc]
