"""Rules for initial values (`init:` of a file or a block): `{linear.weight: "normal(0, 0.02)", "*.bias": zeros}`.

They are read where they are written, and applied to the lowered model: a body that several steps share cannot know
which rules apply to it, nor how deep it is.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from seqblocks import graph
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.named_values import Names
from seqblocks.analysis.scope.run import Run
from seqblocks.analysis.steps.init_and_tie import read_initialiser
from seqblocks.errors import Fault, Span, listing, quote
from seqblocks.language.arguments import DEPTH
from seqblocks.language.document import Mapping, Node, Scalar
from seqblocks.language.expressions import UNKNOWN
from seqblocks.language.spec import FAN_IN
from seqblocks.parameters import DEFAULT, Init, Parameter
from seqblocks.record import Record
from seqblocks.suggestions import did_you_mean

_PATTERN = r"[\w*?]+(\.[\w*?]+)+\Z"  # compiled when rules are met


class Rule(Record):
    """One rule, with the names in scope where it is written."""

    ctx: Context
    pattern: str  # of STEP.PARAMETER, with * and ?
    span: Span
    value: Node


class Rules(Record):
    """The rules of a file or of one use of a block."""

    body: graph.Graph  # kept, so that its id stays its own
    rules: tuple[Rule, ...]


def read_rules(ctx: Context, table: Mapping | None, body: graph.Graph) -> None:
    """Check the rules written for a body, and keep them for `apply_rules`."""
    if table is None:
        return
    found = []
    for key, span, value in table:
        if not re.match(_PATTERN, key):
            ctx.report(_no_pattern(key), span)
        else:
            found.append(Rule(ctx, key, span, value))
            _value(found[-1], UNKNOWN, UNKNOWN)  # which reports what is wrong at any depth
    ctx.run.init_rules[id(body)] = Rules(body, tuple(found))


def _no_pattern(key: str) -> Fault:
    message = f"{quote(key)} is not a pattern of parameters"
    hint = f'"*.{key}"' if re.match(r"\w+\Z", key) else None
    expected = "STEP.PARAMETER, such as linear.weight or \"*.bias\": a step's verb or name"
    return Fault("E408", message, expected=expected, hint=hint and f"for all steps: `{hint}`")


def _value(rule: Rule, depth: object, fan_in: object) -> Init | None:
    """Return the initialiser of a rule; None after a fault, or if it is UNKNOWN."""
    ctx = rule.ctx
    values = {name: x for name, x in ((DEPTH, depth), (FAN_IN, fan_in)) if name not in ctx.names}
    return read_initialiser(ctx._replace(names=Names(ctx.names, values)), rule.value)


def apply_rules(run: Run, body: graph.Graph) -> graph.Graph:
    """Return the body of a model with the initial values that its rules give, and warn of rules without effect (W907).

    An `init:` of the step itself comes before all rules; of rules, those of the innermost block, and there the last.
    """
    if not any(each.rules for each in run.init_rules.values()):
        return body
    applied = _Application(run)
    made = applied.body(body, (), 1)
    for rule in applied.rules.values():
        if id(rule.span) not in applied.used:
            rule.ctx.report(applied.unused(rule), rule.span)
    return made


class _Application:
    """One pass over a model. Bodies that steps share stay shared where the same rules apply at the same depth."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.made: dict[tuple[int, ...], tuple[graph.Graph, graph.Graph]] = {}
        self.rules: dict[int, Rule] = {}  # those of the model, by the id of their place in the document
        self.used: set[int] = set()
        self.names: dict[str, None] = {}  # of all parameters, by verb and by name

    def unused(self, rule: Rule) -> Fault:
        """Return the warning of a rule without effect."""
        if any(fnmatchcase(name, rule.pattern) for name in self.names):
            message = f"all parameters that match {quote(rule.pattern)} have an `init:` or another rule of their own"
            return Fault("W907", message, hint="remove it: what the steps, a block or a later rule say comes first")
        message = f"no parameter matches {quote(rule.pattern)}"
        expected = listing(self.names, 8)
        return Fault("W907", message, expected=expected, hint=lambda: did_you_mean(rule.pattern, self.names))

    def body(self, body: graph.Graph, outer: tuple[Rules, ...], depth: int) -> graph.Graph:
        own = self.run.init_rules.get(id(body))
        rules = (*outer, own) if own else outer
        key = (id(body), depth, *map(id, rules))
        if key not in self.made:
            for rule in own.rules if own else ():
                self.rules[id(rule.span)] = rule
            nodes = [self.node(node, rules, depth) for node in body.nodes]
            same = all(new is old for new, old in zip(nodes, body.nodes, strict=True))
            self.made[key] = body, body if same else body._replace(nodes=nodes, like=body.like or body)
        return self.made[key][1]

    def node(self, node: graph.Node, rules: tuple[Rules, ...], depth: int) -> graph.Node:
        inside = depth * len(node.bodies) if isinstance(node, graph.RepeatNode) else depth
        bodies = {name: self.body(body, rules, inside) for name, body in node.bodies.items()}
        parameters = {
            name: self.parameter(node, name, each, rules, depth)
            for name, each in node.parameters.items()
            if name not in node.ties
        }
        parameters = {**node.parameters, **parameters}
        changed = any(bodies[name] is not body for name, body in node.bodies.items())
        changed = changed or any(parameters[name] is not each for name, each in node.parameters.items())
        return node._replace(bodies=bodies, parameters=parameters) if changed else node

    def parameter(
        self, node: graph.Node, name: str, parameter: Parameter, rules: tuple[Rules, ...], depth: int
    ) -> Parameter:
        names = f"{node.verb}.{name}", f"{node.name}.{name}"
        self.names |= dict.fromkeys(names)
        if parameter.settled:
            return parameter
        for rule in (rule for each in reversed(rules) for rule in reversed(each.rules)):
            if any(fnmatchcase(name, rule.pattern) for name in names):
                self.used.add(id(rule.span))
                self.refer(rule, node)
                init = _value(rule, depth, parameter.inputs)
                return parameter if init in (None, DEFAULT) else parameter._replace(init=init)
        return parameter

    def refer(self, rule: Rule, node: graph.Node) -> None:
        """Note that a rule names a step. A rule with the name of a verb is for all its steps."""
        first = rule.pattern.partition(".")[0]
        if self.run.references is not None and first == node.name != node.verb:
            text = Scalar(rule.span, 1, 1, rule.pattern, rule.pattern)
            self.run.references.step(node, text.part(0, len(first)))
