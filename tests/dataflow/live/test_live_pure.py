"""What decides on the page without a file or a socket: who is let in, which shapes are drawn."""

import pytest
from starlette.datastructures import Headers

from dataflow.display import EdgeSnapshot
from dataflow.live.looks import data_edges, exchanges, shares, whole
from dataflow.live.server import NotAdmitted, admit
from dataflow.runs.drawing import name_edges, shapes


def ask(
    target: str = "/key/api/now?run=0", method: str = "GET", **headers: str
) -> str | NotAdmitted:
    given = {"host": "127.0.0.1:8000"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    return admit(method, target, Headers(given), "key")


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:9", "[::1]:80", "localhost"])
def test_who_has_the_token_and_calls_this_machine_by_its_name_is_answered(host: str) -> None:
    assert ask(host=host, origin=f"http://{host}", sec_fetch_site="same-origin") == "api/now?run=0"


@pytest.mark.parametrize(
    "target", ["/", "/key", "/kez/x", "//key/", "/key2/", "/%6Bey/", "/ke\u00ff/x", "/?key/"]
)
def test_without_the_whole_token_there_is_nothing(target: str) -> None:
    refused = ask(target)
    assert isinstance(refused, NotAdmitted) and refused.status == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": ""},
        {"host": "127.0.0.1.evil.example:8000"},
        {"host": "[::1"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1:8000"},
        {"origin": "http://127.0.0.1:8001"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
def test_another_site_is_refused_though_it_has_the_token(headers: dict[str, str]) -> None:
    refused = ask(**headers)
    assert (
        isinstance(refused, NotAdmitted)
        and refused.status == 403
        and "no other site" in refused.why
    )


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_but_reading_is_answered(method: str) -> None:
    refused = ask(method=method)
    assert isinstance(refused, NotAdmitted) and refused.status == 405


def test_of_two_equal_headers_nobody_knows_which_counts() -> None:
    hosts = Headers(raw=[(b"host", b"localhost"), (b"host", b"evil")])
    refused = admit("GET", "/key/", hosts, "key")
    assert isinstance(refused, NotAdmitted) and refused.status == 400


def test_shares_are_what_was_measured_and_nothing_fills_the_rest() -> None:
    rest = {"blocked": 0.0, "starved": 0.0}
    assert shares({"busy": 2.0, "waiting": 1.0, **rest, "measured": 10.0}) == {
        "busy": 0.2,
        "waiting": 0.1,
        **rest,
    }
    assert shares({"busy": 6.0, "waiting": 2.0, **rest, "measured": 8.0}) == {
        "busy": 0.75,
        "waiting": 0.25,
        **rest,
    }
    assert (
        shares(None) is None
        and shares({"busy": 1.0, "measured": 0.0}) is None
        and shares({"busy": 1.0}) is None
    )


def test_an_edge_s_rates_are_those_of_what_has_arrived_and_unknown_where_counts_begin_anew() -> (
    None
):
    def at(rows: int) -> dict[str, dict[str, list[int]]]:
        return {
            "a>b:s": {
                "sent": [9, 99, 999],
                "received": [rows // 8, rows, rows * 100],
                "acknowledged": [0, 0, 0],
            }
        }

    edge = EdgeSnapshot(producer="a", consumer="b", source="s", depth=3, capacity=9)
    (found,) = data_edges([edge], at(40), at(8), 4.0)
    assert (found["rows_s"], found["bytes_s"], found["crossed"]["sent"]) == (
        8.0,
        800.0,
        [9, 99, 999],
    )
    (first,) = data_edges([edge], at(40), {}, 4.0)
    assert first["rows_s"] == 10.0, "nothing had crossed it"
    for now, before, passed in (
        (at(8), at(40), 4.0),
        (at(8), None, 4.0),
        (at(8), at(8), 0.0),
        (None, None, 4.0),
    ):
        (found,) = data_edges([edge], now, before, passed)
        assert found["rows_s"] is None and found["bytes_s"] is None


def test_an_exchange_is_told_by_reader_its_replicas_together_by_what_took_most() -> None:
    sent = {
        "version": 7,
        "nbytes": 10,
        "full_bytes": 40,
        "seconds": 0.1,
        "committed_seconds": 0.5,
        "taken_seconds": 0.2,
    }
    line = {
        "weights_sent": {
            "generator-0": sent,
            "generator-1": {**sent, "version": 6, "taken_seconds": 0.9},
            "values-0": {"version": 7},
            "values-1": {"version": 7},
            "judge-0": {"version": 5, "committed_seconds": 0.7, "taken_seconds": 0.3},
        }
    }
    assert exchanges(line) == {
        "generator": {
            "readers": 2,
            "version": 6,
            "nbytes": 10,
            "full_bytes": 40,
            "seconds": 0.1,
            "committed_seconds": 0.5,
            "taken_seconds": 0.9,
        },
        "values": {"readers": 2, "version": 7},
        "judge": {"readers": 1, "version": 5, "committed_seconds": 0.7, "taken_seconds": 0.3},
    }
    assert (
        exchanges({})
        == exchanges({"weights_sent": None})
        == exchanges({"weights_sent": {"a-0": 1}})
        == {}
    )


def test_all_parts_of_a_run_count_each_from_its_first_step() -> None:
    def line(seconds: float, busy: float) -> dict[str, object]:
        return {
            "seconds": seconds,
            "nodes": {"t": {"busy": busy, "rows_in": 10 * busy, "step": int(busy)}},
        }

    lines = [
        line(0.0, 1.0),
        line(5.0, 4.0),
        line(0.0, 0.5),
        line(0.0, 1.0),
        line(8.0, 7.0),
        {"seconds": "x"},
    ]
    nodes, seconds = whole(lines)
    assert seconds == 13.0 and nodes["t"] == {"busy": 9.0, "rows_in": 90.0, "step": 7}


HOSTILE = b"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 10 10" onload="alert(1)">\
<script>alert(2)</script>
<style>*{background:url(http://x)}</style><foreignObject><p>no</p></foreignObject><image href="http://x"/>
<g class="link lane"><title>a \xe2\x86\x92 b (s): c1, c2</title>
<path class="line" d="M0 0H5" style="x" onclick="alert(3)"/></g>
<g class="weights"><title>b \xe2\x86\x92 a: m</title><path class="line" d="M0 0url(#x)"/></g>
<a href="javascript:alert(4)"><text x="1" y="calc(2)">t</text></a>\
<text class="knob">k=<tspan>1</tspan>!</text></svg>"""


def test_of_a_drawing_from_anybody_only_shapes_and_texts_are_left() -> None:
    found = shapes(HOSTILE)
    assert found is not None
    said = repr(found)
    for harm in (
        "script",
        "alert",
        "http",
        "url",
        "onload",
        "onclick",
        "style",
        "href",
        "foreign",
        "image",
        "calc",
    ):
        assert harm not in said.lower(), harm
    name_edges(
        found,
        {
            "edges": [
                {"from": "b", "to": "a", "plane": "weights"},
                {"from": "a", "to": "b", "plane": "data", "source": "s"},
            ]
        },
    )
    assert found[2][0][1]["data-edge"] == "1" and found[2][1][1]["data-edge"] == "0"
    assert found[2][-1] == ["text", {"class": "knob"}, ["k=", ["tspan", {}, ["1"]], "!"]]


@pytest.mark.parametrize(
    "text", [b"", b"<html/>", b"<svg", b'<!DOCTYPE x [<!ENTITY a "b">]><svg>&a;</svg>', b"\xff"]
)
def test_what_is_no_drawing_is_not_drawn(text: bytes) -> None:
    assert shapes(text) is None


def test_a_number_that_is_none_stays_out_of_the_shares() -> None:
    found = shares({"busy": -1.0, "waiting": 1.0, "blocked": 9.0, "measured": 2.0})
    assert found == {"busy": 0.0, "waiting": 0.5, "blocked": 1.0, "starved": 0.0}
