"""Starts a server: python -m operators.serving --model FOLDER [--record FILE] [--port N]."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.errors import DataflowError, GraphError
from dataflow.system.interrupts import asked_to_end, interrupted, status_of
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

BAD_INPUT = 2
"""Exit status where an argument cannot be right."""
BACKLOG = 1024
"""Connections that may wait to be accepted, and that may be open."""
LAST_ANSWERS_S = 2
"""Seconds for answers to go out, after calls that were not over have been ended."""


@interrupted()
def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted; what is wrong with the arguments is one line on stderr and exit
    status 2.
    """
    arguments = _parser().parse_args(argv)
    try:
        key = _key(arguments.api_key_env)
        check_address(arguments.host, key)
        return serve(arguments, key)
    except DataflowError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt as error:
        return status_of(error)


def serve(arguments: argparse.Namespace, key: str | None) -> int:
    """Load the model and answer calls until a signal comes."""
    import uvicorn

    from dataflow.model import Model
    from dataflow.runtime import Context
    from operators.generator import Generator
    from operators.serving.app import make_app
    from operators.serving.rows import RolloutLog

    template = None if arguments.chat_template is None else read_template(arguments.chat_template)
    model = Model(arguments.model, dtype=arguments.dtype, context_tokens=arguments.context_tokens)
    declaration = Generator(
        model=model,
        slots=arguments.slots,
        cache_bytes=arguments.cache_bytes,
        name="serving",
    )
    faults = declaration.faults()
    if faults:
        raise GraphError("; ".join(faults))
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(bind(arguments.host, arguments.port))
        record = None if arguments.record is None else RolloutLog(arguments.record)
        if record is not None:
            opened.callback(record.close)
        from operators.engine.build import make_engine

        built = make_engine(
            declaration, Context(node="serving", device=arguments.device, threads=arguments.threads)
        )
        service = make_service(
            built,
            model=arguments.served_name or model.name,
            record=record,
            most_waiting=arguments.most_waiting,
            chat_template=template,
            chat_template_kwargs=arguments.chat_template_kwargs,
            vocabulary=built.engine.vocabulary,
            call_timeout_s=arguments.call_timeout,
        )
        app = make_app(service, api_key=key)
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                limit_concurrency=BACKLOG,
                timeout_graceful_shutdown=arguments.grace + LAST_ANSWERS_S,
            )
        )
        listener.listen(BACKLOG)
        _announce(service, listener, record)
        # uvicorn heeds but SIGHUP itself
        with asked_to_end(lambda _: setattr(server, "should_exit", True)):
            asyncio.run(attend(server, service, listener, grace_s=arguments.grace))
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m operators.serving", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="FOLDER", help="Hugging Face folder, or an id on the hub")
    add(
        "--served-name",
        metavar="NAME",
        help="what callers put in the field model; default: the folder's name",
    )
    add("--host", default="127.0.0.1", help="loopback, or any address together with --api-key-env")
    add("--port", type=int, default=8000, help="TCP port, 0 for any; default: 8000")
    add(
        "--api-key-env",
        metavar="NAME",
        help="environment variable with the key that callers must send",
    )
    add(
        "--record",
        type=Path,
        metavar="FILE",
        help="append every call's rollouts to this Arrow IPC stream",
    )
    add("--slots", type=int, default=64, help="rollouts decoded together; default: 64")
    add(
        "--context-tokens",
        type=int,
        help="most tokens of prompt and completion; default: the model's limit",
    )
    add("--cache-bytes", type=int, help="memory of the KV-cache; default: a share of what is free")
    add(
        "--most-waiting",
        type=int,
        default=256,
        help="prompts that may wait for a slot; default: 256",
    )
    add(
        "--call-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds a call may take; default: 600",
    )
    add(
        "--grace",
        type=int,
        default=5,
        metavar="S",
        help="seconds for calls to end at shutdown; default: 5",
    )
    add("--device", default="cpu", help="cpu, or cuda:N")
    add("--dtype", default="float32", help="float32, bfloat16 or float16")
    add("--threads", type=int, default=os.cpu_count() or 1, help="torch threads on a CPU")
    add(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja template instead of the tokenizer's own",
    )
    add(
        "--chat-template-kwargs",
        type=_object,
        metavar="JSON",
        help='its options, as {"enable_thinking": false}',
    )
    return parser


def _object(text: str) -> dict[str, Any]:
    """A JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


if __name__ == "__main__":
    sys.exit(main())
