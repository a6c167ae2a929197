"""The codec: what goes in comes out, and nothing else comes in."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray
from opened import closed, opened

from transport.codec import Codec, Message, MessageError, Natural, Plain, field


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Point(Message):
    x: int
    y: float


class Circle(Message, kw_only=True):
    centre: Point
    radius: Natural


@dataclass(frozen=True, slots=True)
class Place:
    name: str
    at: tuple[int, ...]


class Everything(Message, kw_only=True):
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
    rows: tuple[tuple[int, ...], ...]
    by_name: dict[str, Point]
    by_number: Mapping[int, Colour]
    maybe: Point | None
    shape: Point | Circle | None
    value: int | str | list[Circle] | None
    place: Place
    scale: int | float
    word: Literal["yes", "no"]
    plain: Plain
    late: int = 3
    more: dict[str, Any] = field(default_factory=dict)


class Empty(Message):
    pass


class Even(Message):
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
    value=st.none() | INTS | TEXTS | few(CIRCLES),
    place=st.builds(Place, TEXTS, few(INTS).map(tuple)),
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
    place=Place("p", (1,)),
    scale=1,
    word="no",
    plain={"a": [1]},
)


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
    for junk in (
        plain,
        [plain],
        [plain, kind, {}],
        ["test/2", plain, {}],
        ["test/2", kind, plain],
    ):
        with pytest.raises(MessageError):
            CODEC.decode(closed(junk))


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
    ("nothing", 0, "null"),
    ("colour", "GREEN", "int"),
    ("colour", 3, "enum"),
    ("points", {}, "array"),
    ("points.0", 1, "object"),
    ("points.0.y", "z", "float"),
    ("pair", [1], "array"),
    ("pair.1", 2, "str"),
    ("empty", [1], "array"),
    ("counts.1", -1, "int"),
    ("counts.0", True, "int"),
    ("names.0", 5, "str"),
    ("rows", None, "array"),
    ("by_name", [], "object"),
    ("by_name.p", None, "object"),
    ("maybe", 3, "object"),
    ("shape", ["Square", {}], "object"),
    ("shape.radius", -1, "int"),
    ("value", 1.5, "int"),
    ("place", 1, "object"),
    ("place.at.0", "1", "int"),
    ("scale", "1", "int"),
    ("word", "perhaps", "enum"),
    ("word", None, "str"),
]


@pytest.mark.parametrize(
    ("path", "value", "wanted"), WRONG, ids=[f"{path}={value}" for path, value, _ in WRONG]
)
def test_a_value_of_another_type_is_refused_by_name(path: str, value: Any, wanted: str) -> None:
    message = opened(CODEC.encode(ONE))
    place: Any = message[2]
    *steps, last = path.split(".")
    for step in steps:
        place = place[int(step) if isinstance(place, list) else step]
    place[int(last) if isinstance(place, list) else last] = value
    with pytest.raises(MessageError, match="does not fit; found: .*; run the same") as error:
        CODEC.decode(closed(message))
    assert f"`$.{path.split('.')[0]}" in str(error.value) and wanted in str(error.value)


def test_no_field_may_be_missing_and_no_other_may_be_there() -> None:
    protocol, kind, fields = opened(CODEC.encode(ONE))
    with pytest.raises(MessageError, match="unknown field `later`"):
        CODEC.decode(closed([protocol, kind, {**fields, "later": 4}]))
    for name, found in {"late": "a 'Everything' without all", "whole": "missing required"}.items():
        rest = {other: value for other, value in fields.items() if other != name}
        with pytest.raises(MessageError, match=found):
            CODEC.decode(closed([protocol, kind, rest]))


@pytest.mark.parametrize(
    ("head", "error"),
    [
        (("test/1", "Empty"), "is of another protocol or version; found .*test/1.*; run the same"),
        (("data/2", "Empty"), "is of another protocol or version; found .*data/2"),
        (("test/2", "Square"), "does not fit; found: Invalid value 'Square'"),
        (("test/2", 4), "does not fit; found: .* got `int`"),
        ((2, "Empty"), "is of another protocol or version"),
    ],
)
def test_other_versions_and_unknown_kinds_are_refused_by_name(
    head: tuple[Any, Any], error: str
) -> None:
    with pytest.raises(MessageError, match=error):
        CODEC.decode(closed([*head, {}]))


def test_size_and_depth_have_bounds_on_both_sides() -> None:
    large = structs.replace(ONE, raw=b"x" * 4096)
    with pytest.raises(MessageError, match="too large; found .* the bound is 4096; send less"):
        CODEC.encode(large)
    with pytest.raises(MessageError, match="too large; found 5000 bytes, the bound is 4096"):
        CODEC.decode(b"x" * 5000)
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(MessageError, match="recursion"):
        CODEC.encode(structs.replace(ONE, plain=deep))
    protocol, kind, fields = opened(CODEC.encode(ONE))
    nested = closed([protocol, kind, {**fields, "plain": 0}])[:-1] + b"\x91" * 3000
    with pytest.raises(MessageError):
        CODEC.decode(nested)


@pytest.mark.parametrize(
    "value", [object(), 2**64, "\ud800", Point], ids=lambda value: type(value).__name__
)
def test_what_cannot_travel_is_refused_where_it_is_sent(value: Any) -> None:
    with pytest.raises(MessageError, match="'Everything' of test/2 cannot be sent"):
        CODEC.encode(structs.replace(ONE, plain=value))


def test_what_a_message_refuses_itself_does_not_come_in() -> None:
    assert CODEC.decode(CODEC.encode(Even(2))) == Even(2)
    with pytest.raises(MessageError, match="found: 3 is odd"):
        CODEC.decode(closed(["test/2", "Even", {"number": 3}]))


def test_no_extension_comes_in() -> None:
    protocol, kind, fields = opened(CODEC.encode(ONE))
    fields["plain"] = [msgpack.ExtType(5, b"x")]
    with pytest.raises(MessageError, match="extension of code 5"):
        CODEC.decode(closed([protocol, kind, fields]))


class Arrays(Message):
    one: NDArray[Any]
    more: tuple[NDArray[Any], ...] = ()
    none: NDArray[Any] | None = None


ARRAYS = Codec("arrays", 1, Arrays)


def test_arrays_come_out_as_they_went_in_and_writable() -> None:
    sent = Arrays(np.arange(12.0).reshape(3, 4)[:, ::2], (np.zeros(0, bool), np.int8([[3]])))
    arrived = ARRAYS.decode(ARRAYS.encode(sent))
    for one, other in zip((sent.one, *sent.more), (arrived.one, *arrived.more), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and (one == other).all()
        assert other.flags.writeable


@pytest.mark.parametrize(
    "junk",
    [
        3,
        [],
        ["<f4", [1], b""],
        ["<f4", [2**62], b"abcd"],
        ["|O", [1], b"abcdefgh"],
        ["no", [1], b"a"],
        ["i,,", [1], b"abcd"],
        ["<f4", [2**64 - 1], b"abcd"],
        ["<f4", "1", b"abcd"],
        ["<f4", [1], "abcd"],
        [{}, [1], b"abcd"],
    ],
    ids=str,
)
def test_what_is_no_array_is_refused(junk: Any) -> None:
    with pytest.raises(MessageError):
        ARRAYS.decode(closed(["arrays/1", "Arrays", {"one": junk}]))


def test_a_codec_refuses_two_messages_of_one_name() -> None:
    same = msgspec.defstruct("Point", [("x", int)], bases=(Message,), frozen=True)
    with pytest.raises(TypeError, match="unique"):
        Codec("test", 1, Point, same)
