"""The server of the page: Python's own, on the loopback interface, for whoever knows the address with its token."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

from seqblocks.analysis.analyse import Folders
from seqblocks.errors import SeqblocksError, UsageError
from seqblocks.language.spec_files import bundled
from seqblocks.language.writing import write_text
from seqblocks.serve.shown import shown

REQUEST_MAX_BYTES = 4 << 20  # of a request: a spec has at most 2 MB
PAGE = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "backend.js": ("backend.js", "text/javascript"),
    "page.js": ("page.js", "text/javascript"),
}
POLICY = "default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self'; connect-src 'self'"


class Served:
    """A spec that is edited: its file, or the text of a bundled spec, which cannot be saved."""

    def __init__(self, path: Path, allow_use: Folders = ()) -> None:
        self.path, self.allow_use = path, allow_use
        self.can_save = path.resolve() not in {each.resolve() for each in bundled().values()}
        self.lock = threading.Lock()
        self.latest = 0  # number of the newest request to analyse

    def read(self) -> dict[str, Any]:
        """Return the file as it is now."""
        changed = self._changed()  # before the text: what is written meanwhile must differ from it
        return {"name": self.path.name, "text": self.path.read_text("utf-8"), "changed": changed,
                "saves": self.can_save}  # fmt: skip

    def _changed(self) -> str:
        """Return when the file was changed, as text: JavaScript would round the number."""
        return str(self.path.stat().st_mtime_ns)

    def save(self, text: str, changed: str) -> dict[str, Any]:
        """Write the file unless it changed since it was read; return what `read` does, and whether it was written."""
        if not self.can_save:
            raise UsageError("a bundled spec cannot be changed: save it under another name")
        with self.lock:
            if self.path.exists() and self._changed() != changed:
                return {**self.read(), "written": False}
            ends = "\r\n" if self.path.exists() and b"\r\n" in self.path.read_bytes() else "\n"  # a page has only \n
            write_text(self.path, text.replace("\n", ends))
            return {**self.read(), "written": True}

    def analyse(self, text: str, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what the page shows of a text; None if a newer one arrived meanwhile."""
        self.latest += 1
        own = self.latest
        with self.lock:
            if own != self.latest:
                return None
            return shown(text, self.path.name, values, self.path.parent, self.allow_use)


class Handler(BaseHTTPRequestHandler):
    """Answer requests that come from the page itself: the right host, origin and token."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = self._name()
        if name in PAGE:
            file, kind = PAGE[name]
            self._answer(files(__package__).joinpath(file).read_bytes(), kind)
        elif name == "file":
            self._run(self.server.served.read)
        elif name is not None:
            self.send_error(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        name = self._name()
        if name is None:
            return
        length = self.headers.get("Content-Length") or ""
        if not length.isdigit() or int(length) > REQUEST_MAX_BYTES:
            self.close_connection = True
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        body = self.rfile.read(int(length))
        try:
            given = json.loads(body)
            text, values, changed = given["text"], given.get("set") or {}, given.get("changed") or ""
            if not isinstance(text, str) or not isinstance(changed, str) or not isinstance(values, dict):
                raise TypeError
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        served = self.server.served
        if name == "analyse":
            self._run(lambda: served.analyse(text, values))
        elif name == "save":
            self._run(lambda: served.save(text, changed))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _name(self) -> str | None:
        """Return the path below the token, or None after refusing the request."""
        own = f"127.0.0.1:{self.server.server_port}"
        hosts = {own, f"localhost:{self.server.server_port}"}
        origin = self.headers.get("Origin")
        known = self.headers.get("Host") in hosts and (origin is None or origin in {f"http://{host}" for host in hosts})
        token, slash, name = self.path.removeprefix("/").partition("/")
        if known and slash and secrets.compare_digest(token.encode(), self.server.token.encode()):
            return name
        self.close_connection = True
        self.send_error(HTTPStatus.FORBIDDEN)
        return None

    def _run(self, work: Any) -> None:
        """Answer with the result of a function as JSON, or with its error."""
        try:
            found = work()
        except (SeqblocksError, OSError, UnicodeDecodeError) as error:
            found = {"error": str(error)}
        self._answer(json.dumps(found).encode(), "application/json")

    def _answer(self, content: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Print nothing: requests come with each key."""


class Server(ThreadingHTTPServer):
    """A server on a port of the loopback interface. address: of the page."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = False

    def __init__(self, served: Served, port: int) -> None:
        self.served, self.token = served, secrets.token_urlsafe(16)
        super().__init__(("127.0.0.1", port), Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"


def serve(path: Path, port: int = 0, allow_use: Folders = ()) -> Server:
    """Return a server of the page for a spec; `serve_forever` runs it. port: 0 for any that is free.

    Raises UsageError if the file cannot be read, or if the port is taken.
    """
    served = Served(path, allow_use)
    try:
        served.read()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text in UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return Server(served, port)
    except (OSError, OverflowError) as error:
        raise UsageError(f"port {port} cannot be used: {getattr(error, 'strerror', None) or error}") from None
