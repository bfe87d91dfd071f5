"""The language server `seqblocks lsp`, over its standard streams."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import seqblocks
from seqblocks.editor.opened import is_spec
from seqblocks.errors import Span
from tests.spec.language_server import Client, ServerError, executable

ROOT = Path(__file__).parents[2]
FAULTS = sorted((Path(__file__).parents[1] / "golden" / "faults").glob("*.yaml"))
FAULTS = [path for path in FAULTS if not path.stem.endswith("not_utf8")]  # an editor decodes the text
COMMAND = [sys.executable, "-m", "seqblocks", "lsp"]
TEXT = """\
seqblocks: 1
use: [prenorm]
let: {dim: 64, wide: 2 * dim}
model:
  input: {features: dim}
  steps:
    - linear: {features: wide, as: x}   # 🙂
    - silu
    - linear: {from: x, features: dim}
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    found = Client(COMMAND, tmp_path_factory.mktemp("specs"), {})
    yield found
    found.close()


def at(uri: str, text: str, word: str, nth: int = 0) -> dict[str, Any]:
    """Return the parameters of a request at the nth occurrence of a word in a text."""
    offset = -1
    for _ in range(nth + 1):
        offset = text.index(word, offset + 1)
    before = text[:offset].split("\n")
    column = len(before[-1].encode("utf-16-le")) // 2
    return {"textDocument": {"uri": uri}, "position": {"line": len(before) - 1, "character": column}}


def whole(uri: str) -> dict[str, Any]:
    end = {"line": 10_000, "character": 0}
    return {"textDocument": {"uri": uri}, "range": {"start": {"line": 0, "character": 0}, "end": end}}


def test_diagnostics_have_exact_ranges_after_an_emoji_and_with_crlf(client: Client) -> None:
    steps = "[{linear: {features: 4, as: x}}, {linear: {features: 4, from: y}}]"
    line = f"{{seqblocks: 1, about: 🙂🙂, model: {{input: {{features: 4}}, steps: {steps}}}}}"
    (wire,) = client.open("file:///emoji.yaml", f"# first\r\n{line}\r\n")
    column = len(line[: line.index("y}")].encode("utf-16-le")) // 2
    assert wire["code"] == "E302"
    assert wire["range"] == {"start": {"line": 1, "character": column}, "end": {"line": 1, "character": column + 1}}


@pytest.mark.slow
def test_the_faults_of_all_examples_are_those_of_check(client: Client) -> None:
    """Published ranges are those of the analysis, also after an emoji and with the line ends of Windows."""
    compared = 0
    for at, path in enumerate(FAULTS):
        text = path.read_bytes().decode()
        others = f"# 🙂\n{text}", re.sub("\r?\n", "\r\n", text)
        for number, changed in enumerate((text, others[at % 2])):
            target = path.with_name(f"{path.stem}_{number}.yaml")
            expected = seqblocks.analyse(changed, str(target), path.parent).diagnostics
            spans = [each.span for each in expected if each.span and each.span.source.name == str(target)]
            if not is_spec(changed) or len(spans) < len(expected):
                continue  # those without a place in this file are shown elsewhere
            wanted = [(each.code, *in_utf16(span)) for each, span in zip(expected, spans, strict=True)]
            shown = client.open(target.as_uri(), changed)
            ends = [(each["code"], each["range"]["start"], each["range"]["end"]) for each in shown]
            found = [(code, *start.values(), *end.values()) for code, start, end in ends]
            assert found == wanted, target.name
            compared += 1
    assert compared > len(FAULTS)


def in_utf16(span: Span) -> tuple[int, ...]:
    """Return a range of the protocol, counted in another way than by the server."""
    lines = re.split("(?<=\n)", span.source.text)
    ends = []
    for line, column in ((span.line, span.column), (span.end_line, span.end_column)):
        before = lines[line - 1][: column - 1] if line <= len(lines) else ""
        ends += [line - 1, len(before.encode("utf-16-le")) // 2]
    return tuple(ends)


def test_diagnostics_follow_the_edits(client: Client) -> None:
    uri = "file:///edits.yaml"
    assert client.open(uri, TEXT) == []
    (fault,) = client.change(uri, TEXT.replace("- silu", "- slu"), 2)
    assert fault["code"] == "E301"
    assert fault["range"]["start"] == {"line": 7, "character": 6}
    assert client.change(uri, TEXT, 3) == []


def test_other_yaml_is_left_alone(client: Client) -> None:
    uri = "file:///compose.yaml"
    client.diagnostics[uri] = queue.Queue()
    others = (
        "services: {web: [a, b]\n", "version: 3\nservices: {web: {seqblocks: 1}}\n", "- version\n- seqblocks: 1\n",
        "# version of seqblocks: 1\non: [push]\njobs: {version: {steps: [{run: make}]}}\n", "version",
    )  # fmt: skip
    for version, text in enumerate(others):
        client.tell(uri, text, version)
        assert client.request("textDocument/inlayHint", whole(uri)) == []
        assert client.request("textDocument/hover", at(uri, "version", "version")) is None
    assert client.diagnostics[uri].empty()


def test_a_used_file_gets_its_own_diagnostics(client: Client, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("seqblocks: 1\nblocks: {mine: {steps: [silu, sillu]}}\n")
    uri, used = (tmp_path / "spec.yaml").as_uri(), (tmp_path / "mine.yaml").as_uri()
    text = "seqblocks: 1\nuse: [./mine.yaml]\nmodel: {input: {features: 4}, steps: [mine]}\n"
    client.diagnostics[used] = queue.Queue()
    assert client.open(uri, text) == []
    (fault,) = client.diagnostics[used].get(timeout=30)
    assert fault["code"] == "E301"
    (place,) = client.request("textDocument/definition", at(uri, text, "mine]}"))
    assert place == {"uri": used, "range": {"start": {"line": 1, "character": 9}, "end": {"line": 1, "character": 13}}}


def test_hover_hints_symbols_and_definitions(client: Client) -> None:
    uri = "file:///all.yaml"
    client.open(uri, TEXT)
    verb = client.request("textDocument/hover", at(uri, TEXT, "linear"))
    assert "[batch, seq, 128] · 8,320 parameters" in verb["contents"]["value"]
    wire = client.request("textDocument/hover", at(uri, TEXT, "x,"))
    assert "[batch, seq, 128]" in wire["contents"]["value"]
    name = client.request("textDocument/hover", at(uri, TEXT, "wide,"))
    assert name["contents"]["value"].startswith("**wide** = `128`")
    labels = [each["label"] for each in client.request("textDocument/inlayHint", whole(uri))]
    first, last = "[batch, seq, 128] · 8,320 parameters", "[batch, seq, 64] · 8,256 parameters"
    assert labels == [first, "[batch, seq, 128]", last]
    outline = client.request("textDocument/documentSymbol", {"textDocument": {"uri": uri}})
    assert [each["name"] for each in outline] == ["use", "let", "model"]
    assert [each["name"] for each in outline[2]["children"]] == ["linear", "silu", "linear"]
    (place,) = client.request("textDocument/definition", at(uri, TEXT, "x,"))
    assert place["range"]["start"] == at(uri, TEXT, "x}")["position"]
    wanted = {**at(uri, TEXT, "dim"), "context": {"includeDeclaration": True}}
    found = client.request("textDocument/references", wanted)
    assert sorted(each["range"]["start"]["line"] for each in found) == [2, 2, 4, 8]


def test_hints_stay_while_the_yaml_is_broken(client: Client) -> None:
    uri = "file:///broken.yaml"
    client.open(uri, TEXT)
    (fault,) = client.change(uri, TEXT.replace("- silu", "- {silu"), 2)
    assert fault["code"] == "E101"
    found = client.request("textDocument/inlayHint", whole(uri))
    assert [each["position"]["line"] for each in found] == [6, 8]


def test_saving_a_used_file_refreshes_the_specs_that_use_it(tmp_path: Path) -> None:
    used, spec = tmp_path / "mine.yaml", tmp_path / "spec.yaml"
    block = "seqblocks: 1\nblocks: {mine: {steps: [silu]}}\n"
    used.write_text(block)
    able = {"workspace": {"inlayHint": {"refreshSupport": True}, "codeLens": {"refreshSupport": True}}}
    client = Client(COMMAND, tmp_path, {}, able)
    text = "seqblocks: 1\nuse: [./mine.yaml]\nmodel: {input: {features: 4}, steps: [mine]}\n"
    assert client.open(spec.as_uri(), text) == []
    assert client.open(used.as_uri(), block) == []
    used.write_text(block.replace("mine:", "yours:"))
    client.tell(used.as_uri(), used.read_text(), 2)
    client.notify("textDocument/didSave", {"textDocument": {"uri": used.as_uri()}})
    (fault,) = client.diagnostics[spec.as_uri()].get(timeout=30)
    assert fault["code"] == "E301"
    client.request("textDocument/documentSymbol", {"textDocument": {"uri": spec.as_uri()}})  # answered after the others
    assert client.asked == ["workspace/inlayHint/refresh", "workspace/codeLens/refresh"]
    used.write_text(block)  # by another program
    client.notify("workspace/didChangeWatchedFiles", {"changes": [{"uri": used.as_uri(), "type": 2}]})
    assert client.diagnostics[spec.as_uri()].get(timeout=30) == []
    client.close()


def test_completion_with_and_without_snippets(client: Client, tmp_path: Path) -> None:
    uri = "file:///complete.yaml"
    text = TEXT + "    - li"
    client.open(uri, text)
    place = {"textDocument": {"uri": uri}, "position": {"line": 9, "character": 8}}

    def linear(of: Client) -> dict[str, Any]:
        found = of.request("textDocument/completion", place)
        assert found["isIncomplete"] is False
        return next(each for each in found["items"] if each["label"] == "linear")

    plain = linear(client)
    assert plain["textEdit"]["newText"] == "linear: {name: linear_2, features: }"
    assert plain["textEdit"]["range"] == {"start": {"line": 9, "character": 6}, "end": {"line": 9, "character": 8}}
    able = {"textDocument": {"completion": {"completionItem": {"snippetSupport": True}}}}
    other = Client(COMMAND, tmp_path, {}, able)
    other.open(uri, text)
    assert linear(other)["textEdit"]["newText"] == "linear: {name: linear_2, features: $1}"
    other.close()


def test_rename_and_its_refusals(client: Client) -> None:
    uri = "file:///rename.yaml"
    client.open(uri, TEXT)
    place = at(uri, TEXT, "x,")
    assert client.request("textDocument/prepareRename", place)["placeholder"] == "x"
    edit = client.request("textDocument/rename", {**place, "newName": "wider"})
    written = [(each["newText"], each["range"]["start"]["line"]) for each in edit["changes"][uri]]
    assert sorted(written) == [("name: x, ", 6), ("wider", 6), ("wider", 8)]
    with pytest.raises(ServerError, match="'linear' is a verb of the language"):
        client.request("textDocument/prepareRename", at(uri, TEXT, "linear"))
    with pytest.raises(ServerError, match="'dim' cannot become 'wide'"):
        client.request("textDocument/rename", {**at(uri, TEXT, "dim"), "newName": "wide"})


def test_a_quick_fix_repairs_the_text(client: Client) -> None:
    uri = "file:///fix.yaml"
    text = TEXT.replace("- silu", "- sillu")
    (fault,) = client.open(uri, text)
    (action,) = client.request(
        "textDocument/codeAction",
        {"textDocument": {"uri": uri}, "range": fault["range"], "context": {"diagnostics": [fault]}},
    )
    assert action["diagnostics"] == [fault]
    assert action["edit"]["changes"][uri] == [{"range": fault["range"], "newText": "silu"}]
    assert client.change(uri, TEXT, 2) == []


def test_the_lens_and_the_links(client: Client) -> None:
    uri = "file:///lens.yaml"
    client.open(uri, TEXT)
    (lens,) = client.request("textDocument/codeLens", {"textDocument": {"uri": uri}})
    assert lens["command"]["title"] == "[batch, seq, 64] → [batch, seq, 64] · 16,576 parameters"
    assert lens["range"]["start"] == {"line": 3, "character": 0}
    (link,) = client.request("textDocument/documentLink", {"textDocument": {"uri": uri}})
    assert link["target"].endswith("specs/blocks/prenorm.yaml")
    assert link["range"]["start"] == {"line": 1, "character": 6}


FOLDED = """\
seqblocks: 1
let:
  dim: 64   # a comment

  wide: 128

model:
  input: {features: dim}
  steps:
    - residual:
        steps:
          - linear: {features: wide,
                     bias: false}
          - linear: {features: dim}
    - silu
expect: {output: features}
"""


def test_folding(client: Client) -> None:
    """Lines count from 0. A list ends with its last line of text, not where the next key begins."""
    uri = "file:///folded.yaml"
    client.open(uri, FOLDED)
    found = client.request("textDocument/foldingRange", {"textDocument": {"uri": uri}})
    lines = [(each["startLine"], each["endLine"]) for each in found]
    assert lines == [(1, 4), (6, 14), (8, 14), (9, 13), (10, 13), (11, 12)]


def test_selection_grows_from_a_word_to_the_file(client: Client) -> None:
    uri = "file:///selected.yaml"
    client.open(uri, FOLDED)
    place = at(uri, FOLDED, "bias")
    request = {"textDocument": {"uri": uri}, "positions": [place["position"], {"line": 900, "character": 0}]}
    found, outside = client.request("textDocument/selectionRange", request)
    texts, lines = [], FOLDED.split("\n")
    while found:
        start, end = found["range"]["start"], found["range"]["end"]
        inside = lines[start["line"] : end["line"] + 1]
        inside[-1] = inside[-1][: end["character"]]
        inside[0] = inside[0][start["character"] :]
        texts.append("\n".join(inside))
        found = found.get("parent")
    assert texts[:3] == ["bias", "bias: false", "{features: wide,\n                     bias: false}"]
    assert all(inner in outer and inner != outer for inner, outer in pairwise(texts))
    assert texts[-1].startswith("seqblocks: 1")
    assert "parent" not in outside


@pytest.mark.slow
def test_settings_choose_what_hints_show(tmp_path: Path) -> None:
    able = {"workspace": {"inlayHint": {"refreshSupport": True}}}
    client = Client(COMMAND, tmp_path, {"seqblocks": None}, able, {"hints": ["params", "macs"]})
    uri = "file:///settings.yaml"
    client.open(uri, TEXT)

    def labels() -> list[str]:
        return [each["label"] for each in client.request("textDocument/inlayHint", whole(uri))]

    assert labels()[0] == "8,320 parameters · 8,192 multiply-accumulates per token"
    client.notify("workspace/didChangeConfiguration", {"settings": {"seqblocks": {"hints": []}}})
    assert labels() == []
    assert "workspace/inlayHint/refresh" in client.asked
    for other in ({"seqblocks": {"hints": "all"}}, {"seqblocks": 3}, {}, None, []):
        client.notify("workspace/didChangeConfiguration", {"settings": other})
    assert labels() == []
    client.notify("workspace/didChangeConfiguration", {"settings": {"seqblocks": {"hints": ["shapes", "other"]}}})
    assert labels()[0] == "[batch, seq, 128]"
    client.close()


@pytest.mark.slow
def test_a_log(tmp_path: Path) -> None:
    log = tmp_path / "lsp.log"
    client = Client([*COMMAND, "--log", str(log)], tmp_path, {})
    client.open("file:///a.yaml", TEXT)
    with pytest.raises(ServerError):
        client.request("textDocument/prepareRename", at("file:///a.yaml", TEXT, "linear"))
    client.request("shutdown", None)
    client.notify("exit", None)
    assert client.process.wait(timeout=20) == 0
    client.close()
    text = log.read_text("utf-8")
    assert f"seqblocks {seqblocks.__version__}" in text
    assert "pygls" in text
    assert "refused: 'linear' is a verb of the language" in text
    assert "Traceback" not in text
    command = [*COMMAND, "--log", str(tmp_path / "none" / "lsp.log")]
    done = subprocess.run(command, input="", capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 2
    assert "lsp.log cannot be written" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
def test_a_log_on_a_full_disk(tmp_path: Path) -> None:
    with (tmp_path / "errors").open("wb") as errors:
        client = Client([*COMMAND, "--log", "/dev/full"], tmp_path, {}, errors=errors)
    assert client.open("file:///a.yaml", TEXT) == []
    client.request("shutdown", None)
    client.notify("exit", None)
    assert client.process.wait(timeout=20) == 0
    client.close()
    assert (tmp_path / "errors").read_text() == ""


BROKEN = ["    - {", "    - linear: {from: [x", '    - "', "    - linear:\n\t- x", "*a", "\0", "- - -"]


@pytest.mark.parametrize("tail", BROKEN)
def test_every_request_has_an_answer_in_a_broken_text(client: Client, tail: str) -> None:
    uri = f"file:///half{abs(hash(tail))}.yaml"
    client.open(uri, TEXT)
    client.tell(uri, TEXT + tail, 2)
    end = {"line": 9 + tail.count("\n"), "character": 50}
    place = {"textDocument": {"uri": uri}, "position": end}
    for method in ("hover", "completion", "definition", "documentHighlight"):
        client.request(f"textDocument/{method}", place)
    client.request("textDocument/references", {**place, "context": {"includeDeclaration": True}})
    client.request("textDocument/selectionRange", {"textDocument": {"uri": uri}, "positions": [end]})
    for method in ("documentSymbol", "codeLens", "documentLink", "foldingRange"):
        client.request(f"textDocument/{method}", {"textDocument": {"uri": uri}})
    client.request("textDocument/codeAction", {**whole(uri), "context": {"diagnostics": []}})
    assert [each["position"]["line"] for each in client.request("textDocument/inlayHint", whole(uri))] == [6, 7, 8]
    with pytest.raises(ServerError):
        client.request("textDocument/rename", {**place, "newName": "w"})


def test_a_file_that_was_never_opened_has_no_answers(client: Client) -> None:
    uri = "file:///nowhere.yaml"
    place = {"textDocument": {"uri": uri}, "position": {"line": 0, "character": 0}}
    assert client.request("textDocument/hover", place) is None
    assert client.request("textDocument/completion", place) is None
    assert client.request("textDocument/documentSymbol", {"textDocument": {"uri": uri}}) == []


def test_the_protocol_is_followed_to_the_end(tmp_path: Path) -> None:
    client = Client(COMMAND, tmp_path, {})
    client.open("file:///a.yaml", TEXT)
    assert client.request("shutdown", None) is None
    client.notify("exit", None)
    assert client.process.wait(timeout=20) == 0
    client.close()


HERE = {"textDocument": {"uri": "file:///a.yaml"}}
INVALID: list[Any] = [
    None,
    [1],
    {},
    HERE,
    {**HERE, "position": {"line": "a", "character": 1}},
    {**HERE, "position": {"line": -1, "character": 1}},
]


def test_invalid_late_and_oddly_headed_requests_have_answers(tmp_path: Path) -> None:
    log = tmp_path / "log"
    client = Client([*COMMAND, "--log", str(log)], tmp_path, {})
    for params in INVALID:
        with pytest.raises(ServerError, match="parameters of textDocument/hover are not those of the protocol"):
            client.request("textDocument/hover", params)
    client.notify("textDocument/didClose", {})  # a notification has no answer
    client.header = "content-length:{} \r\nContent-Type: application/vscode-jsonrpc; charset=utf-8\r\n"
    client.request("shutdown", None)
    with pytest.raises(ServerError, match="takes no more requests"):
        client.request("textDocument/hover", {**HERE, "position": {"line": 0, "character": 0}})
    client.notify("exit", None)
    assert client.process.wait(10) == 0
    client.close()
    assert "Traceback" not in log.read_text()


def test_what_is_no_message_is_refused(tmp_path: Path) -> None:
    """Such an answer has the id null, and messages after it are answered. A file that is not open changes nothing."""
    log = tmp_path / "log"
    client = Client([*COMMAND, "--log", str(log)], tmp_path, {})
    request = '{"jsonrpc": "2.0", "id": 7, "method": "shutdown"}'
    for text in ("{", "\xff", "[" * 100_000):
        assert client.answer_to(text) == (None, -32700)
    for text in ("[]", f"[{request}]", "5", "{}", '{"jsonrpc": "2.0"}', '{"jsonrpc": "2.0", "id": 7, "method": 5}',
                 request.replace("2.0", "1.0")):  # fmt: skip
        assert client.answer_to(text) == (None, -32600)
    assert client.answer_to('{"jsonrpc": "2.0", "id": 8, "method": "nonsense"}') == (8, -32601)
    for method in ("didClose", "didChange", "didSave"):
        changes = {"contentChanges": [{"text": TEXT}]}
        client.notify(f"textDocument/{method}", {"textDocument": {"uri": "file:///a.yaml", "version": 2}, **changes})
    client.notify("textDocument/didOpen", 3)
    assert client.request("textDocument/hover", {**HERE, "position": {"line": 0, "character": 0}}) is None
    client.close()
    assert client.shown == []
    assert "Traceback" not in log.read_text()


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_the_server_ends_with_its_client(tmp_path: Path) -> None:
    """A client that is killed closes the pipe; the server must neither stay nor spin."""
    program = f"import subprocess, time; print(subprocess.Popen({COMMAND!r}, stdin=subprocess.PIPE).pid); "
    program = f"{program.rstrip()} import sys; sys.stdout.flush(); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    assert int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    # the pipe of its standard output ends when the server, which inherited it, has ended
    rest = parent.communicate(timeout=20)[0]
    assert rest == ""


def test_an_untrusted_folder_runs_no_code(tmp_path: Path) -> None:
    """`[tool.seqblocks] import` belongs to the folder that was opened, not to the user."""
    (tmp_path / "pyproject.toml").write_text('[tool.seqblocks]\nimport = ["trap.py"]\n')
    (tmp_path / "trap.py").write_text("open('sprung', 'w')\n")
    command = [sys.executable, "-c", "from seqblocks.cli import entry; entry()", "lsp"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, input=b"", env=environment, check=True, timeout=60)
    assert not (tmp_path / "sprung").exists()


LOUD = """
from seqblocks import Op, primitive

print("loaded")


@primitive("loud")
class Loud(Op):
    \"\"\"It prints.\"\"\"

    def shape(self, x):
        print("shape")
        return x
"""


def test_the_users_own_primitives_may_print(tmp_path: Path) -> None:
    """What `--import` runs may print to standard output, which belongs to the protocol."""
    (tmp_path / "loud.py").write_text(LOUD)
    client = Client([*COMMAND, "--import", str(tmp_path / "loud.py")], tmp_path, {})
    uri = (tmp_path / "spec.yaml").as_uri()
    assert client.open(uri, "seqblocks: 1\nmodel: {input: {features: 4}, steps: [loud, {linear: 3}]}\n") == []
    assert [each["label"] for each in client.request("textDocument/inlayHint", whole(uri))] == ["[batch, seq, 4]"]
    client.close()


def test_without_pygls_the_command_says_what_to_install() -> None:
    program = "import sys; sys.modules['pygls'] = None; from seqblocks.cli.main import main; sys.exit(main(['lsp']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 4
    assert "pip install 'seqblocks[lsp]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_check_loads_no_part_of_the_server() -> None:
    program = (
        "import sys; from seqblocks.cli.main import main; main(['check', '-q', 'vil_tiny'])\n"
        "assert not {'pygls', 'lsprotocol', 'seqblocks.editor', 'torch'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.slow
@pytest.mark.yaml_server
def test_beside_the_server_for_all_yaml(client: Client, tmp_path: Path) -> None:
    """An editor may run yaml-language-server too. Without a schema for the file nothing is offered or shown twice."""
    text = (ROOT / "README.md").read_text("utf-8").split("```yaml\n")[1].split("```")[0]
    settings = {**dict.fromkeys(("validate", "completion", "hover"), True), "schemaStore": {"enable": False}}
    other = Client([str(executable()), "--stdio"], tmp_path, {"yaml": settings})
    uri = "file:///beside.yaml"
    assert (client.open(uri, text), other.open(uri, text)) == ([], [])
    counts = [0, 0]
    for line, words in enumerate(text.split("\n")):
        for column in (each.start() for each in re.finditer(r"\b|$", words)):
            place = {"textDocument": {"uri": uri}, "position": {"line": line, "character": column}}
            ours, theirs = (each.complete(uri, line, column) for each in (client, other))
            assert not {*ours} & {*theirs}, (line, column)
            shown = [each.request("textDocument/hover", place) for each in (client, other)]
            assert not all(shown), (line, column, shown)
            counts = [counts[0] + bool(ours), counts[1] + bool(shown[0])]
    other.close()
    assert min(counts) > 50  # positions with completions, and with descriptions
