"""Build a single block as a layer of any model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from seqblocks.analysis import layers
from seqblocks.analysis.check import Folders
from seqblocks.analysis.layers import Ends, Layer
from seqblocks.errors import RunError, UsageError, quote
from seqblocks.model.builder import build_model, made
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime import arguments
from seqblocks.state import States
from seqblocks.suggestions import did_you_mean


def block(
    spec: str | os.PathLike[str],
    name: str | None = None,
    /,
    *,
    features: int | None = None,
    input: Mapping[str, Any] | None = None,
    outputs: Sequence[str] | Mapping[str, int] | None = None,
    args: Mapping[str, Any] | None = None,
    device: Any = None,
    dtype: torch.dtype | str | None = None,
    seed: int | None = None,
    allow_use: Folders = (),
    **arguments: Any,
) -> SequenceModel:
    """Build a block as a layer: `block("gated_deltanet_mixer", dim=64)`, or `block("my.yaml", "name", …)`.

    The layer takes x [batch, seq, features] and is called like a model: `y = layer(x)`, with a state, resets or
    cu_seqlens, or `layer.step`. Its parameters and states have the names in the block.

    arguments: those of the block, as in a spec: numbers, words, lists of steps, `yaml("2 * 96")`. args: the same as a
    mapping, for an argument named like one of this function. features: the width of x, if it is not the block's `dim`.
    input: the entry `input:` of a spec, for images, vectors, token ids, or tokens with a `grid` or a fixed `length`.

    outputs: names of the parts of the output, in equal widths, or names with widths, for a block whose output is
    several wires joined along the features; the layer then returns a dict.

    A wire argument is a number of features that are read with each token, [batch, seq, features], or an entry of
    `inputs:` such as {"features": 64}, which is context: a sequence of its own length, an image or a vector. Both are
    passed by name, `layer(x, memory=…)`; with a state, context is part of that state.

    device, dtype: by default those of torch. seed: None draws from torch's generator (see torch.manual_seed), so that
    two layers differ. allow_use: as in `build`. Raises SpecError for an unknown block or invalid arguments, UsageError,
    and UnavailableError.
    """
    given, ends = _given(arguments, args), _ends(features, input, outputs)
    if name is None:
        if not isinstance(spec, str):
            raise UsageError(f'block takes a name, or a path and a name: block("{spec}", "name", …)')
        return _built(layers.of_bundled(spec, given, ends), device, dtype, seed)
    return _built(layers.of_file(spec, _name(name), given, ends, allow_use), device, dtype, seed)


def block_text(
    text: str,
    name: str,
    /,
    *,
    features: int | None = None,
    input: Mapping[str, Any] | None = None,
    outputs: Sequence[str] | Mapping[str, int] | None = None,
    args: Mapping[str, Any] | None = None,
    device: Any = None,
    dtype: torch.dtype | str | None = None,
    seed: int | None = None,
    allow_use: Folders = (),
    **arguments: Any,
) -> SequenceModel:
    """Build a block of a spec given as text; see `block`. Paths in `use:` are relative to the working directory."""
    given, ends = _given(arguments, args), _ends(features, input, outputs)
    return _built(layers.of_text(text, _name(name), given, ends, allow_use), device, dtype, seed)


def _given(arguments: dict[str, Any], more: Any) -> dict[str, Any]:
    if more is not None and not (isinstance(more, Mapping) and all(isinstance(key, str) for key in more)):
        raise UsageError('args is a mapping of names to values: args={"dim": 64}')
    if twice := arguments.keys() & (more or {}).keys():
        raise UsageError(f"{quote(min(twice))} is given twice, by itself and in args")
    return {**arguments, **(more or {})}


def _ends(features: Any, input: Any, outputs: Any) -> Ends:
    if input is not None and not isinstance(input, Mapping):
        raise UsageError(f'input is a mapping such as {{"features": 64, "grid": [8, 8]}}, not {type(input).__name__}')
    if features is not None and input is not None and "features" not in input:
        raise UsageError("features is the width of a sequence, and input has none: pass one of the two")
    if outputs is not None and (isinstance(outputs, str) or not isinstance(outputs, Sequence | Mapping)):
        raise UsageError(f'outputs are names, ["y", "values"], or names and widths, not {type(outputs).__name__}')
    return Ends(features, input, outputs)


def _name(name: Any) -> str:
    if not isinstance(name, str):
        what = f"the name of a block is a string, not {type(name).__name__}"
        raise UsageError(f'{what}; arguments are passed by name: block("mlstm_block", dim=64)')
    return name


def _built(found: Layer, device: Any, dtype: torch.dtype | str | None, seed: int | None) -> SequenceModel:
    device = torch.get_default_device() if device is None else device
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not found.wires:
        return build_model(found.spec, device=device, dtype=dtype, seed=seed)
    return made(lambda: WiredLayer(found), device, dtype, seed)


class WiredLayer(SequenceModel):
    """A block that reads further wires with each token of its input: `layer(x, lower=…)`, `layer.step(x, lower=…)`.

    It also takes x with all wires joined along the features, as a `Stream` and exported programs do.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer.spec)
        self._widths = layer.wires
        whole = self.spec.input
        self._own_input = whole.with_features(whole.features - sum(self._widths.values()))
        self._wires = {name: whole.with_features(width) for name, width in self._widths.items()}

    def extra_repr(self) -> str:
        wires = ", ".join(f"{name} {width}" for name, width in self._widths.items())
        return f"input joined with {wires}"

    def forward(  # type: ignore[override]  # as in SequenceModel
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
        """Run a whole sequence, or continue from `state`; see `SequenceModel`. Wires are passed by name."""
        joined, others = self._joined(x, ["batch", "seq"], inputs)
        return super().forward(
            joined, state=state, return_state=return_state, resets=resets, cu_seqlens=cu_seqlens, grid=grid, **others
        )

    _own_forward = forward

    def step(
        self, x: Tensor, state: States | None = None, *, resets: Tensor | None = None, **wires: Tensor
    ) -> tuple[Tensor, States]:
        """Run one token: x [batch, features], and the wires [batch, width] by name."""
        joined, others = self._joined(x, self._step_axes, wires)
        arguments.check_no_context(others)
        return super().step(joined, state, resets=resets)

    def _joined(self, x: Any, axes: list[str], given: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """Return x with the wires, and the other inputs. Raises RunError."""
        wires = {name: given[name] for name in self._widths if name in given}
        others = {name: value for name, value in given.items() if name not in wires}
        known = [*self._widths, *self.graph.ports]
        if unknown := next((name for name in others if name not in known), None):
            hint = did_you_mean(unknown, known) or f"it has {', '.join(known)}"
            raise RunError(f"the layer has no wire {quote(unknown)}: {hint}")
        whole = self.spec.input
        if not wires and isinstance(x, Tensor) and x.shape[-1:] == (whole.features,):
            return x, others
        if missing := next((name for name in self._widths if name not in wires), None):
            raise RunError(f"the wire {missing} is missing: call layer(x, {', '.join(f'{n}=…' for n in self._widths)})")
        arguments.check_input(self._own_input, x, "the layer", axes)
        for name, tensor in wires.items():
            arguments.check_input(self._wires[name], tensor, f"the wire {name}", axes)
            if tensor.shape[:-1] != x.shape[:-1]:
                raise RunError(f"x is {list(x.shape)} and {name} {list(tensor.shape)}: they need the same tokens")
            if tensor.device != x.device:
                raise RunError(f"{name} is on {tensor.device} and x on {x.device}: move it with .to(x.device)")
        return torch.cat([x, *wires.values()], -1), others
