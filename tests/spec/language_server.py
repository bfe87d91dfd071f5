"""A minimal client for language servers."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VARIABLE = "SEQBLOCKS_YAML_LANGUAGE_SERVER"


def executable() -> str | None:
    """Return the path of the server, from the environment variable or PATH."""
    return os.environ.get(VARIABLE) or shutil.which("yaml-language-server")


class ServerError(Exception):
    """The server answered a request with an error."""


class Client:
    """Run one server over its standard streams. settings: what it may ask for."""

    def __init__(
        self, command: Sequence[str], root: Path, settings: dict[str, Any],
        capabilities: dict[str, Any] | None = None, options: Any = None, errors: Any = None,
    ) -> None:  # fmt: skip
        """errors: a file for what the server prints."""
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        self.settings = settings
        self.header = "Content-Length: {}\r\n"
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.diagnostics: dict[str, queue.Queue[list[dict[str, Any]]]] = {}
        self.asked: list[str] = []  # what the server asked the client to do
        self.shown: list[str] = []  # messages for the user
        self.number = 0
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()
        try:
            about = {"processId": None, "rootUri": root.as_uri(), "capabilities": capabilities or {}}
            about |= {"initializationOptions": options} if options is not None else {}
            self.capabilities = self.request("initialize", about)["capabilities"]
            self.notify("initialized", {})
            self.notify("workspace/didChangeConfiguration", {"settings": self.settings})
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.process.kill()
        self.listener.join(timeout=10)
        with self.process:  # closes the streams
            pass

    def open(self, uri: str, text: str) -> list[dict[str, Any]]:
        """Open a document and return its diagnostics."""
        self.diagnostics.setdefault(uri, queue.Queue())
        self.tell(uri, text)
        return self.diagnostics[uri].get(timeout=30)

    def tell(self, uri: str, text: str, version: int = 0) -> None:
        """Open a document (version 0) or replace its text, without waiting for diagnostics."""
        document = {"uri": uri, "version": version}
        if version:
            self.notify("textDocument/didChange", {"textDocument": document, "contentChanges": [{"text": text}]})
        else:
            document |= {"languageId": "yaml", "text": text}
            self.notify("textDocument/didOpen", {"textDocument": document})

    def change(self, uri: str, text: str, version: int) -> list[dict[str, Any]]:
        """Replace the text of a document and return its diagnostics."""
        self.tell(uri, text, version)
        return self.diagnostics[uri].get(timeout=30)

    def complete(self, uri: str, line: int, column: int) -> list[str]:
        """Return the completions at a position (line and column from 0)."""
        place = {"textDocument": {"uri": uri}, "position": {"line": line, "character": column}}
        found = self.request("textDocument/completion", place)
        items = found["items"] if isinstance(found, dict) else found or []
        return [item["label"] for item in items]

    def request(self, method: str, params: Any) -> Any:
        self.number += 1
        self._send({"id": self.number, "method": method, "params": params})
        while True:
            answer = self.answers.get(timeout=30)
            if answer["id"] == self.number:
                if "error" in answer:
                    raise ServerError(answer["error"]["message"])
                return answer.get("result")

    def notify(self, method: str, params: Any) -> None:
        self._send({"method": method, "params": params})

    def answer_to(self, text: str) -> tuple[Any, int]:
        """Return the id and the code of the error that answers a text."""
        self._write(text.encode("latin-1"))
        answer = self.answers.get(timeout=30)
        return answer["id"], answer["error"]["code"]

    def _send(self, message: dict[str, Any]) -> None:
        self._write(json.dumps({"jsonrpc": "2.0", **message}).encode())

    def _write(self, data: bytes) -> None:
        assert self.process.stdin
        self.process.stdin.write((self.header.format(len(data)) + "\r\n").encode() + data)
        self.process.stdin.flush()

    def _listen(self) -> None:
        stream = self.process.stdout
        assert stream
        while header := stream.readline():
            length = 0
            while header.strip():
                name, _, value = header.decode().partition(":")
                length = int(value) if name.lower() == "content-length" else length
                header = stream.readline()
            self._take(json.loads(stream.read(length)))

    def _take(self, message: dict[str, Any]) -> None:
        method = message.get("method")
        if method == "textDocument/publishDiagnostics":
            uri = message["params"]["uri"]
            if uri in self.diagnostics:
                self.diagnostics[uri].put(message["params"]["diagnostics"])
        elif method == "workspace/configuration":
            sections = [self.settings.get(item.get("section"), None) for item in message["params"]["items"]]
            self._send({"id": message["id"], "result": sections})
        elif method and "id" in message:
            self.asked.append(method)
            with contextlib.suppress(BrokenPipeError):  # the server may have ended meanwhile
                self._send({"id": message["id"], "result": None})
        elif method == "window/showMessage":
            self.shown.append(message["params"]["message"])
        elif "id" in message:
            self.answers.put(message)


def yaml_client(schema: Path) -> Client:
    """Run yaml-language-server with one schema for every file."""
    command = executable()
    assert command
    settings = {"schemas": {schema.as_uri(): "*.yaml"}, "schemaStore": {"enable": False}}
    settings |= dict.fromkeys(("validate", "completion", "hover"), True)
    return Client([command, "--stdio"], schema.parent, {"yaml": settings})
