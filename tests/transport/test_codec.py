"""The codec: what goes in comes out, and nothing else comes in."""

import dataclasses
import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.codec import Codec, MessageError, Natural, Plain


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


@dataclass(frozen=True)
class Point:
    x: int
    y: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Circle:
    centre: Point
    radius: Natural


@dataclass(frozen=True, kw_only=True)
class Everything:
    whole: int
    number: float
    is_so: bool
    text: str
    raw: bytes
    nothing: None
    colour: Colour
    points: tuple[Point, ...]
    pair: tuple[int, str]
    empty: tuple[()]
    counts: tuple[Natural, ...]
    names: list[str]
    rows: Sequence[tuple[int, ...]]
    by_name: dict[str, Point]
    by_number: Mapping[int, Colour]
    maybe: Point | None
    shape: Point | Circle | None
    value: int | str | bytes | list[Circle] | None
    scale: int | float
    word: Literal["yes", "no"]
    plain: Plain
    late: int = 3
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Empty:
    pass


@dataclass(frozen=True)
class Even:
    number: int

    def __post_init__(self) -> None:
        if self.number % 2:
            raise ValueError(f"{self.number} is odd")


CODEC: Codec[Any] = Codec("test", 2, Everything, Empty, Even, Point, Circle, max_bytes=4096)

INTS = st.integers(-(2**63), 2**64 - 1)
NATURALS = st.integers(0, 2**64 - 1)
FLOATS = st.floats(allow_nan=False)
TEXTS, RAWS = st.text(max_size=8), st.binary(max_size=8)
POINTS = st.builds(Point, INTS, FLOATS)
CIRCLES = st.builds(Circle, centre=POINTS, radius=NATURALS)
COLOURS = st.sampled_from(Colour)
PLAIN = st.recursive(
    st.none() | st.booleans() | INTS | FLOATS | TEXTS | RAWS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=6,
)


def few(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, max_size=3)


EVERYTHING = st.builds(
    Everything,
    whole=INTS,
    number=FLOATS,
    is_so=st.booleans(),
    text=TEXTS,
    raw=RAWS,
    nothing=st.none(),
    colour=COLOURS,
    points=few(POINTS).map(tuple),
    pair=st.tuples(INTS, TEXTS),
    empty=st.just(()),
    counts=few(NATURALS).map(tuple),
    names=few(TEXTS),
    rows=few(few(INTS).map(tuple)).map(tuple),
    by_name=st.dictionaries(TEXTS, POINTS, max_size=2),
    by_number=st.dictionaries(INTS, COLOURS, max_size=2),
    maybe=st.none() | POINTS,
    shape=st.none() | POINTS | CIRCLES,
    value=st.none() | INTS | TEXTS | RAWS | few(CIRCLES),
    scale=INTS | FLOATS,
    word=st.sampled_from(["yes", "no"]),
    plain=PLAIN,
    late=INTS,
    more=st.dictionaries(TEXTS, PLAIN, max_size=2),
)
MESSAGES = (
    EVERYTHING
    | POINTS
    | CIRCLES
    | st.just(Empty())
    | st.builds(Even, INTS.map(lambda one: one // 4 * 2))
)
ONE = Everything(
    whole=1,
    number=2.5,
    is_so=True,
    text="t",
    raw=b"r",
    nothing=None,
    colour=Colour.RED,
    points=(Point(1, 2.0),),
    pair=(1, "a"),
    empty=(),
    counts=(0, 1),
    names=["n"],
    rows=((1,),),
    by_name={"p": Point(1, 1.0)},
    by_number={4: Colour.BLUE},
    maybe=None,
    shape=Circle(centre=Point(0, 0.0), radius=1),
    value=None,
    scale=1,
    word="no",
    plain={"a": [1]},
)


def wire(message: Any) -> list[Any]:
    found: list[Any] = msgpack.unpackb(CODEC.encode(message), strict_map_key=False)
    return found


@given(MESSAGES)
def test_any_message_comes_out_as_it_went_in_with_the_types_that_it_had(message: Any) -> None:
    found = CODEC.decode(CODEC.encode(message))
    assert found == message
    assert repr(found) == repr(message), "1 is not True, and (1,) not [1]"


@given(st.binary(max_size=200))
def test_junk_is_never_a_message(junk: bytes) -> None:
    with pytest.raises(MessageError, match=".*; .*"):
        CODEC.decode(junk)


@given(PLAIN, st.sampled_from(["Everything", "Empty", "Even", "Point", "Circle"]))
def test_other_fields_are_never_a_message(plain: Any, kind: str) -> None:
    if plain == {} and kind == "Empty":
        return
    for found in (
        plain,
        [plain],
        [plain, kind, {}],
        ["test/2", plain, {}],
        ["test/2", kind, plain],
    ):
        with pytest.raises(MessageError):
            CODEC.decode(msgpack.packb(found))


@given(EVERYTHING, st.data())
def test_a_truncated_message_is_refused(message: Everything, data: st.DataObject) -> None:
    packed = CODEC.encode(message)
    with pytest.raises(MessageError):
        CODEC.decode(packed[: data.draw(st.integers(0, len(packed) - 1))])
    with pytest.raises(MessageError):
        CODEC.decode(packed + b"\0")


@given(EVERYTHING, st.data())
def test_a_damaged_message_is_refused_or_another_that_fits(
    message: Everything, data: st.DataObject
) -> None:
    packed = bytearray(CODEC.encode(message))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = CODEC.decode(packed)
    except MessageError:
        return
    assert CODEC.decode(CODEC.encode(found)) == found or "nan" in repr(found)


WRONG = [
    ("whole", True, "int"),
    ("whole", 1.0, "int"),
    ("whole", None, "int"),
    ("number", "1", "float"),
    ("number", True, "float"),
    ("is_so", 1, "bool"),
    ("text", b"t", "str"),
    ("raw", "r", "bytes"),
    ("nothing", 0, "NoneType"),
    ("colour", "GREEN", "one of RED, BLUE"),
    ("colour", 1, "one of RED, BLUE"),
    ("points", {}, "a list, each a Point"),
    ("points.0", 1, "a map of x, y"),
    ("points.0.y", "z", "float"),
    ("pair", [1], "a list of int, str"),
    ("pair.1", 2, "str"),
    ("empty", [1], "a list of nothing"),
    ("counts.1", -1, "int of at least 0"),
    ("counts.0", True, "int"),
    ("names.0", 5, "str"),
    ("rows", None, "a list"),
    ("by_name", [], "a map of str to a Point"),
    ("by_name.p", None, "a map of x, y"),
    ("maybe", 3, "NoneType or a Point"),
    ("shape", ["Square", {}], "a Point or a Circle"),
    ("shape.1.radius", -1, "int of at least 0"),
    ("value", 1.5, "int or str or bytes"),
    ("scale", "1", "int or float"),
    ("word", "perhaps", "one of 'yes', 'no'"),
    ("word", None, "one of 'yes', 'no'"),
]


@pytest.mark.parametrize(
    ("path", "value", "wanted"), WRONG, ids=[f"{path}={value}" for path, value, _ in WRONG]
)
def test_a_value_of_another_type_is_refused_by_name(path: str, value: Any, wanted: str) -> None:
    found = wire(ONE)
    place: Any = found[2]
    *steps, last = path.split(".")
    for step in steps:
        place = place[int(step) if isinstance(place, list) else step]
    place[int(last) if isinstance(place, list) else last] = value
    shown = ".".join(step for step in path.split(".") if path != "shape.1.radius" or step != "1")
    with pytest.raises(
        MessageError, match=re.escape(f"'Everything.{shown}' should be {wanted}")
    ) as error:
        CODEC.decode(msgpack.packb(found))
    assert f"found {type(value).__name__}" in str(error.value)


def test_every_field_must_be_there_and_no_other() -> None:
    for change in ({"late": 3, "later": 4}, {}):
        tag, kind, plain = wire(ONE)
        del plain["late"]
        with pytest.raises(MessageError, match="'Everything' should be a map of whole, number, "):
            CODEC.decode(msgpack.packb([tag, kind, {**plain, **change}]))


@pytest.mark.parametrize(
    ("head", "error"),
    [
        (
            ("test/1", "Empty"),
            "is of another protocol or version; found str 'test/1'; run the same release",
        ),
        (("data/2", "Empty"), "is of another protocol or version; found str 'data/2'"),
        (
            ("test/2", "Square"),
            "has an unknown kind; found str 'Square', known are Everything, Empty, Even",
        ),
        (("test/2", 4), "cannot be read"),
        ((2, "Empty"), "cannot be read"),
    ],
)
def test_other_versions_and_unknown_kinds_are_refused_by_name(
    head: tuple[Any, Any], error: str
) -> None:
    with pytest.raises(MessageError, match=error):
        CODEC.decode(msgpack.packb([*head, {}]))


def test_size_and_depth_have_bounds_on_both_sides() -> None:
    large = dataclasses.replace(ONE, raw=b"x" * 4096)
    with pytest.raises(MessageError, match="too large; found .* the bound is 4096; send less"):
        CODEC.encode(large)
    with pytest.raises(MessageError, match="too large; found 5000 bytes, the bound is 4096"):
        CODEC.decode(b"x" * 5000)
    deep: Any = 1
    for _ in range(64):
        deep = [deep]
    with pytest.raises(MessageError, match="64 deep"):
        CODEC.decode(CODEC.encode(dataclasses.replace(ONE, plain=deep)))
    with pytest.raises(MessageError):
        CODEC.decode(b"\x91" * 4000)
    assert CODEC.decode(CODEC.encode(dataclasses.replace(ONE, plain=deep[0]))).plain == deep[0]


@pytest.mark.parametrize(
    "value", [object(), 2**64, {1, 2}, "\ud800", Point], ids=lambda value: type(value).__name__
)
def test_what_cannot_travel_is_refused_where_it_is_sent(value: Any) -> None:
    with pytest.raises(MessageError, match="'Everything' of test/2 cannot be sent"):
        CODEC.encode(dataclasses.replace(ONE, plain=value))


def test_what_a_message_refuses_itself_does_not_come_in() -> None:
    assert CODEC.decode(CODEC.encode(Even(2))) == Even(2)
    with pytest.raises(MessageError, match=r"should be a Even \(3 is odd\)"):
        CODEC.decode(msgpack.packb(["test/2", "Even", {"number": 3}]))


@pytest.mark.parametrize("value", [msgpack.Timestamp(1, 1), msgpack.ExtType(5, b"x")], ids=repr)
def test_nothing_but_plain_values_comes_in(value: Any) -> None:
    found = wire(ONE)
    found[2]["plain"] = [value]
    with pytest.raises(MessageError, match="'Everything.plain' should be a plain value"):
        CODEC.decode(msgpack.packb(found))


def test_a_codec_refuses_classes_whose_messages_it_could_not_carry() -> None:
    changeable = dataclasses.make_dataclass("Changeable", [("x", int)])
    for refused in (
        changeable,
        frozen(set),
        frozen(object),
        frozen(bytes | tuple[int, ...] | list[str]),
        frozen(complex),
    ):
        with pytest.raises(AssertionError):
            Codec("test", 1, refused)


def frozen(kind: Any) -> type[Any]:
    return dataclasses.make_dataclass("Frozen", [("x", kind)], frozen=True)
