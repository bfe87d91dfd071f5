"""The mLSTM in Triton. The mathematics and the symbols are those of mlstm/torch.py.

The forward pass computes the gates, the states before every chunk (one program per block of C, which stays in
registers), and the outputs (one program per tile of tokens and of values). The backward pass reads the saved states. It
computes factors of each token from dh and h, the gradients of the states from the last chunk to the first, those of q,
k and v by tiles, and those of the gates by chunks. A single token without gradients has a kernel of its own.

    gates.py, forward.py, backward.py   the kernels
    tensors.py                          shared functions: addresses, planes, weights between two tiles of tokens
    sizes.py, launch.py                 chunks, tiles and warps; the launches and torch ops

A chunk has one, two or four tiles of tokens: longer chunks move fewer states, and wider tiles would spill registers.
Programs that read the same data are adjacent in the grid, so that it is read from memory once and then from the cache.

Gates and states are float32, sums of log f float64. Dots use bfloat16 operands as they are. float16, whose range a
state may exceed, is converted to tf32, which has as many digits. float32 stays float32, but is converted to tf32 if
dtypes are mixed. States between chunks are stored as operands of dots. Operands are transposed only by loading them in
another order, because several compilers for sm_90 make errors when they transpose an accumulator for a dot. There are
no atomic additions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.dispatch import implementation, register
from seqblocks.kernels.dispatch.self_check import normal
from seqblocks.kernels.mlstm.reference import MLSTMState
from seqblocks.kernels.mlstm.triton import launch, sizes


def run(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: MLSTMState | None, resets: Tensor | None, *,
    reverse: bool, chunk_size: int | None, eps: float, input_gate: str, normalize: bool, return_state: bool,
) -> tuple[Tensor, MLSTMState | None]:
    """Run the scan. Arguments as for `mlstm`, checked; chunk_size is only for the torch implementation."""
    if v.numel() == 0 or q.numel() == 0:
        torch_run = implementation("mlstm", "torch").run
        return torch_run(
            q, k, v, i, f, state, resets, reverse=reverse, chunk_size=chunk_size, eps=eps, input_gate=input_gate,
            normalize=normalize, return_state=return_state,
        )
    C, n, m = (None, None, None) if state is None else state
    tensors, options = (q, k, v, i, f, C, n, m), (eps, input_gate, normalize, return_state)
    if q.shape[1] == 1 and not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)):
        h, *last = launch.step(*tensors, common.marks(resets), *options)
    else:
        h, *last = launch.scan(*tensors, resets, reverse, *options)[:4]
    return h, MLSTMState(*last) if return_state else None


def _tiles(
    arch: str, head_dims: tuple[int, int], dtype: torch.dtype = torch.bfloat16, batch: int = 1 << 20,
    length: int | None = None, dtypes: dict[str, Any] | None = None, **facts: Any,
) -> dict[str, dict[str, int]]:
    narrow = {dtype, *((dtypes or {}).get(name, dtype) for name in "qkv")} == {torch.bfloat16}
    size = sizes.chunk(*head_dims, narrow)
    launches = {kernel: size | sizes.tiles(kernel, *head_dims, narrow, arch, batch)
                for kernel in ("states", "outputs", "state_gradients", "gradients")}
    if length is not None:
        launches["gates"] = {"EACH": int(common.ceil_div(length, size["L"]) > sizes.WALK_MAX_CHUNKS)}
    return launches | {"step": sizes.step_tiles(*head_dims, arch)}


def _checked(
    C: Tensor | None = None, n: Tensor | None = None, m: Tensor | None = None, resets: Tensor | None = None,
    return_state: bool = True, **given: Any,
) -> Any:
    """Run a scan, and a single token without gradients, which has a kernel of its own."""
    from seqblocks.kernels.mlstm import mlstm

    state = None if C is None or n is None or m is None else MLSTMState(C, n, m)
    out = mlstm(**given, state=state, resets=resets, return_state=return_state)
    with torch.no_grad():
        token: dict[str, Any] = {name: x[:, :1] if isinstance(x, Tensor) else x for name, x in given.items()}
        first = None if resets is None else resets[:, :1]
        step = mlstm(**token, state=state, resets=first, return_state=return_state)
    (h, last), (y, after) = (x if return_state else (x, ()) for x in (out, step))
    return h, (*last, y, *after)


def _example(
    head_dims: tuple[int, int], input_gate: str = "exp", normalize: bool = True, resets: bool = False,
    reverse: bool = False, return_state: bool = True, heads: int = 1, dtype: torch.dtype = torch.float32, **facts: Any,
) -> Any:
    DK, DV = head_dims
    H = heads if DK * DV <= 1 << 12 else min(heads, 2 if DK * DV <= 1 << 17 else 1)  # the reference saves all states
    L = sizes.chunk(DK, DV, dtype == torch.bfloat16)["L"]
    # More chunks than one program processes, unless states are so large that the reference would save too many.
    S = 16 + L * (sizes.WALK_MAX_CHUNKS if DK * DV <= 1 << 14 else 1)
    widths = {"q": (DK,), "k": (DK,), "v": (DV,), "i": (), "f": ()}
    tensors = {name: normal(1, S, H, *width, seed=at) for at, (name, width) in enumerate(widths.items())}
    states = {"C": (DK, DV), "n": (DK,), "m": ()}
    tensors |= {name: normal(1, H, *width, seed=6 + at) for at, (name, width) in enumerate(states.items())}
    options: dict[str, Any] = {
        "input_gate": input_gate, "normalize": normalize, "reverse": reverse, "return_state": return_state,
    }
    if resets:
        options["resets"] = (normal(1, S) > 2.0).to(facts["device"])
    return _checked, tensors, options


register("mlstm", "triton", run, common.can, _tiles, _example)
