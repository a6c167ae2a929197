"""Starts a server: python -m operators.serving --model FOLDER [--record FILE] [--port N]."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.errors import DataflowError, GraphError
from dataflow.flags.declared import Declared
from dataflow.flags.words import page, split, values_of
from dataflow.system.interrupts import asked_to_end, interrupted, status_of
from operators.serving.errors import CALL_TIMEOUT_S
from operators.serving.serve import (
    attend,
    bind,
    check_address,
    make_service,
    read_template,
)

if TYPE_CHECKING:
    import socket

    from operators.serving.rows import RolloutLog
    from operators.serving.service import Service

PROGRAM = "python -m operators.serving"
BAD_INPUT = 2
"""Exit status where an argument cannot be right."""
BACKLOG = 1024
"""Connections that may wait to be accepted, and that may be open."""
LAST_ANSWERS_S = 2
"""Seconds for answers to go out, after calls that were not over have been ended."""


@interrupted()
def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted; what is wrong with the flags is said on stderr, with exit status
    2.
    """
    arguments = sys.argv[1:] if argv is None else argv
    try:
        flags = Declared.of(serve).flags
        if {"-h", "--help"} & {*arguments}:
            print(page(PROGRAM, "Serve a model until a signal comes.", flags.values()))
            return 0
        return serve(**values_of(split(arguments, flags, "the server"), flags, "it", PROGRAM))
    except DataflowError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt as error:
        return status_of(error)


def serve(
    *,
    model: str,
    served_name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key_env: str | None = None,
    record: Path | None = None,
    slots: int = 64,
    context_tokens: int | None = None,
    cache_bytes: int | None = None,
    most_waiting: int = 256,
    call_timeout: float = CALL_TIMEOUT_S,
    grace: int = 5,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int = os.cpu_count() or 1,
    chat_template: Path | None = None,
    chat_template_kwargs: str = "",
) -> int:
    """Load the model and answer calls until a signal comes.

    Args:
        model: Hugging Face folder, or an id on the hub.
        served_name: what callers put in the field model; by default the folder's name.
        host: loopback, or any address together with --api-key-env.
        port: TCP port, 0 for any.
        api_key_env: environment variable with the key that callers must send.
        record: append every call's rollouts to this Arrow IPC stream.
        slots: rollouts decoded together.
        context_tokens: most tokens of prompt and completion; by default the model's limit.
        cache_bytes: memory of the KV-cache; by default a share of what is free.
        most_waiting: prompts that may wait for a slot.
        call_timeout: seconds a call may take.
        grace: seconds for calls to end at shutdown.
        device: cpu, or cuda:N.
        dtype: float32, bfloat16 or float16.
        threads: torch threads on a CPU.
        chat_template: Jinja template instead of the tokenizer's own.
        chat_template_kwargs: its options in JSON, as {"enable_thinking": false}.
    """
    import uvicorn

    from dataflow.model import Model
    from dataflow.runtime import Context, DeviceShare
    from operators.generator import Generator
    from operators.serving.app import make_app
    from operators.serving.rows import RolloutLog

    key = _key(api_key_env)
    check_address(host, key)
    template = None if chat_template is None else read_template(chat_template)
    options = _object("--chat-template-kwargs", chat_template_kwargs or "{}")
    served = Model(model, dtype=dtype, context_tokens=context_tokens)
    declaration = Generator(model=served, slots=slots, cache_bytes=cache_bytes, name="serving")
    faults = declaration.faults()
    if faults:
        raise GraphError("; ".join(faults))
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(bind(host, port))
        log = None if record is None else RolloutLog(record)
        if log is not None:
            opened.callback(log.close)
        from operators.engine.build import make_engine

        share = DeviceShare(device=device, threads=threads)
        built = make_engine(declaration, Context(node="serving", devices=share))
        service = make_service(
            built,
            model=served_name or served.name,
            record=log,
            most_waiting=most_waiting,
            chat_template=template,
            chat_template_kwargs=options,
            vocabulary=built.engine.vocabulary,
            call_timeout_s=call_timeout,
        )
        app = make_app(service, api_key=key)
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                limit_concurrency=BACKLOG,
                timeout_graceful_shutdown=grace + LAST_ANSWERS_S,
            )
        )
        listener.listen(BACKLOG)
        _announce(service, listener, log)
        # uvicorn heeds but SIGHUP itself
        with asked_to_end(lambda _: setattr(server, "should_exit", True)):
            asyncio.run(attend(server, service, listener, grace_s=grace))
        print(f"ended; {service.recorded} rollouts were recorded", flush=True)
    return 0


def _announce(service: Service, listener: socket.socket, record: RolloutLog | None) -> None:
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    print(
        f"serving '{service.model}' at http://{address}/v1, up to"
        f" {service.thread.engine.context_tokens} tokens a call",
        (
            "rollouts are not kept; give --record FILE"
            if record is None
            else f"rollouts are appended to {record.path}"
        ),
        "end with Ctrl-C",
        sep="\n",
        flush=True,
    )


def _key(variable: str | None) -> str | None:
    """The API key in an environment variable. Raises GraphError where there is none."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise GraphError(
            f"no API key was found: the environment variable {variable} is empty or unset;"
            " export one"
        )
    return key


def _object(flag: str, text: str) -> dict[str, Any]:
    """A JSON object. Raises GraphError for another text."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise GraphError(f"{flag} takes a JSON object; found {text:.60}; write {{...}}")
    return value


if __name__ == "__main__":
    sys.exit(main())
