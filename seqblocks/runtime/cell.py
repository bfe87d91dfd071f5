"""The module of a `cell`: a recurrence that is written as steps for one token.

Only the steps that read a state and that the next state depends on run token by token. The steps before them do not
depend on the states, those after them are not needed for the next token: both run on all tokens at once, since they
treat each token by itself. If the states are set by linear formulas, no step runs in a loop (`affine.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seqblocks.analysis.steps.combinators.cell import STARTED, stages_of
from seqblocks.graph import CellNode, Graph, Node, spent_values
from seqblocks.kernels import dispatch
from seqblocks.language import linear_forms
from seqblocks.ops.calc import Calc, computed, program_of
from seqblocks.runtime import affine
from seqblocks.runtime.body import Body, Planned, add_exports, planned, store
from seqblocks.runtime.call import Call, Carrying
from seqblocks.runtime.modules import Place, call_child, draws_now, is_hooked, makes
from seqblocks.runtime.owner import Owner
from seqblocks.runtime.primitive import bound, parameters_of
from seqblocks.runtime.torch_modules import is_built
from seqblocks.state import States, compact

Values = dict[int, Tensor]
Run = Callable[[Values], None]


class _AsOp:
    """The steps of a cell as an op, for a sequence whose parts are on several ranks."""

    summary_cost = 0.0

    def __init__(self, run: Callable[..., tuple[Tensor, States]]) -> None:
        self.forward = run

    def transition(self, p: Any, call: Any, *inputs: Any) -> None:
        """Return None: the effect of the tokens on the state is known only after the loop."""


@makes(CellNode)
class Cell(Body, Owner):
    """Run steps token by token, with states."""

    def __init__(self, node: CellNode, place: Place) -> None:
        body = node.bodies[""]
        super().__init__(body, place._replace(streams=False), node.verb)
        self._declare(node, place)
        self._states = {name: state for name, state in body.states.items() if name != STARTED}
        self._old, self._new = body.ports, body.carried
        self._read = (body.input, *body.captures)
        self._chunk: int | None = node.arguments.chunk
        self._parts = parts = stages_of(body, place.types)
        plan = {step.name: step._replace(spent=()) for step in self._steps(body, body.nodes, place)}
        self._all = self._steps(body, body.nodes, place)
        self._before, self._loop, self._after, self._from_states = (
            [plan[each.name] for each in nodes] for nodes in (parts.before, parts.loop, parts.after, parts.from_states)
        )
        self._declared, self._rate = node.state, node.type.rate if node.type else 1

    @staticmethod
    def _steps(body: Graph, nodes: Sequence[Node], place: Place) -> list[Planned]:
        reads = [node.reads for node in nodes]
        spent = spent_values(body, reads) if len(nodes) == len(body.nodes) else [[] for _ in nodes]
        return [planned(*each, place) for each in zip(nodes, reads, spent, strict=True)]

    def _compute(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        if any(x is None for x in tensors):  # in the first phase of a stream with context
            return None, {}  # type: ignore[return-value]
        parameters = self.parameters_by_name(call)
        if call.relay:
            op: Any = _AsOp(self._forward)
            step = Carrying(self._path, op, self._declared, self._rate)
            return call.relay.run(step, parameters, call, [*tensors]), {}
        return self._forward(parameters, call, *tensors)

    def _forward(self, p: Mapping[str, Any], call: Call, *tensors: Tensor) -> tuple[Tensor, States]:
        x = tensors[0]
        starts = self._starts(p, x)
        before = self._begin(call.state, starts)
        inner = Call(call.training, directed=call.directed, routed=call.routed)
        if not x.shape[1]:
            assert self._type
            y, after = x.new_empty(*x.shape[:2], self._type.features), before
        elif torch.compiler.is_exporting():
            y, after = self._part(tensors, before, starts, call.resets, inner)
        elif dispatch.requested() == "reference":
            y, after = self._in_order(tensors, before, starts, call.resets, inner)
        else:
            size = self._parts.chunk(x.shape[1], self._chunk)
            y, after = self._in_parts_of(size, tensors, before, starts, call.resets, inner)
        y = y.to(x.dtype) if x.dtype.itemsize <= 2 < y.dtype.itemsize else y
        states: States = {name: compact(after[name]) for name in self._states} if call.return_state else {}
        if p and states:
            states[STARTED] = torch.ones(x.shape[0], 1, dtype=torch.int64, device=x.device)
            if not x.shape[1]:
                states[STARTED] = states[STARTED] * 0 if call.state is None else call.state[STARTED]
        return y, states

    # --- states -------------------------------------------------------------------------------------------------------

    def _starts(self, p: Mapping[str, Any], x: Tensor) -> dict[str, Tensor]:
        """Return the states [batch, features] before the first token of a sequence."""
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        found = {}
        for name, state in self._states.items():
            given = p.get(f"start_{name}")
            value = x.new_full((1,), state.fill, dtype=kind) if given is None else given.to(kind)
            found[name] = value.expand(x.shape[0], state.shape[0])
        return found

    def _begin(self, state: States | None, starts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the states before the first token of a call."""
        if state is None:
            return starts
        if STARTED not in state:
            return {name: state[name].to(start.dtype) for name, start in starts.items()}
        started = state[STARTED] != 0
        return {name: torch.where(started, state[name].to(start.dtype), start) for name, start in starts.items()}

    # --- the definition -----------------------------------------------------------------------------------------------

    def _token(
        self, inputs: Sequence[Tensor], before: dict[str, Tensor], starts: dict[str, Tensor], first: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run all steps on one token [batch, 1, features]. first [batch]: whether it begins a new sequence."""
        values = dict(zip(self._read, inputs, strict=True))
        for name, state in before.items():
            state = state if first is None else torch.where(first.unsqueeze(-1), starts[name], state)
            values[self._old[name]] = state.unsqueeze(1)
        for step in self._all:
            y, _ = call_child(self._modules[step.name], [values[v] for v in step.reads], call, step.name, step.node)
            add_exports(step, values, call)
            store(step, y, values)
        return values[self._result], {
            name: values[new].squeeze(1).to(before[name].dtype) for name, new in self._new.items()
        }

    def _in_order(
        self, tensors: Sequence[Tensor], before: dict[str, Tensor], starts: dict[str, Tensor], resets: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run all steps token by token."""
        results = []
        for t, inputs in enumerate(zip(*(_in_parts(x, 1, tensors[0]) for x in tensors), strict=True)):
            first = None if resets is None else resets[:, t]
            y, before = self._token(inputs, before, starts, first, call)
            results.append(y)
        return torch.cat(results, 1), before

    # --- all tokens of a part at once, except for the loop ------------------------------------------------------------

    def _in_parts_of(
        self, size: int, tensors: Sequence[Tensor], before: dict[str, Tensor], starts: dict[str, Tensor],
        resets: Tensor | None, call: Call,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run all tokens in parts of `size` tokens, each of which keeps only its inputs for the backward pass."""
        names = [*self._states]

        def part(first: Tensor | None, *given: Tensor) -> tuple[Tensor, ...]:
            own = dict(zip(names, given, strict=False))
            y, after = self._part(given[len(names) :], own, starts, first, call)
            return (y, *after.values())

        if size >= tensors[0].shape[1]:
            y, *after = part(resets, *before.values(), *tensors)
            return y, dict(zip(names, after, strict=True))
        again = torch.is_grad_enabled() and not call.compiling and not dispatch.transformed()
        draws = again and draws_now(self)
        results, states = [], [*before.values()]
        marks: Any = itertools.repeat(None) if resets is None else resets.split(size, 1)
        for first, *inputs in zip(marks, *(_in_parts(x, size, tensors[0]) for x in tensors), strict=False):
            if again:
                y, *states = checkpoint(
                    part, first, *states, *inputs, use_reentrant=False, preserve_rng_state=draws,
                    determinism_check="none",
                )  # fmt: skip
            else:
                y, *states = part(first, *states, *inputs)
            results.append(y)
        return torch.cat(results, 1), dict(zip(names, states, strict=True))

    def _part(
        self, tensors: Sequence[Tensor], before: dict[str, Tensor], starts: dict[str, Tensor], resets: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the outputs of some tokens, and the states after them."""
        values = dict(zip(self._read, tensors, strict=True))
        self._run_steps(self._before, values, call)
        if self._parts.groups and not torch.compiler.is_exporting():
            states = self._scanned(values, before, starts, resets, tensors[0].shape[1], call)
            after = {name: x[:, -1] for name, x in states.items()}
        else:
            after = self._looped(values, before, starts, resets, call)
            self._run_steps(self._after, values, call)
        return values[self._result], after

    def _looped(
        self, values: Values, before: dict[str, Tensor], starts: dict[str, Tensor], resets: Tensor | None,
        call: Call,
    ) -> dict[str, Tensor]:
        """Run the loop over the tokens, and add what later steps read of it to the values."""
        if torch.compiler.is_exporting() and not (isinstance(n := values[self._read[0]].shape[1], int) and n == 1):
            return self._as_one_node(values, before, starts, resets, call)
        kinds = {name: state.dtype for name, state in before.items()}
        states = {name: state.unsqueeze(1) for name, state in before.items()}
        first = {name: state.unsqueeze(1) for name, state in starts.items()}
        kept: dict[int, list[Tensor]] = {value: [] for value in self._parts.out_of_loop}
        steps = [self._bound(step, call) for step in self._loop]
        x = values[self._read[0]]
        tokens = [_in_parts(values[value], 1, x) for value in self._parts.into_loop]
        for t in range(x.shape[1]):
            if resets is not None:
                begins = resets[:, t, None, None]
                states = {name: torch.where(begins, first[name], state) for name, state in states.items()}
            own = {self._old[name]: state for name, state in states.items()}
            for value, parts in zip(self._parts.into_loop, tokens, strict=True):
                own[value] = parts[t]
            for step in steps:
                step(own)
            states = {name: own[new].to(kinds[name]) for name, new in self._new.items()}
            for value, parts in kept.items():
                parts.append(own[value])
        values.update({value: torch.cat(parts, 1) for value, parts in kept.items()})
        return {name: state.squeeze(1) for name, state in states.items()}

    def _as_one_node(
        self, values: Values, before: dict[str, Tensor], starts: dict[str, Tensor], resets: Tensor | None, call: Call
    ) -> dict[str, Tensor]:
        """Run the loop as one node of an exported program, which then supports any length."""
        from torch._higher_order_ops.scan import scan

        names, steps = [*self._states], [self._bound(step, call) for step in self._loop]
        sequences = [value for value in self._parts.into_loop if values[value].dim() == 3]
        fixed = {value: values[value] for value in self._parts.into_loop if values[value].dim() < 3}
        old, new, out, kinds = self._old, self._new, self._parts.out_of_loop, [before[name].dtype for name in names]

        def one(states: list[Tensor], token: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            own = dict(fixed)
            for value, x in zip(sequences, token, strict=False):
                own[value] = x.unsqueeze(1)
            for name, state in zip(names, states, strict=True):
                if resets is not None:
                    state = torch.where(token[-1].unsqueeze(-1), starts[name], state)
                own[old[name]] = state.unsqueeze(1)
            for step in steps:
                step(own)
            after = [own[new[name]].squeeze(1).to(kind).clone() for name, kind in zip(names, kinds, strict=True)]
            return after, [own[value].squeeze(1).clone() for value in out]

        tokens = [x.transpose(0, 1) for x in (*(values[v] for v in sequences), *([] if resets is None else [resets]))]
        after, kept = scan(one, [before[name].clone() for name in names], tokens)
        values.update({value: x.transpose(0, 1) for value, x in zip(out, kept, strict=True)})
        return dict(zip(names, after, strict=True))

    def _scanned(
        self, values: Values, before: dict[str, Tensor], starts: dict[str, Tensor], resets: Tensor | None, tokens: int,
        call: Call,
    ) -> dict[str, Tensor]:
        """Compute the states of all tokens by an associative scan, and then the steps that read them."""
        assert self._parts.groups
        forms: dict[int, Any] = {value: linear_forms.Form({name: 1.0}, None) for name, value in self._old.items()}
        for step in self._loop:
            op, child = step.node.op, self._modules[step.name]
            assert isinstance(op, Calc)
            assert child is not None
            given = {}
            for name, (value,) in step.node.inputs.items():
                x: Any = forms.get(value, values.get(value))
                given[name] = x.unsqueeze(1) if value in step.node.vectors else x
            if op.learned:
                given |= parameters_of(child, call)
            forms[step.node.outputs[0]] = computed(program_of(op.formula), given, affine.apply)
        new = {name: forms.get(value, values.get(value)) for name, value in self._new.items()}
        states: dict[str, Tensor] = {}
        for group in self._parts.groups:
            states |= affine.states(group, new, before, starts, resets, tokens)
        for name, state in states.items():
            old = torch.cat([before[name].unsqueeze(1), state[:, :-1]], 1)
            if resets is not None:
                old = torch.where(resets.unsqueeze(-1), starts[name].unsqueeze(1), old)
            values[self._old[name]] = old
        for name, value in self._new.items():
            values[value] = states[name]
        self._run_steps(self._from_states, values, call)
        return {name: states[name] for name in self._states}

    # --- running steps ------------------------------------------------------------------------------------------------

    def _run_steps(self, steps: Sequence[Planned], values: Values, call: Call) -> None:
        """Compute the outputs of some steps from the values, and add them."""
        for step in steps:
            self._bound(step, call)(values)

    def _bound(self, step: Planned, call: Call) -> Run:
        """Return a function that runs one step. One of an unmodified primitive reads its parameters only once."""
        child, reads = self._modules[step.name], step.reads
        assert child is not None

        def by_module(values: Values) -> None:
            y, _ = call_child(child, [values[v] for v in reads], call, step.name, step.node)
            add_exports(step, values, call)
            store(step, y, values)

        if not is_built(child) or is_hooked(child) or nn.modules.module._has_any_global_hook():
            return by_module
        run = bound(child, call)

        def by_op(values: Values) -> None:
            store(step, run([values[v] for v in reads]), values)

        return by_op


def _in_parts(x: Tensor, size: int, first: Tensor) -> Sequence[Tensor]:
    """Return x [batch, seq, features] in parts of `size` tokens, or a vector once for each part of `first`."""
    return x.split(size, 1) if x.dim() == 3 else [x] * -(-first.shape[1] // size)
