"""An engine that follows a script, a tokenizer that merges across turns, and a server on a real
socket.
"""

import asyncio
import contextlib
import json
import socket
import threading
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from rigs.machine import wait_until
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.engine.interface import ABORTED, STOPPED, TOO_LONG, Row
from operators.serving.app import make_app
from operators.serving.serve import attend, bind, make_service

PAD, BEGIN, END = 0, 1, 2
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in"
    " messages %}{% if m.role == 'moderator' %}{{ raise_exception('no moderators') }}{% endif"
    " %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if"
    " add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLED = TEMPLATE.replace(
    "{{ m.content }}",
    '{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}",'
    ' "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}',
)
"""With calls of tools, as Hermes writes them."""
WAIT_S = 20.0


def byte_tokenizer(
    words=("hello", "hell", " world", "ab", "bc", "abc", "user", "assistant"), byte_fallback=False
):
    """Byte-level BPE with a few merges (or characters and <0xNN> tokens), and ChatML's special
    tokens.
    """
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    if byte_fallback:
        letters = ["▁", *"abcdefgh"]
        vocabulary = {
            t: i for i, t in enumerate([*special, *(f"<0x{b:02X}>" for b in range(256)), *letters])
        }
        core = Tokenizer(models.BPE(vocabulary, merges=[], byte_fallback=True))
        core.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        merges, tokens = [], [*special, *alphabet]
        for word in words:
            spelled = byte.pre_tokenize_str(word)[0][0]
            for size in range(2, len(spelled) + 1):
                if spelled[:size] not in tokens:
                    tokens.append(spelled[:size])
                    merges.append((spelled[: size - 1], spelled[size - 1]))
        core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=merges))
        core.pre_tokenizer, core.decoder = byte, decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_llama(vocabulary, context=512, seed=0):
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=None,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


class ScriptedEngine:
    """Writes `script(prompt, seed)` after each prompt, a token a step; a step takes a permit where
    there are any.
    """

    def __init__(self, script, *, slots=8, context_tokens=256, permits=None):
        self.script, self.slots, self.context_tokens, self.permits = (
            script,
            slots,
            context_tokens,
            permits,
        )
        self.version, self.tensors, self.rows, self.started, self.aborted = (
            0,
            {"weight": np.zeros(1)},
            {},
            [],
            [],
        )
        self.broken = None
        self.stepped = self.entered = 0

    live = property(lambda self: len(self.rows))
    free = property(lambda self: self.slots - len(self.rows))
    spare_pages = 1000

    def fitting(self, tokens, wanted, pages, *, idle):
        return (min(wanted, pages), min(wanted, pages))

    def step(self, starts=()):
        self.entered += 1
        if self.permits is not None:
            assert self.permits.acquire(timeout=WAIT_S)
        if self.broken is not None:
            error, self.broken = self.broken, None
            raise error
        self.stepped += 1
        for start in starts:
            self.started.append(start)
            for ticket, seed in zip(start.tickets, start.seeds, strict=True):
                self.rows[ticket] = (start, [], seed)
        ended = []
        for ticket, (start, drawn, seed) in list(self.rows.items()):
            script = self.script(start.prompt.tolist(), seed)
            token = script[len(drawn)]
            drawn.append((token, self.version))
            text = (
                start.stop.find(np.array([t for t, _ in drawn])) if start.stop is not None else None
            )
            full = len(start.prompt) + len(drawn) >= start.limit
            if token == END or text is not None or full:
                reason = TOO_LONG if token != END and text is None else STOPPED
                ended.append(self._row(ticket).ended(reason))
                del self.rows[ticket]
        return ended

    def abort(self, tickets):
        found = [self._row(ticket) for ticket in tickets if ticket in self.rows]
        self.aborted += tickets
        for ticket in tickets:
            self.rows.pop(ticket, None)
        return [row.ended(ABORTED) for row in found]

    def progress(self, ticket):
        return self._row(ticket) if ticket in self.rows else None

    def adopted(self, version):
        self.version = version

    def close(self):
        self.rows.clear()

    def _row(self, ticket):
        start, drawn, seed = self.rows[ticket]
        count = len(drawn)
        tokens, versions = zip(*drawn, strict=True) if drawn else ((), ())
        return Row(
            ticket=ticket,
            age=0,
            tokens=RolloutTokens.joined(
                [
                    RolloutTokens.given(start.prompt),
                    RolloutTokens.drawn(tokens, [-0.5] * count, versions),
                ]
            ),
            start=len(start.prompt),
            limit=start.limit,
            seed=seed,
            sampling=start.sampling,
            stop=start.stop,
        )


def scripted(tokenizer, answer, **knobs):
    """An engine that answers every prompt with a text (or with `answer(prompt text)`) and the end
    token.
    """

    def script(prompt, seed):
        text = answer(tokenizer.decode(prompt)) if callable(answer) else answer
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], END]

    return ScriptedEngine(script, **knobs)


def service_of(engine, tokenizer, rows=None, **knobs):
    """A service whose rollouts go into the list `rows`, as dicts."""
    built = SimpleNamespace(engine=engine, tokenizer=tokenizer, ends=frozenset([END]))
    hear = [] if rows is None else [lambda batch: rows.extend(batch.to_pylist())]
    return make_service(built, model="tiny", on_rollout=hear, **knobs)


@contextlib.contextmanager
def served(service, **knobs):
    """The address of a server with this service, on a real socket."""
    import uvicorn

    listener = bind("127.0.0.1", 0)
    app = make_app(service, **knobs)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=30))
    thread = threading.Thread(
        target=lambda: asyncio.run(attend(server, service, listener, grace_s=0.2))
    )
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), what="the server to start")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive()


def post_and_leave(address, path, body, when):
    """Post JSON on a bare socket and hang up, without reading, once `when()` is true."""
    host, port = address.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length:"
        f" {len(content)}"
    )
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as line:
        line.sendall(head.encode() + b"\r\n\r\n" + content)
        wait_until(when, what="the moment to hang up")
