"""A minimal client for yaml-language-server."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

VARIABLE = "SEQBLOCKS_YAML_LANGUAGE_SERVER"


def executable() -> str | None:
    """Return the path of the server, from the environment variable or PATH."""
    return os.environ.get(VARIABLE) or shutil.which("yaml-language-server")


class Client:
    """Run one server over its standard streams, with one schema for every file."""

    def __init__(self, schema: Path) -> None:
        command = executable()
        assert command
        self.process = subprocess.Popen([command, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.settings = {
            "yaml": {
                "schemas": {schema.as_uri(): "*.yaml"},
                "schemaStore": {"enable": False},
                "validate": True,
                "completion": True,
                "hover": True,
            }
        }
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.diagnostics: dict[str, queue.Queue[list[dict[str, Any]]]] = {}
        self.number = 0
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()
        try:
            self.request("initialize", {"processId": None, "rootUri": schema.parent.as_uri(), "capabilities": {}})
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
        self.diagnostics[uri] = queue.Queue()
        document = {"uri": uri, "languageId": "yaml", "version": 1, "text": text}
        self.notify("textDocument/didOpen", {"textDocument": document})
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
                return answer.get("result")

    def notify(self, method: str, params: Any) -> None:
        self._send({"method": method, "params": params})

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.process.stdin
        self.process.stdin.write(f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
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
            self._send({"id": message["id"], "result": None})
        elif "id" in message:
            self.answers.put(message)
