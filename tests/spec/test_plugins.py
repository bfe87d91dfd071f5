"""A primitive of somebody else's: a file of their own, a decorator, and optionally an entry point."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from seqblocks import check, graph, op

PLUGIN = '''
from seqblocks import Op, primitive
from seqblocks.op import argument
from seqblocks.parameters import Init, Parameter


@primitive("plugged_scale")
class Scale(Op):
    """Multiply every feature by a learned gain."""

    start: float = argument(1.0, "what the gain starts at")

    def parameters(self, x):
        return {"weight": Parameter((x.features,), Init("constant", (self.start,)))}

    def forward(self, p, call, x):
        return x * p["weight"]
'''
TEXT = "seqblocks: 1\nmodel: {input: {features: 5}, steps: [{plugged_scale: {start: 2 * 3}}]}"


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_plugin_module.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    op.load_builtin()  # what is imported while the table is another is not in ours
    monkeypatch.setattr(op, "PRIMITIVES", dict(op.PRIMITIVES))
    yield "my_plugin_module"
    sys.modules.pop("my_plugin_module", None)
    op.load_plugins.cache_clear()


def test_an_entry_point_is_found_when_an_unknown_verb_is_met(plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", plugin, op.PLUGIN_GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry] if group == op.PLUGIN_GROUP else [])
    op.load_plugins.cache_clear()
    op.load_builtin()
    monkeypatch.setattr("seqblocks.lower.PRIMITIVES", op.PRIMITIVES)
    file, model = check.load_text(TEXT)
    made = check.require_model(file, model)
    assert graph.count(made.graph) == 5
    (item,) = graph.parameters(made.graph)
    assert str(item.parameter.init) == "constant(6)"


def test_a_broken_plugin_is_named_and_harms_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("broken", "no_such_module_anywhere", op.PLUGIN_GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry])
    op.load_plugins.cache_clear()
    with pytest.raises(check.SpecError, match=r"plug-in 'broken' .* did not load"):
        check.load_text("seqblocks: 1\nmodel: {input: {features: 5}, steps: [nonesuch]}")
    check.load_text("seqblocks: 1\nmodel: {input: {features: 5}, steps: [silu]}")
    op.load_plugins.cache_clear()


def test_a_verb_can_be_taken_once() -> None:
    op.load_builtin()
    with pytest.raises(ValueError, match="'silu' is taken by"):

        @op.primitive("silu")
        class Other(op.Op):
            """Not the real one."""


def test_a_built_in_verb_is_taken_before_anybody_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "PRIMITIVES", {})
    with pytest.raises(ValueError, match=r"the verb 'silu' is built in; .*Other needs another"):

        @op.primitive("silu")
        class Other(op.Op):
            """Not the real one."""


def test_ports_are_ports() -> None:
    class Mix(op.Op):
        """Two inputs."""

        ports = ("x", "other")  # type: ignore[assignment]

    with pytest.raises(TypeError, match=r"Mix.ports must be a tuple of Port\(name, about, …\)"):
        op.primitive("mix_of_two")(Mix)
