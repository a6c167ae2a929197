"""What agents send, outside a run and in one: developers' messages, begun turns, options, stops and
wishes.
"""

import contextlib

import numpy as np
import pytest
from serving_rig import END, TEMPLATE, TOOLED, byte_tokenizer, scripted, service_of
from starlette.testclient import TestClient
from tokenizers import AddedToken

from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.agents.programs import TurnsInRun
from operators.agents.runtime import RunService
from operators.engine.interface import STOPPED
from operators.serving.app import make_app
from operators.serving.work import News

STRICT = TOOLED.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'developer' or (m.role == 'system' and not loop.first)"
    " %}{{ raise_exception('no ' + m.role) }}{% endif %}",
    1,
)


"""One system message at the beginning, and no developer's, as Qwen 3.5's."""


THINKING = TEMPLATE.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is false %}<no>{% endif %}{% endif %}",
)


USER = {"role": "user", "content": "hello"}


CHAT = {"model": "tiny", "messages": [USER], "max_tokens": 32}


HEAD = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@contextlib.contextmanager
def calling(template, rows, answer="hello world", **knobs):
    """Posts JSON to a server whose tokenizer has this template; gives the answer."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    service = service_of(scripted(tokenizer, answer, context_tokens=2048), tokenizer, rows, **knobs)
    with TestClient(make_app(service), base_url="http://127.0.0.1") as client:

        def post(path, body, status=200):
            said = client.post(path, json=body)
            assert said.status_code == status, said.text
            return said.json()

        post.get = client.get
        yield post


class AnsweredTurns(TurnsInRun):
    """A generator that says the same to every call, and remembers the calls."""

    def __init__(self, tokenizer):
        super().__init__(2048)
        self.sessions.add("key")
        self.works, self.ids = (
            [],
            [*tokenizer("hello world", add_special_tokens=False)["input_ids"], END],
        )

    def submit(self, works):
        super().submit(works)
        self.works += works
        drawn = RolloutTokens.drawn(self.ids, [-0.5] * len(self.ids), [0] * len(self.ids))
        works[0].tell(News(0, drawn, STOPPED))


@contextlib.contextmanager
def in_run(template=TOOLED, **knobs):
    """Posts JSON to the endpoint of a run; the works that its generator was asked for."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    turns = AnsweredTurns(tokenizer)
    service = RunService(turns, tokenizer, model="policy", past="sampled", **{"stop": (), **knobs})
    with TestClient(
        make_app(service, sessions=turns.sessions), base_url="http://127.0.0.1"
    ) as client:

        def post(path, body, status=200):
            said = client.post(path, json=body, headers={"authorization": "Bearer key"})
            assert said.status_code == status, said.text
            return said.json()

        yield post, turns.works
    turns.let_go()


def prompt_of(rows, tokenizer=None):
    """What the model saw in the last call."""
    row = rows[-1]
    return byte_tokenizer().decode(np.array(row["tokens"])[~np.array(row["mask"])])


@pytest.mark.parametrize("template", [TOOLED, STRICT])
def test_developers_messages_are_laid_out_whatever_the_template_knows(rows, template):
    developer, late = (
        {"role": "developer", "content": "be brief"},
        {"role": "developer", "content": "now long"},
    )
    with calling(template, rows) as post:
        post("/v1/chat/completions", {**CHAT, "messages": [developer, USER]})
        assert prompt_of(rows) == f"<|im_start|>system\nbe brief<|im_end|>\n{HEAD}"
        post(
            "/v1/chat/completions",
            {
                **CHAT,
                "messages": [developer, USER, {"role": "assistant", "content": "a"}, late, USER],
            },
        )
        assert "now long" in prompt_of(rows)
        asked = {
            "model": "tiny",
            "instructions": "be kind",
            "input": [{"type": "message", **developer}, USER],
        }
        post("/v1/responses", asked)
        assert "be kind" in prompt_of(rows) and "be brief" in prompt_of(rows)
        post(
            "/v1/messages",
            {
                **CHAT,
                "system": "be kind",
                "messages": [USER, {"role": "system", "content": "be brief"}],
            },
        )
        assert "be kind" in prompt_of(rows) and "be brief" in prompt_of(rows)


def test_what_coding_agents_send_beside_is_taken_as_their_servers_take_it(rows):
    anthropic = {
        **CHAT,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": []},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "u"},
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "text", "text": "yes", "cache_control": {"type": "ephemeral"}},
                ],
            },
            USER,
        ],
    }
    codex = {
        "model": "tiny",
        "instructions": "i",
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"},
        "prompt_cache_key": "k",
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [{"type": "web_search"}],
        "client_metadata": {},
        "input": [
            {"type": "message", **USER},
            {"type": "reasoning", "summary": [], "encrypted_content": "x"},
            USER,
        ],
    }
    with calling(TOOLED, rows) as post:
        assert post("/v1/messages", anthropic)["content"][0]["text"] == "hello world"
        assert (
            "yes" in prompt_of(rows)
            and "thinking" not in prompt_of(rows)
            and "web_search" not in prompt_of(rows)
        )
        assert post("/v1/responses", codex)["status"] == "completed"
        post("/v1/chat/completions", {**CHAT, "reasoning_effort": "low", "verbosity": "low"})
        post("/v1/messages", {**CHAT, "output_config": {"format": {"type": "json_schema"}}}, 400)
        post("/v1/responses", {**codex, "text": {"format": {"type": "json_object"}}}, 400)
        post("/v1/responses", {**codex, "tools": [{"type": "code_interpreter"}]}, 400)
        counted = post("/v1/messages/count_tokens", {"model": "tiny", "messages": [USER]})
        post("/v1/messages", CHAT)
        assert counted == {"input_tokens": int((~np.array(rows[-1]["mask"])).sum())}
        assert (
            post("/v1/messages/count_tokens", {"model": "other", "messages": [USER]}, 404)["type"]
            == "error"
        )
        model = post.get("/v1/models/tiny").json()
        assert (model["id"], model["object"], model["type"]) == ("tiny", "model", "model")
        assert post.get("/v1/models").json()["data"] == [model]
        assert post.get("/v1/models/some/other").status_code == 404


@pytest.mark.parametrize("begun", ["It is", "<think>\n"])
def test_a_turn_that_the_caller_has_begun_is_gone_on_with(rows, begun):
    """As Anthropic's server does with a last message of the assistant's, and vLLM's where it is
    asked to.
    """
    beginning = [USER, {"role": "assistant", "content": begun}]
    with calling(TOOLED, rows) as post:
        said = post("/v1/messages", {**CHAT, "messages": beginning})
        assert prompt_of(rows) == HEAD + begun and said["content"] == [
            {"type": "text", "text": "hello world"}
        ]
        asked = {
            **CHAT,
            "messages": beginning,
            "continue_final_message": True,
            "add_generation_prompt": False,
        }
        assert (
            post("/v1/chat/completions", asked)["choices"][0]["message"]["content"] == "hello world"
        )
        assert prompt_of(rows) == HEAD + begun and rows[-1]["parent_rollout_id"] is None
        whole = {"role": "assistant", "content": begun + "hello world"}
        post("/v1/messages", {**CHAT, "messages": [USER, whole, USER]})
        assert rows[-1]["tokens"][: len(rows[-2]["tokens"])] == rows[-2]["tokens"], (
            "it goes on with the ids of the turn"
        )
        assert rows[-1]["parent_rollout_id"] == rows[-2]["rollout_id"]
        post("/v1/chat/completions", {**CHAT, "messages": beginning})
        assert prompt_of(rows) == f"{HEAD}{begun}<|im_end|>\n<|im_start|>assistant\n", (
            "OpenAI's opens another turn"
        )
        post("/v1/chat/completions", {**CHAT, "continue_final_message": True}, 400)
        post("/v1/chat/completions", {**CHAT, "add_generation_prompt": False}, 400)


def test_options_of_the_chat_template_are_a_calls_or_the_servers(rows):
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    with calling(THINKING, rows) as post:
        post("/v1/chat/completions", CHAT)
        assert prompt_of(rows) == HEAD
        answer = post("/v1/chat/completions", {**CHAT, **off})["choices"][0]["message"]
        assert prompt_of(rows) == HEAD + "<no>"
        post("/v1/chat/completions", {**CHAT, **off, "messages": [USER, answer, USER]})
        assert rows[-1]["tokens"][: len(rows[-2]["tokens"])] == rows[-2]["tokens"]
        post("/v1/chat/completions", {**CHAT, "chat_template_kwargs": [1]}, 400)
    with calling(THINKING, rows, **off) as post:
        post("/v1/chat/completions", CHAT)
        assert prompt_of(rows) == HEAD + "<no>"
    with in_run(THINKING, options=off["chat_template_kwargs"]) as (post, works):
        post("/v1/chat/completions", CHAT)
        assert byte_tokenizer().decode(works[-1].prompt) == HEAD + "<no>"


WISHED = {
    "temperature": 0.1,
    "top_p": 0.5,
    "frequency_penalty": 0.1,
    "presence_penalty": -0.5,
    "logit_bias": {"5": -100},
}


def test_how_a_turn_is_sampled_is_granted_or_refused_by_a_server_and_set_aside_by_a_run(rows):
    """One rule for all: what would change what is drawn is done, or refused by name; in a run the
    run samples.
    """
    refused = [
        {name: WISHED[name]} for name in ("frequency_penalty", "presence_penalty", "logit_bias")
    ]
    ids = {"model": "tiny", "token_ids": [5, 6]}
    with calling(TOOLED, rows) as post:
        for wish in refused:
            assert (
                post("/v1/chat/completions", {**CHAT, **wish}, 400)["error"]["code"]
                == "unsupported_parameter"
            )
            post(
                "/inference/v1/generate", {**ids, "sampling_params": {"max_tokens": 4, **wish}}, 400
            )
            post("/v1/responses", {"model": "tiny", "input": "hello", **wish}, 400)
            post("/v1/messages", {**CHAT, **wish}, 400)
        post(
            "/v1/chat/completions",
            {**CHAT, "temperature": 0.1, "frequency_penalty": 0, "logit_bias": {}},
        )
    with in_run() as (post, works):
        post("/v1/chat/completions", {**CHAT, **WISHED, "seed": 7})
        post("/v1/completions", {"model": "tiny", "prompt": "hello", **WISHED})
        post("/inference/v1/generate", {**ids, "sampling_params": {"max_tokens": 4, **WISHED}})
        post(
            "/v1/responses", {"model": "tiny", "input": "hello", **WISHED, "seed": 7, "min_p": 0.1}
        )
        post("/v1/messages", {**CHAT, **WISHED, "seed": 7})
        assert [work.sampling for work in works] == [None] * 5
        for wrong in (
            {"temperature": -1},
            {"temperature": "hot"},
            {"top_p": 2},
            {"response_format": {"type": "json_object"}},
        ):
            post("/v1/chat/completions", {**CHAT, **wrong}, 400)


def test_a_run_ends_turns_at_its_generators_own_stops_and_a_calls(rows):
    with in_run(stop=("own",), ends=frozenset([END])) as (post, works):
        post("/v1/chat/completions", {**CHAT, "stop": ["<|im_start|>", "b"]})
        assert works[-1].stop == ("<|im_start|>", "b", "own")
        said = post("/v1/chat/completions", {**CHAT, "stop": ["\n<|im_end|>"]}, 400)["error"]
        assert (
            said["param"] == "stop"
            and "has no special tokens; found '<|im_end|>' in it" in said["message"]
        )


def test_a_stop_that_is_a_special_token_is_its_id_wherever_the_tokenizer_names_it(rows):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<|eot|>", special=True)])
    engine = scripted(tokenizer, "hello<|eot|> world")
    with TestClient(
        make_app(service_of(engine, tokenizer, rows)), base_url="http://127.0.0.1"
    ) as client:
        for stop in (["<|eot|>"], ["x", "<|eot|>"]):
            said = client.post("/v1/messages", json={**CHAT, "stop_sequences": stop}).json()
            assert said["content"] == [{"type": "text", "text": "hello"}]
            assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", "<|eot|>")
        eot = tokenizer.convert_tokens_to_ids("<|eot|>")
        said = client.post("/v1/chat/completions", json={**CHAT, "stop_token_ids": [eot]}).json()
        assert said["choices"][0]["message"]["content"] == "hello"
        said = client.post("/v1/chat/completions", json={**CHAT, "stop": "<|eot|>\n"})
        assert said.status_code == 400 and "give '<|eot|>' alone" in said.json()["error"]["message"]


@pytest.mark.parametrize(
    ("ending", "answer"), [("<|eot|>", "hello<|eot|> world"), ("[END]", "hello[END] world")]
)
def test_a_chat_ends_where_its_template_ends_a_turn(rows, ending, answer):
    """Of a template that the server was given too, whose end the engine does not know; a token, or
    a text.
    """
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<|eot|>", special=True)])
    template = TEMPLATE.replace("<|im_end|>", ending)
    service = service_of(scripted(tokenizer, answer), tokenizer, rows, chat_template=template)
    with TestClient(make_app(service), base_url="http://127.0.0.1") as client:
        said = client.post("/v1/messages", json=CHAT).json()
        assert (said["content"], said["stop_reason"]) == (
            [{"type": "text", "text": "hello"}],
            "end_turn",
        )
        assert tokenizer.decode(rows[-1]["tokens"]).endswith(f"assistant\nhello{ending}")
        asked = [USER, {"role": "assistant", "content": "hello"}, USER]
        client.post("/v1/messages", json={**CHAT, "messages": asked})
        text = tokenizer.decode(rows[-1]["tokens"])
        assert (
            f"assistant\nhello{ending}\n<|im_start|>user" in text
            and rows[-1]["parent_rollout_id"] == 0
        )
        assert client.post("/v1/completions", json={"model": "tiny", "prompt": "a"}).json()[
            "choices"
        ][0]["text"]
