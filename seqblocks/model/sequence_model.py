"""The module that `build` returns."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from seqblocks import graph
from seqblocks.cost import dtype_named
from seqblocks.errors import RunError, UsageError, listing
from seqblocks.graph import ModelSpec
from seqblocks.kernels import dispatch
from seqblocks.kernels.dispatch.compiled import constant
from seqblocks.kernels.int8 import scales
from seqblocks.kernels.positions import packed_resets
from seqblocks.ops.rate import PartOfWindow
from seqblocks.runtime import (  # noqa: F401 - they register their modules
    arguments,
    cell,
    choose,
    each,
    parallel,
    repeat,
    residual,
    scan,
)
from seqblocks.runtime.agreement import check_inputs
from seqblocks.runtime.body import Body, first_of_tail
from seqblocks.runtime.call import Call, Grid, Relay
from seqblocks.runtime.experts import LOSSES, Routed
from seqblocks.runtime.grids import grid_sources
from seqblocks.runtime.initialise import draw_all
from seqblocks.runtime.modules import Place, is_hooked
from seqblocks.runtime.primitive import Primitive
from seqblocks.runtime.shards import TensorShards
from seqblocks.runtime.shared_parameters import connect, share_entries, tie, tie_names, tied_names
from seqblocks.runtime.weight_decay import decay_rules
from seqblocks.state import States, check_state, declared, new_state, reset, smallest_dtype
from seqblocks.streaming.plan import TokenPlan, plan_tokens
from seqblocks.streaming.stream import Stream
from seqblocks.streaming.token_rows import has_tokens
from seqblocks.streaming.traced import is_traceable


class SequenceModel(Body):
    """A model built from a spec: an ordinary module whose parameters have the names in the YAML.

    Called with one input ([batch, seq, features], token ids [batch, seq], images [batch, channels, height, width] or
    vectors [batch, features], according to `input:` of the spec), it returns the output, or (output, state) with
    `return_state=True`. If the spec has `inputs:`, they are passed by name; if it has `outputs:`, the output is a dict.
    `spec` is the analysed spec, and `graph` its steps. `frame_size` is the number of tokens that a stream takes at
    once: 1 unless the spec merges tokens. `takes_frames` is whether `step` takes a frame [batch, frame_size, ...]: so
    it does if the spec changes the rate of its tokens.
    """

    tensor_shards: TensorShards | None = None  # set if each rank computes a part of the model (`tensor_parallel`)
    latest_routing: dict[str, list[Routed]] | None = None  # of the latest call in training mode, by step
    keeps_routing = False  # whether calls keep these choices in any mode
    sequence_relay: Relay | None = None  # set during a call on a part of a sequence that ranks share

    def __init__(self, spec: ModelSpec) -> None:
        shared = [item for item in graph.parameters(spec.graph, shared=True) if item.shared]
        self._exact = graph.is_exact(spec.graph)
        names = frozenset(item.name for item in shared)
        sources = grid_sources(spec.graph, spec.types)
        obstacle = graph.stream_obstacle(spec)
        self._has_context = graph.begins(spec.graph)
        place = Place(spec.types, sources, "", names, streams=self._has_context, exact=self._exact)
        super().__init__(spec.graph, place, spec.name)
        connect(self, shared)
        self.spec, self.graph = spec, spec.graph
        self._first_of_tail = first_of_tail(self._plan)
        self._timed = frozenset(value for value, wire in spec.types.items() if has_tokens(wire))
        lengths = [wire.length for wire in spec.inputs.values() if isinstance(wire.length, str)]
        self._share_lengths, self._first = len({*lengths}) < len(lengths), next(iter(spec.inputs), "")
        self._context_names = {value: name for name, value in spec.graph.ports.items()}
        inputs = zip(spec.graph.reads, spec.inputs.values() or (spec.input,), strict=True)
        self._grids = {value: wire.grid for value, wire in inputs if wire.grid and wire.kind != "image"}
        self.declared_state = declared(spec.graph)
        self.streaming_obstacle = " cannot stream: ".join(obstacle) if obstacle else None
        self.resets_obstacle = _resets_obstacle(spec)
        self.frame_size, self.takes_frames = graph.frame_size(spec.graph), graph.takes_frames(spec.graph)
        self._has_tokens = has_tokens(spec.output)
        self.token_outputs = {name for name, wire in spec.outputs.items() if has_tokens(wire)}
        if next(self.parameters(), None) is None:  # without parameters, a buffer has the model's device and dtype
            self.register_buffer("_like", torch.empty(0), persistent=False)
        self.has_experts = any(isinstance(node, graph.ExpertsNode) for node in graph.walk(spec.graph))
        self._step_axes = ["batch", str(self.frame_size)] if self.takes_frames else ["batch"]
        self.latest_stream = object()  # identifies it, so that a plan of an earlier one is not used
        self.token_plan: TokenPlan | None = None
        self.traced_plan: TokenPlan | None = None  # the plan for compiled code

    def forward(  # type: ignore[override]  # a model is called by a user, the other bodies with a Call
        self,
        x: Tensor | None = None,
        *,
        state: States | None = None,
        return_state: bool = False,
        resets: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        grid: tuple[int, int] | None = None,
        **inputs: Tensor,
    ) -> Any:
        """Run a whole sequence, or continue from `state`.

        inputs: those of `inputs:` by name. The first one streams and may also be passed as `x`. With `state`, pass only
        the first one; the state contains everything that depends on the others.
        resets [batch, seq] (bool): True where a token is the FIRST of a new sequence. cu_seqlens [n + 1]: the bounds of
        n sequences packed into a batch of one, from 0 to the number of tokens. grid: rows and columns of the tokens of
        an image, if the input is tokens and differs from the grid in the spec. Raises RunError for invalid arguments,
        and if a step would mix sequences separated by resets, such as a mean over all tokens.
        """
        if inputs or x is None:
            x, inputs = arguments.named_input(self.spec.inputs, x, inputs)
        if self.tensor_shards:
            check_inputs(self.tensor_shards.group, {**inputs, "x": x, "resets": resets, "cu_seqlens": cu_seqlens})
        self._check_call(x, "the model", ["batch", "seq"], resets, cu_seqlens)
        if grid is not None:
            arguments.check_grid(self.spec.input, x, grid)
        streaming = state is not None or return_state
        if streaming:
            self._check_stream(x, state)
        if cu_seqlens is not None:
            resets = packed_resets(cu_seqlens, x.shape[1], x.device)
        keeps = self.has_experts and (self.training or self.keeps_routing)
        routed: dict[str, list[Routed]] | None = {} if keeps else None
        if self.has_experts:
            self.latest_routing = routed
        call = Call(
            self.training, state, return_state, resets, False, streaming, self._grid(grid), routed=routed,
            relay=self.sequence_relay,
        )  # fmt: skip
        y, states = self._run_call(x, inputs, call)
        return (y, states) if return_state else y

    _own_forward: Any = forward  # in a class whose steps may run from a plan; a subclass may replace `forward`

    def _read(self, x: Tensor, state: States, resets: Tensor | None) -> tuple[Any, States]:
        """Return the output of at least the last token and the state after these tokens; a head runs on the last."""
        observed = is_hooked(self) or nn.modules.module._has_any_global_hook()
        if self.training or observed or type(self) is not SequenceModel or self.sequence_relay:
            return self(x, state=state, return_state=True, resets=resets)
        if self.tensor_shards:
            check_inputs(self.tensor_shards.group, {"x": x, "resets": resets})
        self._check_call(x, "the model", ["batch", "seq"], resets)
        self._check_stream(x, state)
        self.latest_routing = None
        planned = None if resets is not None or self._has_context else self._plan_for(x)
        if planned is not None and (done := planned.read(state, x)):
            return done
        return self._run_call(x, {}, Call(False, state, True, resets, False, True, self._grid(), last_only=True))

    def _run_call(self, x: Tensor, inputs: dict[str, Tensor], call: Call) -> tuple[Any, States]:
        if self._has_context:
            return self._run_with_context(x, inputs, call)
        return self._run_explained({self.graph.input: x}, call)

    def _run_with_context(self, x: Tensor, inputs: dict[str, Tensor], call: Call) -> tuple[Any, States]:
        """Run the steps of a model with several inputs. A stream first runs those that depend on the context only."""
        if call.state is None:
            arguments.check_context(self.spec.inputs, inputs, x.shape[0], next(iter(self.spec.inputs), "the input"))
        else:
            arguments.check_no_context(inputs)
        if self._share_lengths and not call.compiling:
            arguments.check_same_lengths(self.spec.inputs, {**({} if call.streaming else {self._first: x}), **inputs})
        if not call.streaming:
            return self._run_explained({self.graph.input: x} | self._context_values(inputs), call)
        if call.state is None:
            call.state = self._context_state(inputs, x.shape[0], call.routed)
        call.phase = "stream"
        kept = call.state.get("input", {})
        y, states = self._run_explained({self.graph.input: x} | self._context_values(kept), call)
        return y, states | ({"input": kept} if kept else {})

    def _context_values(self, inputs: dict[str, Tensor]) -> dict[int, Tensor]:
        return {self.graph.ports[name]: x for name, x in inputs.items()}

    def _context_state(
        self, inputs: dict[str, Tensor], batch: int, routed: dict[str, list[Routed]] | None = None
    ) -> States:
        """Run the steps that come before the first token, and return the part of the state that they determine."""
        call = Call(
            self.training, return_state=True, streaming=True, grid=self._grid(), phase="context", routed=routed,
            batch=batch,
        )  # fmt: skip
        _, states = self._run_explained(self._context_values(inputs), call)
        return states | ({"input": {name: inputs[name] for name in self.graph.kept}} if self.graph.kept else {})

    def _grid(self, size: tuple[int, int] | None = None) -> Grid:
        """Return the rows and columns of the inputs that are tokens; `size` replaces those of the first input."""
        if not self._grids and size is None:
            return Grid(context=self._context_names)
        sizes = self._grids | ({self.graph.input: size} if size else {})
        others = tuple(grid for value, grid in sizes.items() if value != self.graph.input)
        return Grid(sizes.get(self.graph.input), others, sizes, self._context_names)

    def _check_call(self, x: Any, reader: str, axes: list[str], resets: Any, cu_seqlens: Any = None) -> None:
        arguments.check_input(self.spec.input, x, reader, axes)
        if x.is_meta:  # a model that reads only the shape would run without an error
            self._check_device(x)
        if resets is not None or cu_seqlens is not None:
            if self.resets_obstacle:
                raise RunError(self.resets_obstacle)
            arguments.check_marks(x, resets, cu_seqlens, axes)

    def _check_stream(self, x: Tensor, state: States | None) -> None:
        if self.streaming_obstacle:
            raise RunError(self.streaming_obstacle)
        size = self.frame_size
        if size > 1 and x.shape[1] % size:
            raise RunError(f"the model streams {size} tokens at a time: pass a multiple, not {x.shape[1]}")
        if state is not None:
            check_state(self.declared_state, state, x.shape[0], x.device)

    def _run_explained(self, values: dict[int, Tensor], call: Call) -> tuple[Any, States]:
        """Run the steps. A torch error caused by the input's device or dtype becomes a RunError.

        Checking these against all parameters before each call would take time.
        """
        if call.compiling:
            return self._run(values, call)
        inputs = tuple(values.values())
        if self._exact:  # steps convert float32 values, so that torch would not report an input of the wrong dtype
            self._check_dtype(inputs)
        try:
            return self._run(values, call)
        except PartOfWindow as error:
            length, size = inputs[0].shape[1] if inputs else 0, self.frame_size
            if error.factor == size or length % size == 0:
                raise  # it names the right numbers, or those of another input
            message = f"the model merges {size} tokens into one: pass a multiple of {size}, not {length}"
            raise RunError(message) from None
        except RuntimeError as error:
            for x in inputs:
                self._check_device(x)
            if reason := arguments.dtype_fault(inputs, self._plain_dtypes(), self.own_dtype(), error):
                raise RunError(reason) from error
            raise

    def _check_dtype(self, inputs: tuple[Tensor, ...]) -> None:
        for x in inputs:
            if x.is_floating_point() and (reason := arguments.too_wide(x, self.own_dtype())):
                raise RunError(reason)

    def step(
        self, x: Tensor, state: States | None = None, *, resets: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, States]:
        """Run one token: x [batch, features] (or token ids [batch]) -> (y [batch, features], state).

        resets [batch] (bool): True where the token is the first of a new sequence, such as an agent's new episode.

        A model that changes the rate of its tokens takes a frame: x [batch, frame_size, features] (or token ids [batch,
        frame_size]) -> (y [batch, tokens, features], state), with the output tokens of that frame: 4 for a frame of one
        token, if each becomes 4. It does not take resets.

        Raises RunError for other arguments, and for a token or state that does not fit.
        """
        if others:
            arguments.report_extra(self.spec.inputs, others)
        if self.streaming_obstacle:
            raise RunError(self.streaming_obstacle)
        if self._has_context and not self.graph.ports and state is None:
            self._check_call(x, "a step", self._step_axes, resets)
            state = self.init_state(x.shape[0])
        planned = None if self.takes_frames and torch.compiler.is_compiling() else self._plan_for(x)
        if planned is None or resets is not None or not planned.takes(x):
            self._check_call(x, "a step", self._step_axes, resets)
        if self._has_context and state is None:
            context = ", ".join(f"{name}=…" for name in self.graph.ports)
            how = f"state = model.init_state(batch, {context})"
            raise RunError(f"a stream of this model begins with its context: {how}")
        if planned is not None and planned.suits(x):
            if found := self._run_planned(planned, x, state, resets):
                return found
        if self.takes_frames:
            done: tuple[Tensor, States] = self(x, state=state, return_state=True, resets=resets)
            return done
        resets = None if resets is None else resets.unsqueeze(1)
        y, states = self(x.unsqueeze(1), state=state, return_state=True, resets=resets)
        if self.token_outputs or not self._has_tokens:
            return self._of_one_token(y), states
        return y.squeeze(1), states

    def _of_one_token(self, y: Any) -> Any:
        """Return the output of one token, or the outputs by name, without the time axis."""
        if not isinstance(y, dict):
            return y
        return {name: x.squeeze(1) if name in self.token_outputs else x for name, x in y.items()}

    def _run_planned(
        self, plan: TokenPlan, x: Tensor, state: States | None, resets: Tensor | None
    ) -> tuple[Tensor, States] | None:
        """Return the result of a step, or None if the state does not match the plan's declaration."""
        if self.tensor_shards:
            check_inputs(self.tensor_shards.group, {"x": x, "resets": resets})
        if self.has_experts:
            self.latest_routing = None
        if state is None:
            state = new_state(self.declared_state, x.shape[0], x.device, plan.dtype)
        if resets is not None:
            check_state(self.declared_state, state, x.shape[0], x.device)
            state = reset(self.declared_state, state, resets)
        try:
            return plan.run(state, x)
        except (KeyError, TypeError, AttributeError):
            check_state(self.declared_state, state, x.shape[0], x.device)
            raise

    def unguarded_step(self, x: Tensor) -> Callable[[Tensor, States], tuple[Any, States]] | None:
        """Return `step` for a few tokens like x, without comparisons, or None if user code may run in a step.

        `step` compares all parameters before each token. Large weights displace what it reads from the cache, so that
        this takes 2 to 4 % of a token's time.
        """
        is_own = type(self) is SequenceModel and "step" not in self.__dict__
        planned = self._plan_for(x) if is_own and not self.takes_frames else None
        if planned is None or planned.calls_modules or not planned.takes(x):
            return None
        return lambda x, state: planned.run(state, x) or self.step(x, state)

    def _plan_for(self, x: Tensor) -> TokenPlan | None:
        """Return the plan for a token like x without gradients, rebuilt if the model has changed, or None."""
        if torch.is_grad_enabled() or self.training or type(x) is not Tensor or not x.is_cpu:
            return None
        if torch.is_autocast_enabled("cpu") or dispatch.requested() not in ("auto", "torch"):
            return None
        if type(self).forward is not type(self)._own_forward:
            return None
        found: TokenPlan | None
        if torch.compiler.is_compiling():
            found = self.traced_plan if self._is_traceable() and x.numel() else None
        else:
            found = self._current_plan() if x.numel() else None  # planned functions take a token or more
        if found is None or (x.is_floating_point() and x.dtype != found.dtype):
            return None
        return found

    @constant  # as a method: the compiler of torch 2.9 passes no module to a function
    def _is_traceable(self) -> bool:
        return is_traceable(self)

    def _current_plan(self) -> TokenPlan | None:
        if dispatch.transformed():
            return None
        found, stream = self.token_plan, self.latest_stream
        if found is not None and found.holds():
            if found.is_current(stream):
                return found
            found = found.renewed(stream)
        else:
            found = None
        self.token_plan = found = found or self._new_plan(stream)
        return found

    def _new_plan(self, stream: object) -> TokenPlan | None:
        if nn.modules.module._has_any_global_hook():
            return None
        return plan_tokens(self, self.spec, self.declared_state, stream)

    def _repr_html_(self) -> str:
        from seqblocks.descriptions.summary import summarise  # only needed in a notebook

        return summarise(self)._repr_html_()

    def _start_stream(self) -> None:
        """Make the next step compute values derived from parameters again. Compiled code does so at each step."""
        if not torch.compiler.is_compiling():
            self.latest_stream = object()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move or convert all parameters. Those of tied names stay one parameter, also on and from the meta device.

        The plan is deleted, so that it does not keep the old parameters in memory.
        """
        self.token_plan = None
        tied = tied_names(self, self.graph)
        super()._apply(fn, recurse)
        tie_names(self, tied)
        self._start_stream()  # Another thread may have made a plan meanwhile.
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: Any
    ) -> None:
        """Load parameters. Those of tied names stay one parameter if they are assigned, not copied (`assign=True`)."""
        if local_metadata.get("assign_to_params_buffers"):
            share_entries(self, self.graph, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without plans and results of the latest call, which cannot be copied."""
        return {**self.__dict__, "token_plan": None, "traced_plan": None, "latest_routing": None}

    def init_state(
        self, batch_size: int, device: Any = None, dtype: torch.dtype | str | None = None, **inputs: Tensor
    ) -> States:
        """Return the state before the first token of `batch_size` sequences: nested dicts of tensors, by step names.

        device, dtype: by default those of the model. inputs: those that do not stream, by name; the state contains the
        values computed from them. Raises RunError if the model cannot stream, UsageError or UnavailableError for
        invalid arguments.
        """
        if self.streaming_obstacle:
            raise RunError(self.streaming_obstacle)
        count = _count(batch_size)
        device = self.some_tensor().device if device is None else arguments.checked_device(device)
        kind = self.own_dtype() if dtype is None else getattr(torch, dtype_named(str(dtype), "dtype"))
        self._start_stream()
        if not (self._has_context or inputs):
            return new_state(self.declared_state, count, device, kind)
        if self.tensor_shards:
            check_inputs(self.tensor_shards.group, inputs)
        arguments.check_names_of_context(self.spec.inputs, inputs, count)
        arguments.check_context(self.spec.inputs, inputs, count, "the state")
        arguments.check_same_lengths(self.spec.inputs, inputs)
        return new_state(self.declared_state, count, device, kind, self._context_state(inputs, count))

    def stream(self, batch_size: int, device: Any = None, **inputs: Tensor) -> Stream:
        """Return a stream of `batch_size` sequences that manages its own state; arguments as in `init_state`."""
        with torch.inference_mode():
            return Stream(self, self.init_state(batch_size, device, None, **inputs))

    def parameter_groups(self, weight_decay: float = 0.01) -> list[dict[str, Any]]:
        """Return two parameter groups for an optimiser: those with weight decay, and the others.

        A parameter that is parametrised or pruned stays in its group. Raises UsageError.
        """
        if isinstance(weight_decay, bool) or not isinstance(weight_decay, int | float) or not weight_decay >= 0:
            raise UsageError(f"weight_decay must be a number, at least 0, not {weight_decay!r}")
        rules = decay_rules(self, self.graph)
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for parameter in self.parameters():
            groups[rules.get(id(parameter), True)].append(parameter)
        return [
            {"params": groups[True], "weight_decay": weight_decay},
            {"params": groups[False], "weight_decay": 0.0},
        ]

    def auxiliary_losses(self, kind: str = "balance") -> dict[str, Tensor]:
        """Return a loss of the latest call for each `experts` step, by its path. The call must be in training mode.

        kind: `balance` (1 if all experts are used equally, more if some are preferred), or `router_z` (the mean square
        of the router's log-sum-exp). Raises RunError if the latest call was not in training mode, and UsageError.
        """
        if kind not in LOSSES:
            raise UsageError(f"there is no auxiliary loss {kind!r}: it is one of {listing(LOSSES)}")
        if self.has_experts and self.latest_routing is None:
            raise RunError("auxiliary losses need a call in training mode: call model.train(), then the model")
        return {path: LOSSES[kind](routed) for path, routed in (self.latest_routing or {}).items()}

    @property
    def whole_spec(self) -> ModelSpec:
        """Spec of the whole model: `spec`, unless this is a rank's part of it."""
        return self.tensor_shards.spec if self.tensor_shards else self.spec

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = 0) -> None:
        """Initialise all parameters again. Equal seeds give equal weights on every device and in every dtype.

        None draws a seed from torch's default generator (see torch.manual_seed). Raises RunError for a quantized model.
        """
        if next(scales(self), None) is not None:
            raise RunError("a quantized model cannot be initialised: initialise the original, then quantize it")
        if seed is None:
            seed = int(torch.randint(1 << 62, (), device="cpu"))
        draw_all(self, self.whole_spec.graph, seed, self.tensor_shards)
        for step in self.modules():
            if isinstance(step, Primitive):
                step.reset_buffers()
        self.tie()

    def tie(self) -> None:
        """Restore shared parameters of tied names, after they were copied one by one."""
        tie(self, self.graph)

    def some_tensor(self) -> Tensor:
        """Return a tensor on the model's device; if the model has no parameters, also in the model's dtype."""
        like = self._buffers.get("_like")
        return next(self._stored(), torch.empty(0, device="cpu", dtype=torch.float32)) if like is None else like

    def own_dtype(self) -> torch.dtype:
        """Return the dtype that the model was built in."""
        like = self._buffers.get("_like")
        return smallest_dtype(self._stored()) or (torch.float32 if like is None else like.dtype)

    def _plain_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtypes of parameters by name, without those that are float32 in a 16-bit model."""
        full = {item.name for item in graph.parameters(self.graph) if item.parameter.full_precision}
        return {name: p.dtype for name, p in self.named_parameters() if name not in full and p.is_floating_point()}

    def _stored(self) -> Iterator[Tensor]:
        """Yield the parameters, and the scales of those that are stored in 8 bits."""
        return chain(self.parameters(), scales(self))

    def _check_device(self, x: Tensor) -> None:
        """Raise RunError if no parameter is on the input's device."""
        places = dict.fromkeys(x.device for x in self._stored())
        if places and x.device not in places:
            own = next(iter(places))
            hint = f"move one to the other, for instance x.to('{own}')"
            raise RunError(f"the model is on {own} and the input on {x.device}: {hint}")


def _resets_obstacle(spec: ModelSpec) -> str | None:
    if spec.input.kind in ("image", "vector"):
        return f"the model reads {spec.input.kind}s, each a sequence by itself: it takes neither resets nor cu_seqlens"
    obstacle = graph.resets_obstacle(spec)
    if obstacle is None:
        return None
    what = " would mix the sequences that resets or cu_seqlens separate: ".join(obstacle)
    return f"{what}. Give each sequence a row and a state of its own"


def _count(batch_size: Any) -> Any:
    if isinstance(batch_size, torch.SymInt):  # symbolic while a program is traced
        return batch_size
    try:
        count = -1 if isinstance(batch_size, bool) else operator.index(batch_size)
    except TypeError:
        count = -1
    if count < 0:
        shown = repr(batch_size) if isinstance(batch_size, (str, int, float)) else type(batch_size).__name__
        raise UsageError(f"batch_size must be a number of sequences, not {shown}")
    return count
