"""Laws of the sandbox: hostile programs get nothing, leave nothing, and pass no test that they
should not.
"""

import contextlib
import os
import signal
import struct
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.sandbox.__main__ import attack, world
from bench.sandbox.hostile import GROUPS, Hostile
from operators.sandbox import PythonTest, SandboxError, SandboxLimits, ScriptTest, fault, run
from operators.sandbox.bwrap import command, find
from operators.sandbox.inside import cage
from operators.sandbox.inside.tester import is_same, names_in
from operators.sandbox.inside.wire import decode, encode

needs_sandbox = pytest.mark.skipif(fault() is not None, reason=str(fault()))


HOSTILE = [
    pytest.param(hostile, id=hostile.tries, marks=pytest.mark.slow if hostile.is_slow else ())
    for programs in GROUPS.values()
    for hostile in programs
]


DEADLINE_S = 30.0


@needs_sandbox
@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_program_is_contained(hostile: Hostile) -> None:
    result = attack(hostile)
    assert result.faults == (), result.outcome


ALONE = [
    hostile
    for hostile in (*GROUPS["network"], *GROUPS["reading"], *GROUPS["writing"])
    if hostile.tries not in ("io_uring instead of sockets", "mount, unshare, chroot, setns")
]


@needs_sandbox
@pytest.mark.parametrize("hostile", ALONE, ids=lambda hostile: hostile.tries)
def test_without_its_filter_a_sandbox_still_has_no_network_and_no_files(hostile: Hostile) -> None:
    with world() as made:
        program = made.filled(hostile.program)
        words = [*command(find() or "", 1 << 20)[:-1], program]
        done = subprocess.run(
            words, env=os.environ, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert sorted(path.name for path in made.home.iterdir()) == ["secret", "socket"]
    assert done.returncode == 0, done.stderr
    assert done.stdout and "ESCAPED" not in done.stdout and made.secret not in done.stdout
    assert made.reached == []


@needs_sandbox
def test_each_test_runs_in_a_process_of_its_own() -> None:
    source = "seen = []\ndef f(x):\n    seen.append(x)\n    return seen"
    assert all(outcome.passed for outcome in run(source, [PythonTest("assert f(1) == [1]")] * 3))


@needs_sandbox
def test_outcomes_come_in_the_order_of_the_tests() -> None:
    outcomes = list(
        run("print(input())", [ScriptTest(str(number)) for number in range(5)], SandboxLimits())
    )
    assert [outcome.output for outcome in outcomes] == [f"{number}\n" for number in range(5)]


@needs_sandbox
def test_a_program_does_the_same_each_time() -> None:
    source = "print([hash('a'), sorted(map(hash, 'abc')), list({'x', 'y', 'z'})])"
    assert (
        len({outcome.output for outcome in run(source, [ScriptTest("")] * 3, SandboxLimits())}) == 1
    )
    (first,), (second,) = (list(run(source, [ScriptTest("")], SandboxLimits())) for _ in range(2))
    assert first.passed and first == second


@needs_sandbox
def test_a_test_that_hangs_leaves_the_others_their_time() -> None:
    source = "import time\ndef f(x):\n    time.sleep(100 * x)\n    return x"
    outcomes = list(
        run(source, [PythonTest("f(1)"), PythonTest("assert f(0) == 0")], SandboxLimits(time_s=0.2))
    )
    assert [outcome.passed for outcome in outcomes] == [False, True]
    assert outcomes[0].note == "had not ended after 1 s"


@needs_sandbox
def test_when_the_time_of_all_tests_is_over_the_rest_fail() -> None:
    outcomes = list(
        run(
            "import time\ntime.sleep(100)",
            [ScriptTest("")] * 4,
            SandboxLimits(time_s=1.0, total_s=1.0),
        )
    )
    assert [outcome.passed for outcome in outcomes] == [False] * 4
    assert outcomes[-1].note == "no time was left (1 s for all tests)"


def below(pid: int) -> set[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return set(psutil.Process(pid).children(recursive=True))
    return set()


def are_gone(processes: set[psutil.Process]) -> bool:
    return not [
        process for process in processes if process.is_running() and process.status() != "zombie"
    ]


def wait_for(condition: Any) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(found)


@needs_sandbox
def test_a_sandbox_ends_with_the_iterator() -> None:
    before = below(os.getpid())
    outcomes = run(
        "import time\nif input(): time.sleep(100)",
        [ScriptTest("\n"), ScriptTest("x")],
        SandboxLimits(),
    )
    assert next(outcomes).passed
    inside = below(os.getpid()) - before
    assert inside
    outcomes.close()
    assert wait_for(lambda: are_gone(inside))


@needs_sandbox
def test_a_sandbox_ends_with_the_process_that_made_it() -> None:
    with warnings.catch_warnings():
        # a fork beside threads, which the child does not use
        warnings.simplefilter("ignore", DeprecationWarning)
        owner = os.fork()
    if owner == 0:
        try:
            list(
                run(
                    "import time\ntime.sleep(100)",
                    [ScriptTest("")],
                    SandboxLimits(time_s=60.0, total_s=100.0),
                )
            )
        finally:
            os._exit(0)
    is_inside = wait_for(lambda: len(below(owner)) >= 3)
    inside = below(owner)
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    assert is_inside
    assert wait_for(lambda: are_gone(inside))


@needs_sandbox
def test_a_sandbox_that_is_killed_is_a_failure_of_its_own_and_not_of_the_program() -> None:
    before = below(os.getpid())
    outcomes = run(
        "import time\nif input(): time.sleep(100)",
        [ScriptTest("\n"), ScriptTest("x")],
        SandboxLimits(),
    )
    assert next(outcomes).passed
    inside = below(os.getpid()) - before
    # the outermost first: the others tell it of their ends
    for process in sorted(inside, key=lambda each: each.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    with pytest.raises(SandboxError, match="a sandbox ended with status"):
        next(outcomes)


def test_nothing_of_the_machine_can_be_written_and_no_namespace_is_shared() -> None:
    words = command("bwrap", 1 << 20)
    assert {
        "--unshare-all",
        "--unshare-user",
        "--clearenv",
        "--die-with-parent",
        "--as-pid-1",
    } <= set(words)
    assert not {"--share-net", "--bind", "--bind-try", "--proc", "--dev", "--overlay"} & set(words)
    assert words.index("--remount-ro") > words.index("--tmpfs")
    bound = [
        words[at + 1]
        for at, word in enumerate(words)
        if word in ("--dev-bind", "--ro-bind", "--ro-bind-try")
    ]
    assert not {"/", "/root", "/home", "/etc", "/var", "/run", str(Path.home())} & set(bound)


# The filter of system calls


def verdict(
    machine: str, number: int, *arguments: int, pid: int = 7, architecture: int | None = None
) -> int:
    """What a filter says of a call: its program run as seccomp(2) says the kernel runs it."""
    own = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    data = struct.pack(
        "<IIQ6Q",
        number,
        own if architecture is None else architecture,
        0,
        *(*arguments, *[0] * 6)[:6],
    )
    steps = list(struct.iter_unpack("<HBBI", cage.rules(machine, pid)))
    at, held = 0, 0
    while True:
        code, yes, no, k = steps[at]
        at += 1
        if code == 0x06:
            return int(k)
        if code == 0x20:
            (held,) = struct.unpack_from("<I", data, k)
        else:
            holds = {0x15: held == k, 0x25: held > k, 0x45: bool(held & k)}[code]
            at += yes if holds else no


ALLOW, KILL, NOT_PERMITTED, UNKNOWN = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


THREAD = 0x3D0F00  # the flags with which libc starts a thread


@pytest.mark.parametrize(
    ("call", "x86_64", "aarch64", "arguments", "wanted"),
    [
        ("read", 0, 63, (), ALLOW),
        ("mmap", 9, 222, (), ALLOW),
        ("clone of a process", 56, 220, (17,), NOT_PERMITTED),
        ("clone of a thread", 56, 220, (THREAD,), ALLOW),
        ("clone3", 435, 435, (), UNKNOWN),
        ("execve", 59, 221, (), NOT_PERMITTED),
        ("socket", 41, 198, (), NOT_PERMITTED),
        ("socketpair", 53, 199, (), ALLOW),
        ("ptrace", 101, 117, (), NOT_PERMITTED),
        ("kill of itself", 62, 129, (7, 9), ALLOW),
        ("kill of its parent", 62, 129, (1, 9), NOT_PERMITTED),
        ("kill of all", 62, 129, (2**64 - 1, 9), NOT_PERMITTED),
        ("its own limits", 302, 261, (0,), ALLOW),
        ("another's limits", 302, 261, (1,), NOT_PERMITTED),
        ("a call of later kernels", 451, 451, (), UNKNOWN),
        ("the last known call", 450, 450, (), ALLOW),
    ],
)
def test_the_filter_refuses_what_reaches_beyond_a_process(
    call: str, x86_64: int, aarch64: int, arguments: tuple[int, ...], wanted: int
) -> None:
    assert verdict("x86_64", x86_64, *arguments) == wanted
    assert verdict("aarch64", aarch64, *arguments) == wanted


def test_the_filter_kills_what_calls_as_another_architecture() -> None:
    assert verdict("x86_64", 0, architecture=0x40000003) == KILL  # 32-bit calls
    assert verdict("x86_64", 0x40000000 + 57) == UNKNOWN  # x32's fork


def test_the_filter_refuses_fork_where_there_is_one() -> None:
    assert [verdict("x86_64", number) for number in (57, 58)] == [NOT_PERMITTED] * 2


# What processes of a sandbox say to each other

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.frozensets(st.integers() | st.text(), max_size=4)
        | st.sets(st.integers(), max_size=4)
    ),
    max_leaves=20,
)


def refuse(value: Any) -> int:
    raise AssertionError(value)


@settings(max_examples=100)
@given(PLAIN)
def test_plain_data_arrives_as_it_was(value: Any) -> None:
    found = decode(encode(value, refuse), refuse)
    assert found == value and type(found) is type(value)


@settings(max_examples=200)
@given(st.binary(max_size=60))
def test_bytes_of_any_kind_are_plain_data_or_refused(data: bytes) -> None:
    with contextlib.suppress(
        ValueError, TypeError, IndexError, KeyError, struct.error, RecursionError
    ):
        decode(data, lambda number: None)


def test_an_object_goes_by_number_and_a_subclass_by_value() -> None:
    class Mine(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    kept: list[Any] = []

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    it = object()
    assert decode(encode([it, Mine(3)], keep), lambda number: f"object {number}") == ["object 0", 3]
    assert kept == [it]
    assert type(decode(encode(Mine(3), keep), refuse)) is int


def test_a_test_borrows_no_built_in_of_the_candidate() -> None:
    code = compile(
        "def check(f):\n    assert all(abs(f(x) - g(x)) < 1 for x in range(3))\ncheck(h)",
        "t",
        "exec",
    )
    assert {"g", "h"} <= names_in(code)
    assert not {"all", "abs", "range", "AssertionError"} & names_in(code)


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ((1, 2), [1, 2], True),
        ([(1, 2)], [[1, 2]], True),
        (3, [3], True),
        (3, [3, 4], False),
        (float("inf"), float("inf"), True),
        (float("nan"), float("nan"), True),
        ([1.0, (float("nan"),)], [1.0, [float("nan")]], True),
        ({"a": float("nan")}, {"a": float("nan")}, True),
        (5, float("nan"), False),
        ({"a": (1,)}, {"a": [1]}, True),
        ([], [], True),
        (None, [], False),
        (3, 4, False),
        (object(), 1, False),
    ],
)
def test_values_are_compared_as_json_would_hold_them(found: Any, wanted: Any, same: bool) -> None:
    assert is_same(found, wanted) is same
