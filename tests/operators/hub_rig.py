"""A small hub on loopback: what `datasets` asks Hugging Face's API of one data set in two
configurations.
"""

import contextlib
import hashlib
import http.server
import io
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

NAME = "openai/gsm8k"
_COMMIT = "a" * 40
_SPLITS = {"train": 3, "test": 1}


def _rows(config: str, split: str) -> bytes:
    rows = [
        {
            "question": f"{config} {split} {number}?",
            "answer": f"It is <<70+{number}={70 + number}>>.\n#### {70 + number}",
        }
        for number in range(_SPLITS[split])
    ]
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


def _files() -> dict[str, bytes]:
    card = ["---", "configs:"]
    files = {}
    for config in ("main", "socratic"):
        card += [f"- config_name: {config}", "  data_files:"]
        for split in _SPLITS:
            card += [f"  - split: {split}", f"    path: {config}/{split}-*"]
            files[f"{config}/{split}-00000-of-00001.parquet"] = _rows(config, split)
    return {"README.md": "\n".join([*card, "---", ""]).encode(), **files}


class _Handler(http.server.BaseHTTPRequestHandler):
    files = _files()

    def log_message(self, *said: object) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self._answer(sends=False)

    def do_GET(self) -> None:
        self._answer(sends=True)

    def _answer(self, *, sends: bool) -> None:
        path = self.path.partition("?")[0]
        resolve, api = f"/datasets/{NAME}/resolve/", f"/api/datasets/{NAME}"
        if path.startswith(resolve):
            name = path.removeprefix(resolve).partition("/")[2]
            if name not in self.files:
                self._send(404, b"", sends, {"X-Error-Code": "EntryNotFound"})
                return
            digest = hashlib.sha1(self.files[name]).hexdigest()
            self._send(
                200, self.files[name], sends, {"ETag": f'"{digest}"', "X-Repo-Commit": _COMMIT}
            )
        elif path.startswith(f"{api}/tree/"):
            self._json(self._tree(path.removeprefix(f"{api}/tree/").partition("/")[2]), sends)
        elif path.startswith(api):
            self._json(
                {
                    "id": NAME,
                    "sha": _COMMIT,
                    "siblings": [{"rfilename": name} for name in self.files],
                },
                sends,
            )
        else:
            self._send(404, b"{}", sends, {"X-Error-Code": "RepoNotFound"})

    def _tree(self, folder: str) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name, data in self.files.items():
            if folder and not name.startswith(f"{folder}/"):
                continue
            rest = name.removeprefix(f"{folder}/") if folder else name
            path = name[: len(name) - len(rest)] + rest.partition("/")[0]
            kind = "directory" if "/" in rest else "file"
            found[path] = {
                "type": kind,
                "path": path,
                "size": len(data),
                "oid": hashlib.sha1(data).hexdigest(),
            }
        return list(found.values())

    def _json(self, value: Any, sends: bool) -> None:
        self._send(200, json.dumps(value).encode(), sends, {"content-type": "application/json"})

    def _send(self, code: int, data: bytes, sends: bool, headers: Mapping[str, str]) -> None:
        self.send_response(code)
        for name, value in {"content-length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if sends:
            self.wfile.write(data)


@contextlib.contextmanager
def hub() -> Iterator[str]:
    """Its address, for HF_ENDPOINT."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10.0)
