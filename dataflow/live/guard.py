"""Who gets an answer from the page's server, and under which rules a browser shows it; pure."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names by which a browser on this machine, or at the other end of a tunnel to it, may call the
server. Any other name is a page of somebody else, whose name now leads here."""

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src"
        " 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer."""

NO_TOKEN = (
    "this page is shown to whoever has its whole address; take the one that dataflow live printed"
)
OTHER_SITE = "this page is for a browser on this machine, and answers no other site"
READ_ONLY = (
    "this page is read-only: GET and HEAD are all that is answered; dataflow live --steer serves"
    " one that may"
)
NO_POST = "POST is taken at api/steer alone, as application/json, from the page itself"
STEER = "api/steer"
"""Where a page that may steer sends its requests."""


@dataclass(frozen=True, kw_only=True)
class PageRequest:
    """A request, as its first lines have it."""

    method: str
    target: str
    headers: Mapping[str, str]
    """Names in lower case."""


@dataclass(frozen=True, kw_only=True)
class NotAdmitted:
    """Why there is no answer."""

    status: int
    why: str


def admit(asked: PageRequest, token: str, *, steers: bool = False) -> str | NotAdmitted:
    """The address below the token, with its question: `api/now?run=0`; or why it gets nothing.
    steers: whether requests that change runs are taken."""
    if _is_from_elsewhere(asked.headers):
        return NotAdmitted(status=403, why=OTHER_SITE)
    path, _, question = asked.target.partition("?")
    given, slash, rest = path.removeprefix("/").partition("/")
    if not secrets.compare_digest(given.encode(), token.encode()) or not slash:
        return NotAdmitted(status=403, why=NO_TOKEN)
    if asked.method == "POST" and steers:
        if rest != STEER or not _is_of_the_page(asked.headers):
            return NotAdmitted(status=403, why=NO_POST)
    elif asked.method not in ("GET", "HEAD"):
        return NotAdmitted(status=405, why=READ_ONLY)
    return f"{rest}?{question}" if question else rest


def _is_from_elsewhere(headers: Mapping[str, str]) -> bool:
    """Whether the browser says that another site asks, or calls the server by a name that is not
    this machine's."""
    host = headers.get("host", "")
    if _name(f"//{host}") not in LOOPBACK:
        return True
    if "origin" in headers and headers["origin"] != f"http://{host}":
        return True
    return headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


def _is_of_the_page(headers: Mapping[str, str]) -> bool:
    """Whether a script of the page sends it: a form can name neither this type nor, elsewhere, this
    origin."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return (
        kind == "application/json" and headers.get("origin") == f"http://{headers.get('host', '')}"
    )


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
