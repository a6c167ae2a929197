"""Laws of sandboxes that are kept: state stays from one command to the next, limits hold, nothing
is left behind.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from rigs.machine import wait_until

from dataflow.errors import WorldFailed
from operators.chat.tool_calls import TextCalls
from operators.sandbox import fault
from operators.sandbox.session import CommandRefused, KeptLimits, KeptSandbox
from operators.tools import Sandbox
from operators.tools.sandbox_tools import SandboxSession
from operators.tools.toolbox import tool_faults

pytestmark = [
    pytest.mark.skipif(fault() is not None, reason=str(fault())),
    pytest.mark.timeout(120),
]


DEADLINE_S = 30.0


def sandboxed(work: Callable[[SandboxSession], Awaitable[Any]], **knobs: Any) -> Any:
    """What is done in a session; all processes of its sandbox are gone behind it."""

    async def run() -> tuple[Any, list[psutil.Process]]:
        session = await Sandbox(**knobs).open()
        assert session._sandbox is not None
        below = processes(session._sandbox.pid)
        try:
            return await work(session), below
        finally:
            below += processes(session._sandbox.pid) if session._sandbox is not None else []
            await session.close()

    found, below = asyncio.run(run())
    assert not psutil.wait_procs(below, timeout=DEADLINE_S)[1]
    return found


def processes(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        own = psutil.Process(pid)
        return [own, *own.children(recursive=True)]
    return []


def told(
    *calls: tuple[str, str] | tuple[str, str, float], characters: int = 400, **knobs: Any
) -> list[str]:
    """What calls come to, one after the other in one sandbox; with a third part they have so many
    seconds, else 20.
    """

    async def work(session: SandboxSession) -> list[str]:
        return [
            await session.call(
                name, {"what": text}, timeout_s=limit[0] if limit else 20.0, characters=characters
            )
            for name, text, *limit in calls
        ]

    return list(sandboxed(work, **knobs))


def test_python_keeps_its_variables_and_gives_the_value_of_the_last_expression() -> None:
    found = told(
        ("python", "import math\nx = 41"),
        ("python", "x += 1\nprint('so')\nx"),
        ("python", "None"),
        ("python", "def f():\n    return x / 0\nf()"),
        ("python", "math.floor(2.5)"),
    )
    assert found[:3] == ["[no output]", "so\n42", "[no output]"] and found[4] == "2"
    assert found[3].splitlines()[0] == "Traceback (most recent call last):" and found[3].endswith(
        "division by zero"
    )
    assert "inside" not in found[3], "the tracebacks are those of the code alone"


def test_a_shell_keeps_its_folder_and_its_environment_and_shares_files_with_python() -> None:
    found = told(
        ("shell", "mkdir -p a/b && cd a && export WORD=hello && LOCAL=1; echo hi > b/file"),
        ("shell", 'pwd; echo "$WORD$LOCAL"; cat b/file'),
        ("python", "open('a/b/file').read()"),
        ("shell", "exit 3"),
        ("shell", "pwd"),
        ("shell", "no-such-command"),
        ("shell", "echo $(("),
    )
    assert found[:3] == ["[no output]", "/tmp/a\nhello\nhi", "'hi\\n'"]
    assert found[3] == "[exited with status 3]" and found[4] == "/tmp/a"
    assert "not found" in found[5] and found[5].endswith("[exited with status 127]")
    assert "exited with status" in found[6]


def test_a_sandbox_that_was_ended_from_outside_is_lost() -> None:
    """So that one which was started ahead is lent to no rollout."""

    async def work(session: SandboxSession) -> None:
        assert session._sandbox is not None and not session.is_lost
        os.kill(session._sandbox.pid, signal.SIGKILL)
        wait_until(lambda: session.is_lost, DEADLINE_S)

    sandboxed(work)


def test_files_go_in_and_out() -> None:
    async def work(session: SandboxSession) -> None:
        await session.write("in/data.csv", b"a,b\n1,2\n")
        said = await session.call(
            "shell", {"command": "cat in/data.csv | tr , +"}, timeout_s=20, characters=99
        )
        assert said == "a+b\n1+2"
        await session.call(
            "python", {"code": "open('out','w').write('x' * 3)"}, timeout_s=20, characters=99
        )
        assert await session.read("out") == b"xxx"
        with pytest.raises(CommandRefused, match="No such file"):
            await session.read("none")
        with pytest.raises(CommandRefused, match="Read-only file system"):
            await session.write("/usr/x", b"")
        await session.call(
            "shell",
            {"command": "mkfifo pipe; head -c 9000000 /dev/zero > big"},
            timeout_s=20,
            characters=99,
        )
        assert await session.read("pipe") == b"", "a pipe holds nobody up"
        with pytest.raises(CommandRefused, match="has 9000000 bytes"):
            await session.read("big")

    sandboxed(work)


def test_what_takes_too_long_is_interrupted_and_what_will_not_be_is_ended() -> None:
    found = told(
        ("python", "x = 1"),
        ("python", "while True: pass", 1.0),
        ("python", "x"),
        (
            "python",
            "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
            1.0,
        ),
        ("python", "x"),
        ("shell", "sleep 60", 1.0),
        ("shell", "echo still here"),
    )
    assert "KeyboardInterrupt" in found[1] and found[1].endswith("[took more than 1 s]")
    assert found[2] == "1", "an interrupted interpreter keeps what it had"
    assert found[3].endswith(
        "[took more than 1 s; Python was started anew, its variables are gone]"
    )
    assert "NameError" in found[4]
    assert found[5] == "[took more than 1 s]" and found[6] == "still here"


def test_a_long_output_is_cut_and_too_long_a_one_ended() -> None:
    found = told(("python", "print('x' * (10 << 20))"), ("shell", "yes"), ("python", "1"))
    assert found[0].startswith("x" * 1600 + "\n[cut: 10485761 bytes in all]")
    assert "wrote more than 67108864 bytes" in found[1] and found[1].startswith("y\ny\n")
    assert found[2] == "1"


def test_too_much_memory_of_one_process_is_refused_to_it() -> None:
    assert "MemoryError" in told(("python", "x = bytearray(1 << 30)"), memory_mb=256)[0]


def test_too_much_memory_ends_the_sandbox_and_the_model_is_told() -> None:
    hog = (
        "import os, time\nfor _ in range(5):\n    if not os.fork():\n        x = bytearray(100 <<"
        " 20)\n"
    )
    hog += "        time.sleep(60)\n        os._exit(0)\n"
    found = told(("python", hog + "time.sleep(60)"), ("python", "1"), memory_mb=256)
    assert found[0].startswith(
        "error: took more than 256 MB of memory; the sandbox was started anew, and its files"
    )
    assert found[1] == "1"


def test_memory_that_forks_have_in_common_counts_once() -> None:
    fork = "import os, time\nx = bytearray(50 << 20)\nfor _ in range(8):\n    if not os.fork():\n"
    fork += "        time.sleep(60)\n        os._exit(0)\ntime.sleep(1)"
    assert told(("python", fork), memory_mb=256) == ["[no output]"]


def test_too_many_files_end_the_sandbox_and_the_model_is_told() -> None:
    found = told(
        ("python", "for n in range(2000): open(f'f{n}', 'w').close()"), ("shell", "ls | wc -l")
    )
    assert found[0].startswith("error: made more than 1000 files; the sandbox was started anew")
    assert found[1] == "0"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(0)",
        "import os\nos.kill(os.getpid(), 9)",
        "import os\nos.kill(-1, 9)",
        "import os\n[os.close(fd) for fd in range(3, 30)]",
        "import os\nos.closerange(0, 64)",
        (
            "import os\nfor fd in range(3, 30):\n    try: os.write(fd, b'..........')\n    except"
            " OSError: pass"
        ),
        "import sys\nsys.modules.clear()",
        "import os, time\nfor _ in range(99):\n    if not os.fork(): time.sleep(30), os._exit(0)",
        "import os\nif not os.fork(): x = 5",
        "import os, signal\nos.kill(1, 9); os.kill(1, 19); os.kill(1, 15)",
    ],
)
def test_nothing_that_is_done_inside_breaks_the_sandbox(code: str) -> None:
    found = told(
        ("python", code, 3.0), ("shell", "echo a"), ("python", "6 * 7"), ("python", "6 * 7")
    )
    assert found[1].startswith("a") or "Resource" in found[1] or "fork" in found[1], found
    assert (
        "42" in found[2] or "42" in found[3] or "Python was started anew" in found[2] + found[3]
    ), found


def test_nothing_runs_between_two_commands() -> None:
    async def work(session: SandboxSession) -> None:
        loop = "(while :; do :; done) & (while :; do :; done) & echo started"
        assert (
            await session.call("shell", {"command": loop}, timeout_s=20, characters=99) == "started"
        )
        assert session._sandbox is not None
        left = [each for each in processes(session._sandbox.pid) if each.name() in ("bash", "sh")]
        assert len(left) == 2
        wait_until(
            lambda: all(each.status() == psutil.STATUS_STOPPED for each in left),
            DEADLINE_S,
            "the stop",
        )

    sandboxed(work)


def test_there_is_no_network_and_nobody_elses_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    found = told(
        ("python", "import socket\nsocket.socket()"),
        ("shell", f"cat {secret}"),
        ("shell", "ls /etc/passwd /home /proc"),
        ("shell", "echo x > /usr/x"),
        ("shell", "env"),
        ("shell", "unshare -U true; echo $?"),
    )
    assert "PermissionError" in found[0]
    assert "hidden" not in found[1] and "No such file" in found[1]
    assert found[2].count("No such file") == 3
    assert "Read-only file system" in found[3]
    assert str(Path.home()) not in found[4] and "HOME=/tmp" in found[4]
    assert found[5].splitlines()[-1] != "0"


def test_folders_that_are_given_can_be_read_and_not_written(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("here")
    found = told(
        ("shell", f"cat {tmp_path}/data"),
        ("shell", f"echo x > {tmp_path}/data"),
        folders=(str(tmp_path),),
    )
    assert found[0] == "here" and "Read-only file system" in found[1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sandbox_that_is_killed_or_stopped_is_the_worlds_failure(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operators.sandbox.session._GRACE_S", 0.5)

    async def work(session: SandboxSession) -> None:
        assert session._sandbox is not None
        for each in reversed(processes(session._sandbox.pid)):
            each.send_signal(number)
        with pytest.raises(WorldFailed, match="a sandbox (has ended|gave no answer)"):
            await session.call("python", {"code": "1"}, timeout_s=0.5, characters=99)
        assert session._sandbox is None, "it is given back at once"

    sandboxed(work)


def test_a_process_that_is_killed_takes_its_sandboxes_along(tmp_path: Path) -> None:
    from dataflow.system.child import fork

    mark = tmp_path / "pids"

    def body() -> int:
        async def run() -> None:
            made = [await Sandbox().open() for _ in range(3)]
            await made[0].call(
                "shell", {"command": "setsid sleep 1000 & disown"}, timeout_s=20, characters=99
            )
            pids = [
                each.pid
                for session in made
                if session._sandbox
                for each in processes(session._sandbox.pid)
            ]
            mark.with_suffix(".new").write_text(" ".join(map(str, pids)))
            mark.with_suffix(".new").rename(mark)
            await asyncio.sleep(60)

        asyncio.run(run())
        return 0

    child = fork(body)
    try:
        deadline = 200
        while not mark.exists() and deadline:
            with contextlib.suppress(psutil.TimeoutExpired):
                psutil.Process(child.pid).wait(0.1)
            deadline -= 1
        pids = [int(pid) for pid in mark.read_text().split()]
        assert len(pids) >= 6
        alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(DEADLINE_S)
    assert not psutil.wait_procs(alive, timeout=DEADLINE_S)[1]


def test_sandboxes_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = TextCalls()
    assert not tool_faults([Sandbox()], calls, is_chat=False)
    for knobs, found in (
        ({"at_once": 0}, "Sandbox(at_once=0)"),
        ({"memory_mb": 1}, "give a whole number of 64 or more"),
        ({"tools": ("ruby",)}, "names no tools that it has"),
        ({"folders": ("here",)}, "give whole paths"),
    ):
        assert found in " ".join(tool_faults([Sandbox(**knobs)], calls, is_chat=False))  # type: ignore[arg-type]
    monkeypatch.setenv("DATAFLOW_BWRAP", "/none")
    (found,) = tool_faults([Sandbox()], calls, is_chat=False)
    assert "needs bubblewrap" in found and "install bubblewrap" in found


def test_a_sandbox_waits_for_its_first_command_with_its_own_limits() -> None:
    async def run() -> None:
        sandbox = KeptSandbox(KeptLimits())
        try:
            await sandbox.ready()
            assert (await sandbox.python("1 + 1", timeout_s=20.0, most_bytes=9)).output == "2\n"
        finally:
            sandbox.kill()

    asyncio.run(run())
