"""OpenEnv and NeMo-Gym over their wires, against servers that speak as theirs do and count their
sessions.
"""

import asyncio
import json
from functools import partial
from typing import Any

import pytest
from rigs.machine import wait_until
from rigs.worlds.servers import Served, nemo_gym, openenv
from test_playing import Spoken

from dataflow.errors import WorldFailed
from operators.environments import environment
from operators.environments.declaration import PlayedEnvironment
from operators.environments.openenv_wire import OpenEnvSession


def played(world: PlayedEnvironment, chat: Spoken, task: dict[str, Any]) -> float:
    return asyncio.run(bounded(world, chat, task))


async def bounded(world: PlayedEnvironment, chat: Spoken, task: dict[str, Any]) -> float:
    async with asyncio.timeout(30):
        value: float = await world(chat, prompt="", task=json.dumps(task))
        return value


def all_are_back(served: Served) -> None:
    wait_until(lambda: served.open == 0, what="the end of all sessions")


class TestOpenEnv:
    @pytest.fixture(autouse=True)
    def there(self) -> None:
        pytest.importorskip(
            "websockets", reason="websockets is not installed; pip install dataflow-rl[openenv]"
        )

    def world(self, served: Served, **knobs: Any) -> PlayedEnvironment:
        return environment(
            f"openenv:{served.url}", **{"options": {"field": "message"}, "timeout_s": 20.0, **knobs}
        )

    def test_an_episode_is_a_connection(self) -> None:
        with openenv() as served:
            chat = Spoken(["a", '{"message": "z"}', "b"])
            assert played(self.world(served), chat, {"seed": 7, "turns": 3}) == 2.0
            all_are_back(served)
        assert chat.heard == ["7=", "a=", "z=", "b="] and chat.rewards == [1.0, 0.0, 1.0]
        assert served.resets == [{"seed": 7, "turns": 3}]

    @pytest.mark.parametrize(
        ("schema", "knobs", "found"),
        [
            (None, {}, "found status 404 at /schema"),
            ("<html>", {}, "found JSONDecodeError"),
            ("{}", {}, "found KeyError: 'action'"),
            ('{"action": {"type": "object"}}', {}, "found an action"),
            (None, {"options": {"field": "message"}}, None),
            (None, {"action": json.loads}, None),
            ('{"action": {"properties": {"a": {}, "b": {}}}}', {}, None),
        ],
    )
    def test_a_server_that_does_not_say_what_an_action_is_is_found_out_before_anybody_plays(
        self, schema: str | None, knobs: dict[str, Any], found: str | None
    ) -> None:
        with openenv(schema=schema) as served:
            world = self.world(served, **{"options": {}, **knobs})
            said = asyncio.run(world.look()) if world.can_look else None
            assert served.started == 0
        assert (
            said == found
            if found is None or said is None
            else found in said and "says nowhere what" in said
        )

    def test_what_is_no_json_that_a_server_could_take_is_the_text_of_an_action(self) -> None:
        session = OpenEnvSession(None, "message", {})
        for said in (
            '{"message": 1e999}',
            '{"message": "\\ud83d"}',
            "[" * 100_000,
            '{"message": NaN}',
        ):
            assert session.read(said) == {"message": said}

    def test_a_server_that_is_away_when_it_is_looked_at_says_nothing(self) -> None:
        assert asyncio.run(environment("openenv:ws://127.0.0.1:9").look()) is None

    def test_a_full_server_is_waited_for(self) -> None:
        from websockets.asyncio.client import connect

        async def work(served: Served) -> float:
            async with connect(f"{served.url}/ws"):  # somebody else's session
                waiting = asyncio.ensure_future(
                    bounded(self.world(served), Spoken(["a", "b"]), {"seed": 7})
                )
                while served.refused < 2 and not waiting.done():
                    await asyncio.sleep(0.01)
                assert not waiting.done(), waiting
            return await waiting

        with openenv(capacity=1) as served:
            assert asyncio.run(work(served)) == 2.0
            all_are_back(served)
        assert served.most == 1

    def test_pings_of_the_server_are_answered_in_a_long_generation(self) -> None:
        class Slow(Spoken):
            async def say(self, *, max_tokens: int | None = None) -> str:
                wanted = served.pongs + 3
                while served.pongs < wanted:  # until `bounded` gives up
                    await asyncio.sleep(0.01)
                return await super().say(max_tokens=max_tokens)

        with openenv(ping_s=0.05) as served:
            assert played(self.world(served), Slow(["a", "b"]), {"seed": 7}) == 2.0
            all_are_back(served)

    def test_a_server_that_thinks_and_answers_no_ping_keeps_its_session(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As it would not with the library's own pings, which close who is silent for 20 s; for
        less here.
        """
        from websockets.asyncio import client

        monkeypatch.setattr(
            client, "connect", partial(client.connect, ping_interval=0.05, ping_timeout=0.05)
        )
        with openenv() as served:
            assert played(self.world(served), Spoken(["think", "a"]), {"seed": 7}) == 1.0
            all_are_back(served)

    def test_an_action_that_the_server_does_not_take_is_the_policys_to_mend(self) -> None:
        with openenv() as served:
            chat = Spoken(['{"message": 4}', "a", "b"])
            assert played(self.world(served), chat, {"seed": 7}) == 2.0
            all_are_back(served)
        assert chat.heard[1].startswith("That is no action; Invalid message")

    @pytest.mark.parametrize(
        ("said", "found"),
        [
            ("die", r"could not go on; found ConnectionClosed"),
            ("mute", r"could not go on; found no answer within 3 s"),
            ("shout", r"could not go on; found ConnectionClosedError.*too big"),
            ("broken", r"the server could not step; found EXECUTION_ERROR: 'no disk'"),
        ],
    )
    def test_a_server_that_fails_is_the_worlds_failure_and_the_session_comes_back(
        self, said: str, found: str
    ) -> None:
        with openenv() as served:
            with pytest.raises(WorldFailed, match=found):
                played(
                    self.world(served, timeout_s=3.0 if said == "mute" else 20.0),
                    Spoken([said]),
                    {"seed": 7},
                )
            all_are_back(served)

    def test_a_server_that_is_not_there_is_named(self) -> None:
        wrong = (
            r"no session of 'openenv:ws://127.0.0.1:9' could be started; found"
            r" ConnectionRefusedError"
        )
        with pytest.raises(WorldFailed, match=wrong):
            played(
                environment("openenv:ws://127.0.0.1:9", timeout_s=0.3), Spoken(["a"]), {"seed": 7}
            )

    def test_a_server_that_is_started_again_is_waited_for_and_no_lost_connection_is_used(
        self,
    ) -> None:
        """What a pool holds idle ends with the first server; the next episode has a connection to
        the second.
        """

        async def work() -> list[float]:
            with openenv() as first:
                world, port = self.world(first, timeout_s=20.0), int(first.url.rpartition(":")[2])
                found = [await bounded(world, Spoken(["a", "b"]), {"seed": 7})]
                assert first.open == 1, "it is idle"
            await asyncio.sleep(0.2)  # for its end to be heard
            playing = asyncio.ensure_future(bounded(world, Spoken(["a", "z"]), {"seed": 8}))
            await asyncio.sleep(0.5)
            assert not playing.done(), "nobody listens"
            with openenv(port=port) as second:
                found.append(await playing)
                assert second.resets == [{"seed": 8}]
            return found

        assert asyncio.run(work()) == [2.0, 1.0]


ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "add 1, then 2"}]},
    "initial_count": 3,
    "expected_count": 6,
}


class TestNemoGym:
    @pytest.fixture(autouse=True)
    def there(self) -> None:
        pytest.importorskip(
            "httpx", reason="httpx is not installed; pip install dataflow-rl[nemo-gym]"
        )

    def world(self, served: Served, **knobs: Any) -> PlayedEnvironment:
        return environment(f"nemo-gym:{served.url}", **{"timeout_s": 10.0, **knobs})

    def test_a_server_that_is_away_is_asked_again_before_a_session_begins(self) -> None:
        async def work() -> float:
            with nemo_gym() as first:
                world, port = self.world(first), int(first.url.rpartition(":")[2])
            playing = asyncio.ensure_future(
                bounded(world, Spoken(["it is 3"]), {**ROW, "expected_count": 3})
            )
            await asyncio.sleep(0.3)
            assert not playing.done(), "nobody listens"
            with nemo_gym(port=port):
                return await playing

        assert asyncio.run(work()) == 1.0

    def test_tools_are_run_and_the_whole_trajectory_is_verified(self) -> None:
        def call(count: int) -> str:
            return (
                f'<tool_call>{{"name": "increment", "arguments": {{"count": {count}}}}}</tool_call>'
            )

        with nemo_gym() as served:
            chat = Spoken([call(1), f"so: {call(2)}", "it is 6"])
            assert played(self.world(served), chat, ROW) == 1.0
            all_are_back(served)
        assert chat.heard == ['{"success":true}', '{"success":true}'] and chat.rewards == [
            0.0,
            0.0,
            1.0,
        ]
        routes = [route for route, _ in served.bodies]
        assert routes == ["/seed_session", "/increment", "/increment", "/verify"]
        verified = served.bodies[-1][1]
        assert {key: verified[key] for key in ROW} == ROW
        kinds = [item["type"] for item in verified["response"]["output"]]
        assert kinds == [
            "function_call",
            "function_call_output",
            "message",
            "function_call",
            "function_call_output",
            "message",
        ]

    def test_a_turn_that_a_busy_server_did_not_take_stands_in_the_trajectory_once(self) -> None:
        with nemo_gym() as served:
            served.busy = 2
            assert (
                played(self.world(served), Spoken(["it is 3"]), {**ROW, "expected_count": 3}) == 1.0
            )
        verified = [
            body["response"]["output"] for route, body in served.bodies if route == "/verify"
        ]
        assert [len(output) for output in verified] == [1, 1, 1]

    def test_a_tool_that_is_not_there_is_the_policys_to_read(self) -> None:
        with nemo_gym() as served:
            chat = Spoken(['<tool_call>{"name": "fly", "arguments": {}}</tool_call>', "no"])
            assert played(self.world(served), chat, ROW) == 0.0
        assert chat.heard == ["Not Found"]

    @pytest.mark.parametrize("name", ["verify", "seed_session", "../verify", "increment?x=1"])
    def test_no_route_but_those_of_tools_is_the_policys_to_call(self, name: str) -> None:
        with nemo_gym() as served:
            chat = Spoken(
                [f'<tool_call>{{"name": "{name}", "arguments": {{"count": 3}}}}</tool_call>', "no"]
            )
            assert played(self.world(served), chat, ROW) == 0.0
        assert chat.heard == [f"error: there is no tool {name!r}"]
        assert [route for route, _ in served.bodies] == ["/seed_session", "/verify"]

    def test_where_a_row_names_its_tools_there_are_no_others(self) -> None:
        tools = [{"type": "function", "name": "increment", "parameters": {}}]
        row = {**ROW, "responses_create_params": {**ROW["responses_create_params"], "tools": tools}}  # type: ignore[dict-item]
        call = '<tool_call>{"name": "%s", "arguments": {"count": 3}}</tool_call>'
        with nemo_gym() as served:
            chat = Spoken([call % "break", call % "increment", "6"])
            assert played(self.world(served), chat, row) == 1.0
        assert chat.heard == ["error: there is no tool 'break'", '{"success":true}']

    def test_steps_have_rewards_and_the_session_is_closed_where_the_server_says_so(self) -> None:
        with nemo_gym() as served:
            chat = Spoken(["a", "z"])
            assert played(self.world(served, options={"protocol": "step"}), chat, ROW) == 1.0
            assert chat.heard == ["deal", "a=", "z="] and chat.rewards == [1.0, 0.0]
            all_are_back(served)

    def test_a_tool_that_breaks_is_the_worlds_failure(self) -> None:
        with (
            nemo_gym() as served,
            pytest.raises(WorldFailed, match=r"tool break failed; found status 500: 'no disk'"),
        ):
            played(
                self.world(served),
                Spoken(['<tool_call>{"name": "break", "arguments": {}}</tool_call>']),
                ROW,
            )
