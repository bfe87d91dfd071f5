"""Rename wires, names, blocks and their arguments. The names of parameters in saved weights stay as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from seqblocks import graph
from seqblocks.analysis.analyse import Analysis
from seqblocks.analysis.scope.references import Reference, linked
from seqblocks.analysis.scope.step import find_verb
from seqblocks.analysis.step_list import LocatedStep
from seqblocks.editor import navigation
from seqblocks.editor.defined import formulas_of, inner_steps, names_results
from seqblocks.editor.edits import Edit, applied
from seqblocks.editor.naming import before_key, with_name
from seqblocks.editor.opened import Opened
from seqblocks.editor.positions import Spot
from seqblocks.editor.steps import Written, as_step, walk
from seqblocks.errors import Span, quote
from seqblocks.language.document import Mapping, Node, Scalar, Sequence


class Refused(Exception):
    """The reason why something cannot be renamed."""


class Target(NamedTuple):
    """What is renamed: its name, where it was asked for, its definition, and the references to it."""

    name: str
    span: Span
    definition: Span
    references: list[Reference]

    @property
    def is_wire(self) -> bool:
        return any(each.kind == "wire" for each in self.references)

    @property
    def is_verb(self) -> bool:
        """Whether it is a block, or an argument of type `steps`, whose name is that of a step."""
        return any(each.kind == "block" for each in self.references)


def target(opened: Opened, spot: Spot) -> Target:
    """Return what would be renamed at a position. Raises Refused if that cannot be renamed."""
    if opened.known is not opened:
        raise Refused("the text cannot be read as YAML: repair it first")
    found = opened.reference_at(spot)
    if found and found.definition is None:
        what = "the name of the input" if found.kind == "wire" else "a verb of the language"
        raise Refused(f"{quote(found.name)} is {what}, which cannot be renamed")
    references = [each for each in navigation.same(opened, spot) if each.kind != "step"]
    if (found and found.kind == "step") or not references:
        _refuse_step(opened, spot)
    if not references:
        raise Refused("there is no wire, name or block here that is read anywhere")
    definition = references[0].definition
    assert definition is not None
    if not opened.is_own(definition):
        raise Refused(f"{quote(references[0].name)} is defined in {definition.source.name}: rename it there")
    _refuse_names_of_the_call(opened, references[0].name, definition)
    span = found.span if found else definition
    return Target(references[0].name, span, definition, references)


def _refuse_step(opened: Opened, spot: Spot) -> None:
    """Raise Refused for the name of a step."""
    for each in navigation.same(opened, spot):
        if each.kind == "step":
            raise Refused(f"{quote(each.name)} is the name of a step, which names its parameters in saved weights")


def _refuse_names_of_the_call(opened: Opened, name: str, definition: Span) -> None:
    """Raise Refused for a wire that names an input or an output of the built model."""
    file = opened.analysis.file
    model = file.model if file else None
    inputs, outputs = (model.get(key) if model else None for key in ("inputs", "outputs"))
    if isinstance(inputs, Mapping) and any(span == definition for _, span, _ in inputs):
        raise Refused(f"{quote(name)} is an input of the model: calls of the built model use its name")
    items = outputs.items if isinstance(outputs, Sequence) else ()
    if any(isinstance(item, Scalar) and item.text == name for item in items):
        raise Refused(f"{quote(name)} is an output of the model: users of the built model read it by its name")


def rename(opened: Opened, spot: Spot, new: str) -> list[Edit]:
    """Return the edits of this file that rename what is at a position, with those that keep names in the state_dict.

    Raises Refused if the new name cannot be used, or if the model would not be the same.
    """
    renaming = _Renaming(opened, target(opened, spot), new)
    if new == renaming.target.name:
        return []
    reason = ""
    for keep in (False, True):  # `name: OLD` is added only where something is stored under the old name
        edits = renaming.edits(keep)
        reason = _difference(opened.analysis, opened.again(applied(opened.text, edits)))
        if not reason:
            return edits
    raise Refused(f"{quote(renaming.target.name)} cannot become {quote(new)}: {reason}")


def _difference(before: Analysis, after: Analysis) -> str:
    """Return why two analyses are not of the same model, or "" if they are."""
    codes = Counter(each.code for each in before.diagnostics)
    for each in after.diagnostics:
        if not codes[each.code]:
            return each.message
        codes[each.code] -= 1
    if _described(before) != _described(after):
        return "that would change names in the state_dict, or of inputs or outputs"
    return ""


def _described(analysis: Analysis) -> list[Any]:
    model, body = analysis.model, analysis.lowered.body
    if body is None:
        return []
    kinds = [(str(node.type), node.kind) for node in graph.walk(body)]
    names = [(each.name, each.parameter.shape) for each in graph.parameters(body)] if analysis.ok else []
    return [kinds, names, [*body.outputs], [*model.inputs] if model else []]


class _Renaming:
    def __init__(self, opened: Opened, target: Target, new: str) -> None:
        self.opened, self.target, self.new = opened, target, new
        assert opened.root is not None
        self.root: Node = opened.root
        self.steps: dict[Span, LocatedStep] = {step.span: step for step in opened.steps}

    def edits(self, keep: bool) -> list[Edit]:
        """Return the edits. keep: add `name:` to all steps that would get another name, not only where needed."""
        references = self.opened.known.analysis.references
        definitions = linked(references, self.target.definition)
        if self.target.is_wire:
            definitions.update(self._alternatives())
        spans = [each.span for each in references if each.definition in definitions and each.kind != "step"]
        found = {span: Edit(span, self.new) for span in [*definitions, *spans] if self.opened.is_own(span)}
        edits = [*found.values()]
        if self.target.is_wire:
            for edit in (edit for span in definitions for edit in self._keep_name_of_maker(span, keep)):
                place = next((each for each in edits if each.span[:3] == edit.span[:3]), None)
                if place:  # editors take no two edits that begin at one place
                    edits[edits.index(place)] = Edit(place.span, edit.text + place.text)
                else:
                    edits.append(edit)
        if self.target.is_verb:
            for step in self._uses(found):
                edits = self._keep_name_of_use(step, edits, keep)
        return edits

    def _alternatives(self) -> Iterator[Span]:
        """Yield the places where a wire is defined too: by steps beside its maker, under other conditions, or in a cell
        both as a state and by the step that sets the state.
        """
        for node in walk(self.root):
            if isinstance(node, Sequence):
                own = [place for step in filter(None, map(as_step, node.items)) for place in self._defined_by(step)]
            elif (step := as_step(node)) and step.verb == "cell" and isinstance(states := step.get("state"), Mapping):
                own = [span for name, span, _ in states if name == self.target.name]
                own += [place for each in inner_steps(step) for place in self._defined_by(each)] if own else []
            else:
                continue
            if self.target.definition in own:
                yield from own

    def _defined_by(self, step: Written) -> Iterator[Span]:
        match step.get("as"):
            case Scalar(text=text, span=span) if text == self.target.name:
                yield span
            case Sequence(items=items):
                yield from (item.span for item in items if isinstance(item, Scalar) and item.text == self.target.name)
            case Mapping(entries=entries) if self.target.name in entries:
                yield entries[self.target.name][0]
        if self.target.name in self._formulas(step):
            assert isinstance(step.arguments, Mapping)
            yield step.arguments.entries[self.target.name][0]

    def _formulas(self, step: Written) -> list[str]:
        """Return the keys of a step that name the results of formulas."""
        file = self.opened.analysis.file
        verb = find_verb(file, step.verb) if file else None
        return formulas_of(step, verb) if verb and names_results(verb) else []

    # --- names in the state_dict --------------------------------------------------------------------------------------

    def _keep_name_of_maker(self, definition: Span, keep: bool) -> Iterator[Edit]:
        """Yield the edit that names the step after the wire's old name, if the wire named it and it stores something.
        """
        for node in walk(self.root):
            step = as_step(node)
            named = step.get("as") if step else None
            if step and isinstance(named, Scalar) and named.span == definition and step.get("name") is None:
                if keep or self._stores(step):
                    assert isinstance(step.arguments, Mapping)
                    key = step.arguments.entries["as"][0]
                    yield before_key(self.opened, key, step.arguments, f"name: {self.target.name}")
                return
            formulas = self._formulas(step) if step and step.get("name") is None else []
            if step and len(formulas) == 1 and isinstance(step.arguments, Mapping):
                if step.arguments.entries[formulas[0]][0] == definition and (keep or self._stores(step)):
                    yield before_key(self.opened, definition, step.arguments, f"name: {self.target.name}")

    def _stores(self, step: Written) -> bool:
        """Return whether a step has parameters or a state, or may have them."""
        known = self.steps.get(step.span)
        return known is None or known.params is None or bool(known.params or known.state)

    def _uses(self, edits: dict[Span, Edit]) -> Iterator[Written]:
        """Yield the steps whose verb is renamed."""
        seen = set()
        for node in walk(self.root):
            step = as_step(node)
            reference = self.opened.own_references.get(step.span) if step else None
            if step and reference and reference.kind == "block" and step.span in edits and step.span not in seen:
                seen.add(step.span)
                yield step

    def _keep_name_of_use(self, step: Written, edits: list[Edit], keep: bool) -> list[Edit]:
        """Return the edits with one that names a step, which the verb named so far."""
        if step.get("name") or isinstance(step.get("as"), Scalar) or not (keep or self._stores(step)):
            return edits
        edit = with_name(self.opened, step, self.target.name, self.new)
        if edit is None:
            where = f"the step in line {step.span.line} is stored under this name"
            raise Refused(f"{where}: write its arguments with their keys, and add `name: {self.target.name}`")
        return [edit, *(each for each in edits if each.span != edit.span)]
