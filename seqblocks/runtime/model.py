"""What `build` gives: the outermost body, with what a caller may hand it and ask of it."""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import Tensor, nn

from seqblocks import graph
from seqblocks.cost import dtype_named
from seqblocks.errors import RunError, UnavailableError, UsageError
from seqblocks.graph import ModelSpec
from seqblocks.kernels.positions import packed_resets
from seqblocks.runtime.module import Body, Call, Grid
from seqblocks.state import States, check_state, new_state


class SequenceModel(Body):
    """A built spec: an ordinary module whose parameters carry the names of the YAML.

    Called with one input ([batch, seq, features], token numbers [batch, seq] or images [batch, channels, height,
    width], as the spec's `input:` says), it returns the output; with `return_state=True`, (output, state).
    `spec` is the analysed spec that it was built from, and `graph` the steps of it.
    `frame_size`: how many tokens a stream takes at once, 1 unless the spec changes the rate of its tokens.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec.graph, spec, "", frozenset(), spec.name)
        self.spec, self.graph = spec, spec.graph
        obstacle = graph.stream_obstacle(spec)
        self._obstacle = " cannot stream: ".join(obstacle) if obstacle else None
        self.frame_size = graph.frame_size(spec.graph)
        self._has_tokens = spec.output is not None and spec.output.kind in ("sequence", "tokens")
        if next(self.parameters(), None) is None:  # then this says on which device and in which dtype the model is
            self.register_buffer("_like", torch.empty(0), persistent=False)
        self._step_axes = ["batch"] if self.frame_size == 1 else ["batch", str(self.frame_size)]

    def forward(
        self,
        x: Tensor,
        *,
        state: States | None = None,
        return_state: bool = False,
        resets: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        grid: tuple[int, int] | None = None,
    ) -> Any:
        """Run a whole sequence, or go on from `state`.

        resets [batch, seq] (bool) is True where a token is the FIRST of a new sequence; cu_seqlens [n + 1] gives the
        bounds of n sequences packed into a batch of one, 0 first and the number of tokens last. grid: rows and columns
        of the tokens of an image, where the input is tokens and the spec's own grid does not fit. Raises RunError.
        """
        self._check_call(x, resets, cu_seqlens)
        streaming = state is not None or return_state
        if streaming and self._obstacle:
            raise RunError(self._obstacle)
        size = self.frame_size
        if streaming and size > 1 and x.shape[1] % size:
            raise RunError(f"the model streams {size} tokens at a time: give it a multiple, not {x.shape[1]}")
        if state is not None:
            check_state(self.spec, state, x.shape[0], x.device)
        if cu_seqlens is not None:
            resets = _packed_resets(x, cu_seqlens, resets)
        grid = grid or (self.spec.input.grid if self.spec.input.kind != "image" else None)
        call = Call(self.training, state, return_state, resets, False, streaming, Grid(grid))
        if call.compiling:
            y, states = self._run({self._body.input: x}, call)
        else:
            try:
                y, states = self._run({self._body.input: x}, call)
            except RuntimeError as error:  # looking at every parameter before each call would cost time
                told = self._other_device(x) or self._other_dtype(x, error)
                if told is None:
                    raise
                raise RunError(told) from error
        return (y, states) if return_state else y

    def step(
        self, x: Tensor, state: States | None = None, *, resets: Tensor | None = None
    ) -> tuple[Tensor, States]:
        """One token: x [batch, features] (or token numbers [batch]) -> (y [batch, features], state).

        resets [batch] (bool) is True where the token is the first of a new sequence: an agent's new episode.

        A model that changes the rate of its tokens takes a frame: x [batch, frame_size, features] (or numbers [batch,
        frame_size]) -> (y [batch, tokens, features], state), with what the output has of a frame. It knows no resets.
        """
        self._check_call(x, resets, step=True)
        if self.frame_size > 1:
            done: tuple[Tensor, States] = self(x, state=state, return_state=True, resets=resets)
            return done
        resets = None if resets is None else resets.unsqueeze(1)
        y, states = self(x.unsqueeze(1), state=state, return_state=True, resets=resets)
        return (y.squeeze(1) if self._has_tokens else y), states

    def init_state(self, batch_size: int, device: Any = None, dtype: torch.dtype | str | None = None) -> States:
        """The state before the first token of `batch_size` sequences: a dict of dicts of tensors, by step names.

        On the model's device and in its dtype, unless told otherwise. Raises RunError where the model cannot stream,
        UsageError and UnavailableError for arguments.
        """
        if self._obstacle:
            raise RunError(self._obstacle)
        try:
            count = -1 if isinstance(batch_size, bool) else operator.index(batch_size)
        except TypeError:
            count = -1
        if count < 0:
            raise UsageError(f"a state is that of a number of sequences, not of {batch_size!r}")
        device = self._some().device if device is None else checked_device(device)
        kind = self._own_dtype() if dtype is None else getattr(torch, dtype_named(str(dtype), "dtype"))
        return new_state(self.graph, count, device, kind)

    def _some(self) -> Tensor:
        """A tensor on the model's device; in its dtype, if the spec has no parameters."""
        like = self._buffers.get("_like")
        return next(self.parameters(), torch.empty(0, device="cpu", dtype=torch.float32)) if like is None else like

    def parameter_groups(self, weight_decay: float = 0.01) -> list[dict[str, Any]]:
        """Two groups for an optimiser: parameters that are customarily decayed, and the others. Raises UsageError."""
        if isinstance(weight_decay, bool) or not isinstance(weight_decay, int | float) or not weight_decay >= 0:
            raise UsageError(f"a weight decay is a number from 0 on, not {weight_decay!r}")
        decays = {item.name: item.parameter.decay for item in graph.parameters(self.graph) if not item.tied}
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in self.named_parameters():
            groups[decays.get(name, True)].append(parameter)
        return [
            {"params": groups[True], "weight_decay": weight_decay},
            {"params": groups[False], "weight_decay": 0.0},
        ]

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = 0) -> None:
        """Draw all parameters anew: the same seed gives the same weights on every device and in every dtype.

        Without one (None), torch's own generator gives a seed, so that torch.manual_seed governs.
        """
        from seqblocks.runtime.initialise import draw

        if seed is None:
            seed = int(torch.randint(1 << 62, (), device="cpu"))
        for item in graph.parameters(self.graph):
            if item.tied is None:
                draw(self.get_parameter(item.name), item.name, item.parameter, seed)
        self.tie()

    def tie(self) -> None:
        """Let tied names share one parameter (again, after something that copies parameters one by one)."""
        for item in graph.parameters(self.graph):
            if item.tied is not None:
                holder, _, leaf = item.name.rpartition(".")
                self.get_submodule(holder).register_parameter(leaf, self.get_parameter(item.tied))

    def _check_call(self, x: Any, resets: Any, cu_seqlens: Any = None, step: bool = False) -> None:
        """RunError unless these are what a call takes, or, with one token in place of a sequence, a step."""
        axes = self._step_axes if step else ["batch", "seq"]
        self._check_input(x, "a step" if step else "the model", axes, step)
        if resets is not None or cu_seqlens is not None:
            self._check_marks(x, resets, cu_seqlens, axes)

    def _check_input(self, x: Any, who: str, axes: list[str], step: bool) -> None:
        if not isinstance(x, Tensor):
            raise RunError(f"{who} reads a tensor, not {type(x).__name__}")
        if step and self._obstacle:
            raise RunError(self._obstacle)
        if x.is_meta:  # not every step would mind: some read its shape alone
            told = self._other_device(x)
            if told:
                raise RunError(told)
        wire = self.spec.input
        if wire.kind == "image":
            if x.ndim != 4 or x.shape[1] != wire.features:
                raise RunError(f"{who} reads images [batch, {wire.features}, height, width], not {list(x.shape)}")
        elif wire.kind == "tokens":
            if x.ndim != len(axes) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
                raise RunError(f"{who} reads token numbers [{', '.join(axes)}], not {x.dtype} {list(x.shape)}")
        elif x.ndim != len(axes) + 1 or x.shape[-1] != wire.features:
            raise RunError(f"{who} reads [{', '.join(axes)}, {wire.features}], not {list(x.shape)}")
        if wire.kind != "tokens" and not x.is_floating_point():
            how = "its parts are torch.view_as_real(x)" if x.is_complex() else "convert with x.float()"
            raise RunError(f"{who} reads floating numbers, not {x.dtype}: {how}")

    def _check_marks(self, x: Tensor, resets: Any, cu_seqlens: Any, axes: list[str]) -> None:
        """RunError unless these mark where sequences begin in x."""
        for name, given in (("resets", resets), ("cu_seqlens", cu_seqlens)):
            if given is not None and not isinstance(given, Tensor):
                raise RunError(f"{name} is a tensor, not {type(given).__name__}")
        if self.spec.input.kind == "image":
            raise RunError("the model reads images, each a sequence by itself: it takes neither resets nor cu_seqlens")
        if resets is not None:
            if resets.dtype != torch.bool or resets.shape != x.shape[: len(axes)]:
                wanted = list(x.shape[: len(axes)])
                raise RunError(f"resets must be bool of shape {wanted}, not {resets.dtype} {list(resets.shape)}")
            if resets.device != x.device:
                raise RunError(f"resets is on {resets.device} and the input on {x.device}: move it with .to(x.device)")
        if cu_seqlens is not None and cu_seqlens.is_meta and not x.is_meta:
            raise RunError(f"cu_seqlens is on meta, where no numbers are, and the input on {x.device}")

    def _other_device(self, x: Tensor) -> str | None:
        """What to do about an input that is where no parameter is."""
        places = dict.fromkeys(p.device for p in self.parameters())
        if not places or x.device in places:
            return None
        own = next(iter(places))
        return f"the model is on {own} and the input on {x.device}: move one to the other, for instance x.to('{own}')"

    def _own_dtype(self) -> torch.dtype:
        """What the model was built in: some parameters of a half-precision model stay float32."""
        kinds = {p.dtype for p in self.parameters() if p.is_floating_point()}
        like = self._buffers.get("_like")
        return min(kinds, key=lambda d: d.itemsize, default=torch.float32 if like is None else like.dtype)

    def _other_dtype(self, x: Tensor, error: RuntimeError) -> str | None:
        """What to do about an error of torch's that is one of dtypes, as far as the input's is to blame."""
        own = self._own_dtype()
        if not x.is_floating_point() or x.dtype == own:
            return None
        if not re.search("dtype|scalar type|input type", str(error), re.IGNORECASE):
            return None
        given, kept = str(x.dtype).removeprefix("torch."), str(own).removeprefix("torch.")
        what = f"the model is {kept} and its input {given}"
        if torch.is_autocast_enabled(x.device.type):
            what += ", which torch.autocast does not convert for every step"
        return f"{what}: convert it with x.to(torch.{kept}), or build the model with dtype='{given}'"


def _packed_resets(x: Tensor, cu_seqlens: Tensor, resets: Tensor | None) -> Tensor:
    if resets is not None:
        raise RunError("give either resets or cu_seqlens")
    if x.shape[0] != 1:
        raise RunError(f"cu_seqlens goes with a batch of one, not {x.shape[0]}")
    return packed_resets(cu_seqlens, x.shape[1], x.device)


def checked_device(device: Any) -> torch.device:
    """The device, or UnavailableError / UsageError that says what is missing."""
    try:
        made = torch.device(device)
    except TypeError:
        wanted = "a name such as 'cpu' or 'cuda:0', a number of a GPU, or a torch.device"
        raise UsageError(f"a device is {wanted}, not {device!r}") from None
    except RuntimeError as error:
        raise UsageError(f"'{device}' is not a device: {str(error).splitlines()[0]}") from None
    if made.type in ("cpu", "meta"):
        return made
    try:
        torch.empty(0, device=made)
    except Exception as error:
        raise UnavailableError(f"device '{device}' cannot be used here: {str(error).splitlines()[0]}") from None
    return made
