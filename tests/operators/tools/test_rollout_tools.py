"""Laws of a rollout's tools: what they raise is told, how long and how much is bounded, what has
died is no result.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from dataflow.errors import OperatorError, WorldFailed
from operators.chat.chat_format import Message
from operators.chat.tool_calls import TextCalls
from operators.episodes.chat import Chats, Reply
from operators.tools.toolbox import RolloutTools, TookTooLong, Toolbox, tool_faults


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: The other.
    """
    return a + b


async def fetch(what: str) -> Any:
    """Does what it is told.

    Args:
        what: To do.
    """
    match what:
        case "raise":
            raise KeyError("nothing there")
        case "hang":
            await asyncio.sleep(60)
        case "much":
            return "x" * (10 << 20)
        case "exit":
            raise SystemExit(3)
        case "die":
            raise WorldFailed("the service is gone")
        case "odd":
            return "\ud800"
    return {"what": what}


def block(seconds: float) -> str:
    """Blocks.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "done"


class Kit:
    """A toolset whose sessions are counted."""

    at_once, ahead, uses = 2, 0, 1

    def __init__(self, name: str = "poke", *, dies: bool = False, is_shared: bool = False) -> None:
        self.name, self.dies, self.is_shared = name, dies, is_shared
        self.opened = self.closed = self.most = 0

    def faults(self) -> Sequence[str]:
        return []

    def definitions(self) -> Sequence[Message]:
        parameters = {
            "type": "object",
            "properties": {"how": {"type": "string"}},
            "required": ["how"],
        }
        return [
            {
                "type": "function",
                "function": {"name": self.name, "description": "", "parameters": parameters},
            }
        ]

    async def open(self) -> "KitSession":
        if self.dies:
            raise WorldFailed("no session to be had")
        self.opened += 1
        self.most = max(self.most, self.opened - self.closed)
        return KitSession(self)


class KitSession:
    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.calls = 0

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float, characters: int
    ) -> str:
        self.calls += 1
        await asyncio.sleep(0)
        match arguments["how"]:
            case "late":
                raise TookTooLong(f"took more than {timeout_s:g} s")
            case "hang":
                await asyncio.sleep(60)
            case "die":
                raise WorldFailed("the session is gone")
        return f"{arguments['how']} {self.calls}"

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.kit.closed += 1


CALLS = TextCalls(begin="[", end="]", result="<{}>")


def box(*tools: Any, timeout_s: float = 20.0, characters: int = 100) -> Toolbox:
    return Toolbox(tools, calls=CALLS, form=None, timeout_s=timeout_s, characters=characters)


def played(made: Toolbox, *texts: str) -> list[str]:
    """What a policy that says these texts hears."""

    async def play() -> list[str]:
        tools, results = RolloutTools(made), []
        try:
            for text in texts:
                results += await tools.results(tools.read(text).message["tool_calls"])
        finally:
            await tools.close()
            await made.close()
        return results

    return asyncio.run(play())


def test_a_call_is_made_with_the_functions_own_arguments() -> None:
    assert played(box(add, fetch), "[add(2, 3)] [fetch('it')]") == ["5", '{"what": "it"}']


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("[fetch('raise')]", "error: KeyError: 'nothing there'"),
        ("[fetch('exit')]", "error: SystemExit: 3"),
        ("[fetch('hang')]", "error: 'fetch' took more than 0.2 s"),
        ("[block(60)]", "error: 'block' took more than 0.2 s"),
        ("[add(1, 'x')]", "error: TypeError: unsupported operand type(s) for +: 'int' and 'str'"),
        ("[add(1)]", "error: 'add' needs ['b']; found ['a']; give each of them"),
        (
            "[sub(1)]",
            "error: there is no tool 'sub'; there are ['add', 'block', 'fetch']; call one of these",
        ),
        ("[fetch('odd')]", "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_what_goes_wrong_in_a_call_is_told_to_the_policy(call: str, told: str) -> None:
    limit_s = 0.2 if "took more" in told else 20.0
    assert played(box(add, fetch, block, timeout_s=limit_s), call) == [told]


def test_a_long_answer_is_cut() -> None:
    (heard,) = played(box(fetch), "[fetch('much')]")
    assert heard == "x" * 100 + f"\n[cut: {10 << 20} characters in all]"


def test_functions_that_block_hold_nobody_up() -> None:
    async def many() -> float:
        made, began = box(block, timeout_s=20.0), time.monotonic()

        async def one() -> None:
            tools = RolloutTools(made)
            assert await tools.results(tools.read("[block(1.0)]").message["tool_calls"]) == ["done"]

        await asyncio.gather(*(one() for _ in range(20)))
        return time.monotonic() - began

    assert asyncio.run(many()) < 20 * 1.0, "not one after the other"


def test_calls_for_which_a_turn_has_no_time_are_not_made() -> None:
    made = Toolbox([add], calls=CALLS, form=None, timeout_s=1.0, characters=9, turn_s=1.0)
    assert played(made, "[add(2, 3)]") == ["error: there is no time left in this turn"]


def test_calls_that_never_come_back_are_no_tool_any_more() -> None:
    from operators.tools.toolbox import ToolThreads

    release = threading.Event()

    def waits() -> None:
        release.wait(60.0)

    async def lost() -> None:
        threads = ToolThreads(most=1)
        with pytest.raises(TookTooLong):
            await threads.call(waits, {}, 0.01)
        with pytest.raises(WorldFailed, match="1 calls of tools never came back"):
            await threads.call(block, {"seconds": 0.0}, 20.0)
        release.set()
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:  # until it has come back
            try:
                assert await threads.call(block, {"seconds": 0.0}, 20.0) == "done"
                return
            except WorldFailed:
                await asyncio.sleep(0.05)
        pytest.fail("a call that has come back is no lost one")

    asyncio.run(lost())


# Sessions


def test_a_session_is_kept_over_the_turns_of_a_rollout_and_closed_behind_it() -> None:
    kit = Kit()
    assert played(box(kit), "[poke('a')]", "[poke('b')]") == ["a 1", "b 2"]
    assert (kit.opened, kit.closed) == (1, 1)


def test_no_more_sessions_are_alive_than_there_may_be_and_the_clock_rests_meanwhile() -> None:
    kit, rested = Kit(), []

    class Rest:
        def __enter__(self) -> None:
            rested.append(1)

        def __exit__(self, *_: object) -> None:
            rested.append(-1)

    async def many() -> None:
        made = box(kit)

        async def one(number: int) -> None:
            tools = RolloutTools(made, Rest)
            result = await tools.results(tools.read(f"[poke('{number}')]").message["tool_calls"])
            assert result == [f"{number} 1"], "each has a session of its own"
            await tools.close()

        await asyncio.gather(*(one(number) for number in range(9)))
        await made.close()

    asyncio.run(many())
    assert kit.opened == kit.closed == 9 and kit.most == 2
    assert sum(rested) == 0 and len(rested) == 18


def test_rollouts_with_several_toolsets_never_wait_for_each_other() -> None:
    """One needs the first and then the second, the other the second and then the first; there is
    one of each.
    """
    one, two = Kit("one"), Kit("two")
    one.at_once = two.at_once = 1

    async def both() -> None:
        made = box(one, two)

        async def run(*calls: str) -> None:
            tools = RolloutTools(made)
            for call in calls:
                await tools.results(tools.read(call).message["tool_calls"])
            await tools.close()

        async with asyncio.timeout(20.0):
            await asyncio.gather(run("[one('a')]", "[two('b')]"), run("[two('a')]", "[one('b')]"))
        await made.close()

    asyncio.run(both())


@pytest.mark.parametrize(
    ("how", "found"), [("die", "the session is gone"), ("hang", "gave no answer for")]
)
def test_a_session_that_dies_is_the_worlds_failure_and_is_remembered(
    how: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operators.tools.toolbox.GRACE_S", 0.1)
    kit, made = Kit(), None

    async def play() -> None:
        nonlocal made
        made = box(kit, timeout_s=0.2 if how == "hang" else 20.0)
        tools = RolloutTools(made)
        with pytest.raises(WorldFailed, match=found):
            await tools.results(tools.read(f"[poke('{how}')]").message["tool_calls"])
        assert tools.failure is not None and found in str(tools.failure)
        await tools.close()
        await made.close()

    asyncio.run(play())
    assert kit.opened == kit.closed == 1


def test_a_shared_session_serves_all_and_is_followed_by_another_where_it_dies() -> None:
    kit = Kit(is_shared=True)

    async def all_of_them() -> list[str]:
        made = box(kit)

        async def one(how: str) -> list[str]:
            tools = RolloutTools(made)
            try:
                return await tools.results(tools.read(f"[poke('{how}')]").message["tool_calls"])
            finally:
                await tools.close()

        await asyncio.gather(*(one("a") for _ in range(8)))
        assert kit.opened == 1 and kit.closed == 0
        with pytest.raises(WorldFailed):
            await one("die")
        found = await one("b")
        await made.close()
        return found

    assert asyncio.run(all_of_them()) == ["b 1"] and kit.opened == kit.closed == 2


def test_a_shared_session_that_could_not_be_had_gives_way_to_one_that_can_and_no_other() -> None:
    """Two have waited for it; the first of them asks again at once."""
    kit = Kit(is_shared=True, dies=True)

    async def work() -> None:
        made = box(kit)

        async def twice() -> None:
            with pytest.raises(WorldFailed):
                await made.shared(0)
            kit.dies = False
            await made.shared(0)

        async def once() -> None:
            with pytest.raises(WorldFailed):
                await made.shared(0)

        await asyncio.gather(twice(), once())
        assert await made.shared(0) is await made.shared(0)
        await made.close()

    asyncio.run(work())
    assert kit.opened == kit.closed == 1


def test_a_call_that_took_too_long_for_its_session_is_told() -> None:
    assert played(box(Kit(), timeout_s=0.2), "[poke('late')]") == [
        "error: 'poke' took more than 0.2 s"
    ]


def test_a_session_that_cannot_be_had_is_the_worlds_failure() -> None:
    with pytest.raises(WorldFailed, match="no session to be had"):
        played(box(Kit(dies=True)), "[poke('a')]")


# The chat


class Policy:
    """Says what it is to say."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.asked = list(texts), list[bytes]()

    async def __call__(self, body: bytes) -> bytes:
        import json

        self.asked.append(body)
        return json.dumps(self.texts.pop(0) if self.texts else None).encode()

    def rest(self) -> Any:
        import contextlib

        return contextlib.nullcontext()


def test_tools_are_used_until_the_policy_calls_none() -> None:
    import json

    async def play() -> tuple[Reply, list[list[str]]]:
        policy = Policy("[add(1, 2)]", "[add(1]", "3", "more")
        chat = Chats(policy, tools=RolloutTools(box(add))).begin()
        reply = await chat.use_tools()
        return reply, [json.loads(body)[0] for body in policy.asked]

    reply, heard = asyncio.run(play())
    assert reply == "3" and reply.tool_calls == () and reply.content == "3"
    assert heard[0] == [] and heard[1] == ["<3>"]
    assert len(heard[2]) == 1 and heard[2][0].startswith("<error: a call cannot be read")


def test_a_chat_without_tools_says_so() -> None:
    chat = Chats(Policy("[add(1, 2)]")).begin()

    async def play() -> None:
        reply = await chat.say()
        assert reply == "[add(1, 2)]" and reply.tool_calls == ()
        await chat.call(reply)

    with pytest.raises(OperatorError, match="the episode has no tools"):
        asyncio.run(play())


# The chat


# What is refused


def bare(a, b: int) -> int:  # type: ignore[no-untyped-def]
    """Has no hint."""
    return b


def undocumented(a: int) -> int:
    return a


def spread(*values: int) -> int:
    """Takes any."""
    return len(values)


@pytest.mark.parametrize(
    ("tools", "calls", "is_chat", "found"),
    [
        ([bare], CALLS, False, "tool 'bare' has ['a'], which no schema describes"),
        ([undocumented], CALLS, False, "tool 'undocumented' has no docstring"),
        ([spread], CALLS, False, "tool 'spread' has ['*values: int']"),
        (["add"], CALLS, False, "'add' is no tool"),
        ([add], None, False, "no chat template that says how they are called"),
        ([], CALLS, True, "but no tool that could be called"),
    ],
)
def test_tools_that_cannot_be_are_refused(
    tools: list[Callable[..., Any]], calls: TextCalls | None, is_chat: bool, found: str
) -> None:
    assert found in " ".join(tool_faults(tools, calls, is_chat=is_chat))


def test_tools_of_one_name_are_refused() -> None:
    from operators.chat.chat_format import ChatError

    with pytest.raises(ChatError, match="two tools have one name"):
        box(Kit("add"), add)
