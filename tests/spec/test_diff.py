"""`seqblocks diff`: known edits of a spec, and nothing else, are reported."""

from __future__ import annotations

import copy
import json
import random
import re
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import seqblocks
from seqblocks.architect.changes import Change, ranges
from seqblocks.architect.designs import Design
from seqblocks.architect.diff import Difference, TensorChange, diff
from seqblocks.language.spec_files import bundled
from tests.sampled import sampled
from tests.spec.texts import GOOD

Run = Callable[..., subprocess.CompletedProcess[str]]
MODELS = [name for name, path in bundled().items() if path.parent.name == "models"]


def design(steps: list[Any], label: str = "spec.yaml") -> Design:
    spec = {"seqblocks": 1, "model": {"input": {"features": 8}, "steps": steps}}
    return Design(label, json.dumps(spec), label)


def difference(a: list[Any], b: list[Any]) -> Difference:
    return diff(design(a), design(b))


@pytest.mark.parametrize("name", sampled(MODELS, ci=4, first=2))
def test_a_spec_does_not_differ_from_itself(name: str) -> None:
    found = diff(name, name)
    assert not found
    assert (found.facts, found.structure) == ({}, [])
    assert str(found) == f"{name} has the figures, the steps and the names of weights of {name}"


@pytest.mark.parametrize(
    ("a", "b"), [("mamba_130m", "mamba_370m"), ("vil_tiny", "vil_small"), ("mamba2_130m", "mamba2_780m")]
)
def test_sizes_of_a_family_differ_in_shapes_and_layers_alone(a: str, b: str) -> None:
    found = diff(a, b)
    assert {change.kind for change in found.structure} <= {"changed", "added"}
    for change in found.structure:
        assert change.kind == "changed" or change.path.split(".")[0] in ("layers", "blocks"), change
        assert "verb" not in [what for what, _, _ in change.details]
    assert found.checkpoint is not None
    assert not found.checkpoint.unused


def test_an_argument_changes_what_depends_on_it_and_layers_are_one() -> None:
    found = diff("mlstm_small", "mlstm_small@heads=8")
    changes = {change.path: change.details for change in found.structure}
    cell = "layers.0-4.mlstm_block.residual.mlstm_layer.cell"
    assert changes.keys() == {f"{cell}.{name}" for name in ("i", "f", "mlstm", "head_norm")}
    assert ("heads", "4", "8") in changes[f"{cell}.mlstm"]
    assert ("weight", "[4, 768]", "[8, 768]") in changes[f"{cell}.i"]
    assert found.facts["params"][1] - found.facts["params"][0] == 5 * 2 * 4 * (768 + 1)


def test_layers_of_one_pattern_are_ranges() -> None:
    assert ranges([3, 0, 1, 2, 7, 9, 10]) == "0-3,7,9-10"
    found = diff("mlstm_small", "mlstm_small@depth=7")
    (added,) = [change for change in found.structure if change.kind == "added"]
    assert (added.path, added.verb) == ("layers.5-6", "mlstm_block")
    assert found.checkpoint is not None
    assert {name.split(".")[1] for name in found.checkpoint.missing} == {"5", "6"}
    assert "layers.5-6.* (14 tensors each) only in the second" in str(found)


WIRES = [
    {"linear": {"features": 8, "as": "a"}}, "silu", {"linear": {"features": 8, "name": "second", "as": "b"}},
    {"add": {"with": "a"}},
]  # fmt: skip


def test_a_step_that_reads_another_wire_is_changed() -> None:
    other = copy.deepcopy(WIRES)
    other[3] = {"add": {"with": "b"}}
    (change,) = difference(WIRES, other).structure
    assert (change.kind, change.path, change.details) == ("changed", "add", (("reads with", "a", "b"),))


SPLIT = [{"linear": {"features": 8, "as": ["a", "b"]}}, {"scale": {"from": "a", "by": -1}}, {"add": {"with": "b"}}]


@pytest.mark.parametrize("names", [["b", "a"], {"b": 4, "a": 4}])
def test_names_that_two_wires_exchange_are_not_the_same_wires(names: Any) -> None:
    """The weights load, but what reads the first part then reads the second."""
    other = copy.deepcopy(SPLIT)
    other[0]["linear"]["as"] = names
    found = difference(SPLIT, other).structure
    parts = ("part 1 of linear", "part 2 of linear")
    assert [(each.path, each.details) for each in found] == [
        ("scale", (("reads x", *parts),)), ("add", (("reads with", *reversed(parts)),)),
    ]  # fmt: skip
    makers: list[Any] = [{"linear": {"features": 8, "name": name, "from": "input", "as": wire}}
                         for name, wire in (("one", "a"), ("two", "b"))]  # fmt: skip
    other = copy.deepcopy(makers)
    other[0]["linear"]["as"], other[1]["linear"]["as"] = "b", "a"
    (first, second) = difference([*makers, *SPLIT[1:]], [*other, *SPLIT[1:]]).structure
    assert first.details == (("reads x", "the output of one", "the output of two"),)
    assert second.details == (("reads with", "the output of two", "the output of one"),)


def test_other_names_for_the_same_wires_change_nothing() -> None:
    other = [{"linear": {"features": 8, "as": ["c", "d"]}}, {"scale": {"from": "c", "by": -1}}, {"add": {"with": "d"}}]
    assert not difference(SPLIT, other)


def test_another_sample_rate_is_a_change() -> None:
    start = "seqblocks: 1\nmodel: {steps: [silu], input: {features: 1, sample_rate: "
    texts = [f"{start}{rate}}}}}" for rate in (8000, 16000)]
    (change,) = diff(*(Design(f"{at}.yaml", text, f"{at}.yaml") for at, text in enumerate(texts))).structure
    assert (change.path, change.details) == ("model", (("sample rate", "8,000 Hz", "16,000 Hz"),))


def test_a_step_that_moves_to_another_width_is_moved() -> None:
    steps = [{"scale": {"by": 2, "name": "twice"}}, {"linear": {"features": 4}}]
    (change,) = difference(steps, steps[::-1]).structure
    assert (change.kind, change.details[0][0]) == ("moved", "place")


def test_parts_of_other_widths_are_a_change() -> None:
    first, second = ([{"linear": {"features": 8, "as": parts}}, {"silu": {"from": "a"}}, {"pool": {"mode": "mean"}}]
                     for parts in ({"a": 2, "b": 6}, {"a": 6, "b": 2}))  # fmt: skip
    change = difference(first, second).structure[-1]
    assert (change.path, change.details) == ("linear", (("parts", "[2, 6]", "[6, 2]"),))


def test_a_name_for_the_wire_that_a_step_reads_anyway_changes_nothing() -> None:
    other = copy.deepcopy(WIRES)
    other[1] = {"silu": {"from": "a"}}
    assert not difference(WIRES, other)


def test_a_step_between_others_changes_no_other() -> None:
    """Not even the numbers that steps without parameters have, nor the wire that the next step reads."""
    other = [WIRES[0], "silu", {"linear": {"features": 8, "name": "new"}}, *WIRES[1:]]
    found = difference(WIRES, other).structure
    assert sorted((each.kind, each.path.removesuffix("_2")) for each in found) == [("added", "new"), ("added", "silu")]


def test_a_renamed_step_takes_its_weights_under_another_name() -> None:
    other = copy.deepcopy(WIRES)
    other[2]["linear"]["name"] = "third"
    found = difference(WIRES, other)
    assert found.structure == [Change("renamed", "third", "linear", (("name", "second", "third"),))]
    assert found.checkpoint is not None
    assert found.checkpoint.missing == ["third.weight", "third.bias"]
    assert found.checkpoint.unused == ["second.weight", "second.bias"]


def test_a_renamed_step_without_weights_is_renamed() -> None:
    """Its name is a part of paths, such as those of the state, but a number may have changed by itself."""
    (change,) = difference(["silu"], [{"silu": {"name": "gate"}}]).structure
    assert change == Change("renamed", "gate", "silu", (("name", "silu", "gate"),))
    assert [each.kind for each in difference(["silu", "relu", "silu"], ["relu", "silu"]).structure] == ["removed"]


def test_another_verb_under_the_same_name() -> None:
    (change,) = difference([{"layer_norm": {"name": "norm"}}], [{"rms_norm": {"name": "norm"}}]).structure
    assert change.kind == "changed"
    assert ("verb", "layer_norm", "rms_norm") in change.details


# --- random single edits ----------------------------------------------------------------------------------------------

PLAIN = ("silu", "gelu", "relu", "tanh")


def random_steps(chance: random.Random, count: int) -> list[Any]:
    """Return steps of 8 features, no two of which are equal neighbours: moving one would then change nothing."""
    steps: list[Any] = []
    for number in range(count):
        kind = chance.randrange(3)
        if kind == 0:
            step: Any = chance.choice([each for each in PLAIN if not steps or each != steps[-1]])
        elif kind == 1:
            step = {"linear": {"features": 8, "bias": chance.random() < 0.5, "name": f"l{number}"}}
        else:
            step = {"causal_conv": {"kernel": chance.randint(2, 6), "name": f"c{number}"}}
        steps.append(step)
    return steps


def edited(steps: list[Any], chance: random.Random) -> tuple[list[Any], Callable[[list[Change]], bool]]:
    """Return steps with one edit, and whether changes are that edit."""
    steps = copy.deepcopy(steps)
    at = chance.randrange(len(steps))
    kind = chance.choice(["insert", "remove", "argument", "rename", "move"])
    if kind == "insert":
        steps.insert(at, {"linear": {"features": 8, "name": "new"}})
        return steps, lambda found: [(each.kind, each.path) for each in found] == [("added", "new")]
    named = [place for place, step in enumerate(steps) if isinstance(step, dict)]
    if not named:
        return edited([*steps, {"linear": {"features": 8, "bias": True, "name": "last"}}], chance)
    at = chance.choice(named)
    ((verb, arguments),) = steps[at].items()
    name = arguments["name"]
    if kind == "remove":
        del steps[at]
        return steps, lambda found: [(each.kind, each.path) for each in found] == [("removed", name)]
    if kind == "rename":
        arguments["name"] = "other"
        return steps, lambda found: [(each.kind, each.path) for each in found] == [("renamed", "other")]
    if kind == "argument":
        key, value = ("bias", not arguments["bias"]) if verb == "linear" else ("kernel", arguments["kernel"] + 1)
        arguments[key] = value
        expected = ("changed", name, key)
        return steps, lambda found: [(each.kind, each.path, each.details[0][0]) for each in found] == [expected]
    to = chance.choice([place for place in range(len(steps)) if place != at] or [at])
    steps.insert(to, steps.pop(at))
    neighbours = abs(to - at) == 1  # then either of the two has moved

    def moved(found: list[Change]) -> bool:
        return [each.kind for each in found] == ["moved"] and (neighbours or found[0].path == name)

    return steps, moved if to != at else lambda found: not found


@pytest.mark.parametrize("seed", range(300))
def test_exactly_one_edit_is_reported(seed: int) -> None:
    chance = random.Random(seed)
    steps = random_steps(chance, chance.randint(2, 9))
    if not any(isinstance(step, dict) for step in steps):
        steps.append({"linear": {"features": 8, "bias": True, "name": "last"}})
    changed, is_reported = edited(steps, chance)
    depth = chance.choice([0, 3])
    a, b = ([{"repeat": {"times": depth, "steps": each}}] if depth else each for each in (steps, changed))
    found = difference(a, b).structure
    if depth:
        assert all(change.path.startswith("repeat.0-2.") for change in found), found
        found = [each._replace(path=each.path.removeprefix("repeat.0-2.")) for each in found]
    assert is_reported(found), (steps, changed, found)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "good.yaml").write_text(GOOD)
    return tmp_path


def test_the_command(run_main: Run, folder: Path) -> None:
    same = run_main("diff", "good.yaml", "good.yaml", "--exit-code", cwd=folder)
    assert (same.returncode, same.stderr) == (0, "")
    assert run_main("diff", "good.yaml", "good.yaml", "--quiet", cwd=folder).stdout == ""
    done = run_main("diff", "good.yaml", "good.yaml@dim=16", "--exit-code", cwd=folder)
    assert (done.returncode, done.stderr) == (1, "")
    assert "parameters" in done.stdout
    assert run_main("diff", "good.yaml", "good.yaml@dim=16", cwd=folder).returncode == 0
    data = json.loads(run_main("diff", "good.yaml", "good.yaml@dim=16", "--format", "json", cwd=folder).stdout)
    assert data["different"] is True
    assert data["specs"] == ["good.yaml", "good.yaml@dim=16"]
    assert data["facts"]["params"] == {"before": 36, "after": 68}
    assert data["checkpoint"]["reshaped"]["linear.weight"] == {"before": [4, 8], "after": [4, 16]}


def test_a_spec_with_faults_is_compared_as_far_as_it_is_known(run_main: Run, folder: Path) -> None:
    (folder / "bad.yaml").write_text(GOOD.replace("linear", "linaer", 1))
    done = run_main("diff", "good.yaml", "bad.yaml", "--exit-code", cwd=folder)
    assert done.returncode == 1
    assert done.stdout.startswith("bad.yaml has faults, so that not all of it is compared: E")
    for words in (["good.yaml", "bad.yaml"], ["bad.yaml", "bad.yaml", "--quiet"]):
        again = run_main("diff", *words, cwd=folder)
        assert again.returncode == 1
        assert "bad.yaml has faults" in again.stdout
    data = json.loads(run_main("diff", "bad.yaml", "good.yaml", "--format", "json", cwd=folder).stdout)
    assert [len(each) > 0 for each in data["faults"]] == [True, False]
    assert data["facts"] == {}
    assert "~ model: output [batch, seq, 4] -> unknown\n" in done.stdout


def test_equal_steps_of_a_faulty_spec_with_one_name() -> None:
    narrow, shift = {"linear": {"features": 4, "as": "narrow"}}, {"token_shift": {"from": "input", "mix": "narrow"}}
    found = str(difference([narrow, shift, shift], [narrow]))
    assert found.count("token_shift removed, 0 parameters") == 2, found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["good.yaml"], "required: B"),
        (["good.yaml", "absent.yaml"], "cannot be read"),
        (["good.yaml", "good.yaml", "--weights"], "two folders written by seqblocks.save, and 'good.yaml' is none"),
        (["good.yaml", "good.yaml", "--dtype", "int7"], "not a supported dtype"),
        (["-", "-"], "can be read only once"),
        (["good.yaml", "good.yaml", "--format", "csv"], "invalid choice"),
    ],
)
def test_wrong_commands(words: list[str], message: str, run_main: Run, folder: Path) -> None:
    done = run_main("diff", *words, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


class Page(HTMLParser):
    """Collects tags, their attributes and the texts of a page, whose tags must be balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page_of(found: Difference) -> Page:
    page = Page(found.html())
    assert {tag for tag, _ in page.found} <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "ul", "li", "figure", "table", "tr", "th",
        "td", "div", "svg", "g", "rect", "path", "text",
    }  # fmt: skip
    assert not [name for _, names in page.found for name in names if name in ("src", "href") or name.startswith("on")]
    assert "url(" not in found.html()
    assert "@import" not in found.html()
    return page


@pytest.mark.parametrize(
    ("a", "b"),
    [("mamba_130m", "mamba_370m"), ("mlstm_small", "mlstm_small@heads=8"), ("mlstm_small", "transformer_small")],
)
def test_the_page_has_what_the_text_has(a: str, b: str) -> None:
    found = diff(a, b)
    page = page_of(found)
    cells = "\n".join(page.texts)
    assert all(change.path in cells for change in found.structure)
    for line in str(found).splitlines():
        for part in re.split(r" {2,}", line.strip()):
            assert part in ("steps", "") or set(part) == {"─"} or part in cells or part[0].upper() + part[1:] in cells
    kinds = [attributes["class"] for tag, attributes in page.found if tag == "li"]
    assert kinds[: len(found.structure)] == [change.kind for change in found.structure]


MARKED = re.compile(r'<title>([^<,]*)[^<]*</title>\n<rect class="\w+ (added|removed|moved|renamed|changed)"')


def marked(found: Difference) -> list[dict[str, str]]:
    """Return the paths of the boxes that have a colour in the picture of A, and in that of B."""
    pictures = found.html().split("<svg ")[1:]
    return [dict(MARKED.findall(picture)) for picture in pictures]


def test_both_pictures_are_side_by_side_with_what_differs_coloured() -> None:
    first = [{"linear": {"features": 8, "name": name}} for name in ("a", "b", "old")]
    second = copy.deepcopy([first[1], first[0], {"rms_norm": {"name": "d"}}, first[2]])
    first.insert(1, {"layer_norm": {"name": "c"}})
    second[0]["linear"]["bias"] = False
    second[3]["linear"]["name"] = "new"
    found = difference(first, second)
    kinds = {(each.kind, each.path) for each in found.structure}
    assert kinds >= {("removed", "c"), ("added", "d"), ("renamed", "new"), ("changed", "b")}
    moved = {path: kind for kind, path in kinds if kind == "moved"}
    assert len(moved) == 1
    both = {"b": "changed", **moved}
    assert marked(found) == [{**both, "c": "removed", "old": "renamed"}, {**both, "d": "added", "new": "renamed"}]


def test_layers_that_are_one_box_are_coloured_once() -> None:
    cell = "layers.0.mlstm_block.residual.mlstm_layer.cell"
    changed = dict.fromkeys([f"{cell}.{name}" for name in ("i", "f", "mlstm", "head_norm")], "changed")
    assert marked(diff("mlstm_small", "mlstm_small@heads=8")) == [changed, changed]
    assert marked(diff("mlstm_small", "mlstm_small")) == []


def test_the_page_of_equal_designs_says_so() -> None:
    assert str(diff("mlstm_small", "mlstm_small")) in page_of(diff("mlstm_small", "mlstm_small")).texts


def test_nothing_in_a_spec_becomes_markup_of_the_page() -> None:
    """Labels, names of steps, arguments and messages of faults are text, with control characters made visible."""
    hostile = "</li><script>alert(1)</script><img src=//a.b onerror=x>\x1b&amp;"
    good = design([{"linear": {"features": 8, "name": "a"}}], hostile)
    bad = design([{"linear": {"features": 8}}, {hostile: {"x": hostile}}], f"{hostile}2")
    for a, b in ((good, bad), (bad, good), (bad, bad)):
        found = diff(a, b)
        page = page_of(found)
        assert "\x1b" not in found.html()
        assert any(text.startswith("</li><script>alert(1)</script><img src=//a.b onerror=x>") for text in page.texts)


def test_the_page_has_the_values_of_tensors() -> None:
    found = diff("mlstm_small", "mlstm_small")._replace(tensors=[TensorChange("a<b>.weight", 0.25, 0.5)])
    assert {"a<b>.weight", "2.50e-01", "0.500000"} <= {*page_of(found).texts}


def test_the_page_of_the_command(run_main: Run, folder: Path) -> None:
    words = ("diff", "mlstm_small", "mlstm_small@heads=8")
    expected = diff("mlstm_small", "mlstm_small@heads=8").html()
    done = run_main(*words, "--html", "d.html", "--exit-code", cwd=folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert "d.html: written" in done.stderr
    assert (folder / "d.html").read_text("utf-8") == expected == run_main(*words, "--html", "-").stdout
    data = json.loads(run_main(*words, "--html", "e.html", "--format", "json", cwd=folder).stdout)
    assert data["different"]
    assert (folder / "e.html").exists()
    both = run_main(*words, "--html", "-", "--format", "json")
    assert both.returncode == 2
    assert "only one of --html - and --format json" in json.loads(both.stdout)["error"]


def test_steps_as_text_change_only_where_the_model_does(run_main: Run, folder: Path) -> None:
    show = ("show", "mlstm_small", "--stage", "steps")
    lines = [run_main(*show, *more).stdout.splitlines() for more in ((), ("--set", "heads=8"))]
    before, after = (set(each) for each in lines)
    assert len(lines[0]) == len(lines[1]) < 25  # one layer stands for all five
    assert len(before - after) == len(after - before) == 4
    assert "split" not in "".join(lines[0])
    named = [line for line in lines[0] if " as " in line]
    assert [line.partition(" as ")[2] for line in named] == ["u, z"]
    refused = run_main("show", "mlstm_small", "--stage", "steps", "--format", "json")
    assert refused.returncode == 2
    assert "--stage graph" in json.loads(refused.stdout)["error"]


def test_python(folder: Path) -> None:
    found = diff(seqblocks.load_model("mlstm_small"), "mlstm_small", set={"depth": 3})
    assert not found  # overrides of both
    with pytest.raises(seqblocks.UsageError, match="expected a path"):
        diff(3, "mlstm_small")
