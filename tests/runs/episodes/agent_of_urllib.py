"""An agent program with the standard library alone: it imports nothing of the product, and plays
what its task says.

The prompt is `LETTER NUMBER =`; the answer is what it does: a number of turns, or how it goes
wrong.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request


def post(
    path: str, body: dict, key: str = os.environ.get("OPENAI_API_KEY", ""), root: str = "/v1"
) -> dict:
    """POST to the endpoint, as OpenAI's clients do."""
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + root + path
    headers = {
        "Authorization": f"Bearer {key or os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    request = urllib.request.Request(url, json.dumps({"model": "any", **body}).encode(), headers)
    with urllib.request.urlopen(request, timeout=50) as answer:
        return json.load(answer)


def converse(turns: int, prompt: str, **more: object) -> list:
    """What each call sent and was answered, as ids; the world repeats the first letter of each
    turn.
    """
    messages, seen = [{"role": "user", "content": prompt}], []
    for number in range(turns):
        body = {
            "messages": messages,
            "max_tokens": 4,
            "return_token_ids": True,
            "logprobs": True,
            **more,
        }
        answer = post("/chat/completions", body)
        choice = answer["choices"][0]
        logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
        seen.append([answer["prompt_token_ids"], choice["token_ids"], logprobs])
        said = choice["message"]["content"] or ""
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"{number}{said[:1]}="},
        ]
    return seen


def main() -> None:
    """Do what the answer says, and print what was seen."""
    task = json.load(sys.stdin)
    does, prompt = task["answer"], task["prompt"]
    if does.isdigit():
        print("thinking\n")
        print(json.dumps(converse(int(does), prompt)))
        return
    if does in ("required", "add"):
        tools = [
            {"type": "function", "function": {"name": name, "parameters": {}}}
            for name in ("add", "b")
        ]
        choice = does if does == "required" else {"type": "function", "function": {"name": does}}
        print(json.dumps(converse(3, prompt, tools=tools, tool_choice=choice)))
        return
    first = [{"role": "user", "content": prompt}]
    if does == "silent":
        print(1)
        return
    said = post("/chat/completions", {"messages": first, "max_tokens": 4})["choices"][0]["message"][
        "content"
    ]
    match does:
        case "raises":
            raise ValueError("the agent is broken")
        case "hangs":
            subprocess.Popen(["sleep", "987"], start_new_session=True)
            time.sleep(60)
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "is unlucky":
            print("the judge is away", file=sys.stderr)
            sys.exit(75)
        case "abstains":
            print("null")
        case "stops":
            found = []
            for end in (int(prompt), int(prompt) + 1):
                sampling = {"max_tokens": 4, "stop_token_ids": [end]}
                try:
                    post(
                        "/inference/v1/generate",
                        {"token_ids": [end], "sampling_params": sampling},
                        root="",
                    )
                    found.append(200)
                except urllib.error.HTTPError as error:
                    found.append(error.code)
            print(json.dumps(found == [200, 400]))
        case "shouts":
            print("a" * (10 << 20))
        case "nests":
            print("[" * 100_000)
        case "mumbles":
            print("no number")
        case "rewrites":
            post(
                "/chat/completions",
                {"messages": [{"role": "user", "content": "b2="}], "max_tokens": 4},
            )
            print(1)
        case "again":
            post("/chat/completions", {"messages": first, "max_tokens": 4})
            print(1)
        case "parallel":
            more = [
                *first,
                {"role": "assistant", "content": said or ""},
                {"role": "user", "content": "c="},
            ]
            calls = [
                threading.Thread(
                    target=post, args=("/chat/completions", {"messages": more, "max_tokens": 4})
                )
                for _ in range(2)
            ]
            for call in calls:
                call.start()
            for call in calls:
                call.join()
            print(1)
        case "strange":
            try:
                post("/chat/completions", {"messages": first, "max_tokens": 4}, key="sk-of-nobody")
            except urllib.error.HTTPError as error:
                print(error.code)
        case "endless":
            messages = first
            while True:
                messages = [
                    *messages,
                    {"role": "assistant", "content": said or ""},
                    {"role": "user", "content": "d="},
                ]
                answer = post("/chat/completions", {"messages": messages, "max_tokens": 4})
                said = answer["choices"][0]["message"]["content"]


if __name__ == "__main__":
    main()
