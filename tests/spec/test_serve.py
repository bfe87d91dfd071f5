"""The page to edit a spec: what it shows of a text, saving, and who is refused."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import seqblocks
from seqblocks.errors import UsageError
from seqblocks.language.spec_files import bundled
from seqblocks.serve.server import REQUEST_MAX_BYTES, Server, serve
from tests.sampled import sampled

TEXT = "seqblocks: 1\nlet: {dim: 64, kind: silu}\nmodel: {input: {features: dim}, steps: [kind, {linear: 2 * dim}]}\n"
TEXT = TEXT.replace("[kind", "[silu").replace("linear: 2 * dim", "linear: {features: 2 * dim}")
ROOT = Path(__file__).parents[2]
SCRIPT = b'"use strict"'
FILES = ("", b"<!doctype html>"), ("page.css", b":root"), ("backend.js", SCRIPT), ("page.js", SCRIPT)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "spec.yaml"
    found.write_text(TEXT)
    return found


@pytest.fixture
def server(path: Path) -> Iterator[Server]:
    with serve(path) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def ask(server: Server, name: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Return the status and the content of an answer. name: below the token, or a whole path that begins with /."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    where = name if name.startswith("/") else f"/{server.token}/{name}"
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", where, content, headers)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    is_json = (answer.getheader("Content-Type") or "").startswith("application/json")
    return answer.status, json.loads(data) if is_json else data


def test_the_page_and_its_files(server: Server) -> None:
    for name, begin in FILES:
        status, content = ask(server, name)
        assert (status, content[: len(begin)]) == (200, begin)
    status, found = ask(server, "file")
    assert (found["name"], found["text"], found["saves"]) == ("spec.yaml", TEXT, True)


def test_numbers_that_json_does_not_have_are_left_out(server: Server) -> None:
    text = TEXT.replace("{dim: 64,", "{dim: 64, a: .nan, b: .inf, c: -.inf, d: 1.0e+400, e: 0.5, yes_: true,")
    status, found = ask(server, "analyse", {"text": text})
    assert (status, found["let"]) == (200, {"dim": 64, "e": 0.5})


def test_rates_below_one(server: Server, run_main: Any, tmp_path: Path) -> None:
    """An upsampled wire has a fraction of a token of the input for each of its own, which JSON has only as a float."""
    steps = "[{upsample: {factor: 6}}, {downsample: {factor: 3, method: mean}}, {downsample: 4}]"
    (tmp_path / "spec.yaml").write_text(f"seqblocks: 1\nmodel: {{input: {{features: 4}}, steps: {steps}}}\n")
    rates = [1 / 6, 0.5, 2]
    status, found = ask(server, "analyse", {"text": (tmp_path / "spec.yaml").read_text()})
    assert (status, [row["rate"] for row in found["rows"]]) == (200, rates)
    done = run_main("build", tmp_path / "spec.yaml", "--summary", "--format", "json")
    assert (done.returncode, [row["rate"] for row in json.loads(done.stdout)["steps"]]) == (0, rates)


def test_what_is_shown_of_a_text(server: Server) -> None:
    status, found = ask(server, "analyse", {"text": TEXT})
    assert (status, found["ok"], found["problems"], found["let"]) == (200, True, [], {"dim": 64})
    assert [(row["step"], row["params"]) for row in found["rows"]] == [("silu", 0), ("linear", 64 * 128 + 128)]
    assert found["svg"] == seqblocks.draw(seqblocks.analyse(TEXT, "spec.yaml")).svg()
    _, other = ask(server, "analyse", {"text": TEXT, "set": {"let.dim": 32}})
    assert other["rows"][1]["params"] == 32 * 64 + 64
    _, bad = ask(server, "analyse", {"text": TEXT.replace("linear", "liner")})
    (problem,) = bad["problems"]
    assert (problem["code"], problem["line"], problem["fix"]["text"]) == ("E301", 3, "linear")
    assert not bad["ok"]
    assert "E301" in bad["svg"]
    _, none = ask(server, "analyse", {"text": "{"})
    assert none["svg"] is None
    assert none["problems"]


@pytest.mark.parametrize("name", sampled([*bundled()], ci=4, first=1))
def test_all_bundled_specs(name: str) -> None:
    """Files of blocks have no picture."""
    served = serve(bundled()[name])
    with served:
        given = served.served.read()
        found = served.served.analyse(given["text"], {})
        assert found
        assert found["ok"]
        assert (found["svg"] is None) == (not found["rows"])
        json.dumps(found)


def test_it_saves_what_nobody_else_changed(server: Server, path: Path) -> None:
    _, found = ask(server, "file")
    status, saved = ask(server, "save", {"text": TEXT + "# mine\n", "changed": found["changed"]})
    assert (status, saved["written"]) == (200, True)
    assert path.read_text() == TEXT + "# mine\n"
    path.write_text("theirs")
    os.utime(path, ns=(1, 1))
    _, refused = ask(server, "save", {"text": TEXT, "changed": saved["changed"]})
    assert refused["written"] is False
    assert path.read_text() == "theirs"
    assert [each.name for each in path.parent.iterdir()] == ["spec.yaml"]


def test_a_change_while_the_file_is_read_is_not_overwritten(
    server: Server, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page then has the old text, and its next save is refused."""
    read = Path.read_text

    def interrupted(self: Path, *given: Any) -> str:
        text = read(self, *given)
        path.write_text("theirs")
        os.utime(path, ns=(1, 1))
        return text

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", interrupted)
        _, found = ask(server, "file")
    assert found["text"] == TEXT
    _, refused = ask(server, "save", {"text": TEXT + "# mine\n", "changed": found["changed"]})
    assert refused["written"] is False
    assert path.read_text() == "theirs"


def test_saving_keeps_the_mode_and_a_link(server: Server, path: Path) -> None:
    real = path.with_name("real.yaml")
    path.rename(real)
    path.symlink_to(real)
    real.chmod(0o600)
    _, found = ask(server, "file")
    _, saved = ask(server, "save", {"text": TEXT + "#\n", "changed": found["changed"]})
    assert saved["written"]
    assert path.is_symlink()
    assert real.read_text() == TEXT + "#\n"
    assert real.stat().st_mode & 0o777 == 0o600


def test_saving_keeps_line_ends(server: Server, path: Path) -> None:
    path.write_bytes(TEXT.replace("\n", "\r\n").encode())
    _, found = ask(server, "file")
    assert found["text"] == TEXT
    ask(server, "save", {"text": TEXT + "# mine\n", "changed": found["changed"]})
    assert path.read_bytes() == (TEXT + "# mine\n").replace("\n", "\r\n").encode()


def test_a_bundled_spec_is_not_saved() -> None:
    place = bundled()["mlstm_small"]
    with serve(place) as found:
        before = found.served.read()
        assert not before["saves"]
        with pytest.raises(UsageError, match="bundled spec"):
            found.served.save("x", before["changed"])
    assert place.read_text("utf-8") == before["text"]


def test_who_is_refused(server: Server) -> None:
    own = f"127.0.0.1:{server.server_port}"
    assert ask(server, "", Host="evil.example")[0] == 403
    assert ask(server, "", Origin="http://evil.example")[0] == 403
    assert ask(server, "", Host=own, Origin=f"http://{own}")[0] == 200
    for where in ("/", "/page.js", f"/{server.token}", "/wrong/page.js", f"/x{server.token}/"):
        assert ask(server, where)[0] == 403
    for name in ("../server.py", "server.py", "/etc/passwd", "file/../../x"):
        assert ask(server, f"/{server.token}/{name}")[0] == 404
    assert ask(server, "other", {"text": ""})[0] == 404
    for body in (b"", b"[]", b"{", b'{"text": 3}', b'{"text": "", "set": 3}', b"[" * 100_000):
        assert ask(server, "analyse", body)[0] == 400
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.putrequest("POST", f"/{server.token}/analyse")
    connection.putheader("Content-Length", str(REQUEST_MAX_BYTES + 1))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_overrides_that_are_wrong_are_problems(server: Server) -> None:
    status, found = ask(server, "analyse", {"text": TEXT, "set": {"let.dim": 0}})
    assert status == 200
    assert found["problems"]
    status, found = ask(server, "analyse", {"text": TEXT, "set": {"no.such.name": 1}})
    assert status == 200
    assert found.get("problems") or found.get("error")


def test_a_port_that_is_taken(server: Server, path: Path) -> None:
    with pytest.raises(UsageError, match=f"port {server.server_port} cannot be used"):
        serve(path, server.server_port)
    with pytest.raises(UsageError, match="cannot be used"):
        serve(path, 70_000)


def hear_interrupts() -> None:
    """Undo that a shell lets the processes of a background job ignore SIGINT, which they inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a process that a failed test leaves."""
    try:
        yield
    finally:
        process.kill()


def test_the_command_ends_at_once(path: Path) -> None:
    """It prints the address, answers, and does not load torch; SIGINT ends it, as any command."""
    command = [sys.executable, "-m", "seqblocks", "serve", str(path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, preexec_fn=hear_interrupts
    ) as process, ending(process):
        assert process.stdout
        address = process.stdout.readline().strip()
        host, token = address.removeprefix("http://").rstrip("/").split("/")
        connection = http.client.HTTPConnection(host, timeout=20)
        connection.request("GET", f"/{token}/file")
        assert json.loads(connection.getresponse().read())["text"] == TEXT
        connection.close()
        process.send_signal(2)
        assert process.wait(10) == 130


def test_the_script_of_the_page(server: Server, path: Path) -> None:
    """Totals, table, picture, a problem with its repair, a slider, and saving, in Node."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("runs the script of the page, which needs Node")
    path.with_name("blocks.yaml").write_text("seqblocks: 1\nblocks:\n  mine: {step: [silu]}\n")
    scripts = [str(ROOT / "seqblocks" / "serve" / name) for name in ("backend.js", "page.js")]
    command = [node, str(Path(__file__).with_name("page_in_node.mjs")), server.address, *scripts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    counts = f"{64 * 128 + 128:,} parameters", f"{32 * 64 + 64:,} parameters"
    assert counts[0] in shown["totals"]
    assert counts[1] in shown["moved"]
    assert (shown["text"], shown["repaired"], shown["rows"]) == (TEXT, TEXT, 3)
    assert (shown["sliders"], shown["picture"]) == (["dim"], True)
    assert "E301: there is no verb 'liner'" in shown["problem"]
    assert shown["elsewhere"].startswith(f"{path.with_name('blocks.yaml')}:3:10 E201")
    assert not shown["marked"]  # a line with that number
    assert shown["strides"] == [1, 1, 6, 1733, 1, 1]
    assert path.read_text() == TEXT + "# mine\n"


def test_it_does_not_load_torch() -> None:
    code = "import sys, seqblocks.serve; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
