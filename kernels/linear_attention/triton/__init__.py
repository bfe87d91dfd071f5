"""Linear attention in Triton, with the algorithm of linear_attention/torch.py.

The rule add with a decay per head or none runs on the mLSTM's kernels, without input gate, normaliser and stabiliser.
Delta rules, decays per key and a bonus have their own kernels:

    forward    sums of decays; weights between the tokens of a chunk; the inverse of the delta rule's system; states
               before every chunk (a program per block of the state, which stays in registers); outputs
    backward   sums of decays again, then gradients of states, values, weights, queries and keys, decays

    tensors.py, forward.py, backward.py   the kernels
    sizes.py, launch.py                   chunks, tiles and warps; the launches and the ops of torch

The system (I + A Diag(beta)) is inverted in float32 by halves, from single tokens on, with products of bounded blocks.
As in the mLSTM, dots of bfloat16 use it directly, float16 uses tf32, and float32 stays float32.
For a decay per key, all exponents are at most 0. They factor where tokens meet: pairs with earlier blocks of 16 tokens
at the start of the later block, pairs within a block in the middle of the block, its halves, quarters and eighths.
Transposed operands are loaded transposed, except decayed keys within a block. There are no atomic additions.

The rule dplr has no Triton kernels; the torch implementation runs it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.dispatch import implementation, register
from seqblocks.kernels.dispatch.self_check import normal
from seqblocks.kernels.linear_attention.reference import read_out
from seqblocks.kernels.linear_attention.triton import launch, sizes
from seqblocks.kernels.mlstm.triton import sizes as mlstm_sizes

Maybe = Tensor | None


def run(
    q: Tensor, k: Tensor, v: Tensor, decay: Maybe, beta: Maybe, a: Maybe, b: Maybe, bonus: Maybe,
    state: Maybe, resets: Maybe, reverse: bool, scale: float, normalize: bool, chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """Run as `reference.run` does, with o in v's dtype. chunk_size is for the torch implementation only."""
    tensors = (q, k, v, decay, beta, a, b, bonus, state)
    for_backward = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if v.numel() == 0 or q.shape[3] == 0 or (q.shape[1] == 1 and not for_backward):
        run_torch = implementation("linear_attention", "torch").run
        found: tuple[Tensor, Tensor] = run_torch(*tensors, resets, reverse, scale, normalize, chunk_size)
        return found
    if not _has_kernels_of_the_mlstm(decay, beta is not None, bonus is not None, q.shape[3]):
        y, last, *_ = launch.chunks(q, k, v, decay, beta, bonus, state, resets, reverse, scale, for_backward)
    else:
        if not scale > 0.0:  # the kernels take the logarithm of scale
            q, scale = q * scale, 1.0
        y, last, *_ = launch.per_head(q, k, v, _of_heads(decay), state, resets, reverse, scale)
    return read_out((y.float(), last), True) if normalize else (y, last)


def _has_kernels_of_the_mlstm(decay: Maybe, delta: bool, bonus: bool, keys: int) -> bool:
    return not delta and not bonus and (decay is None or decay.dim() == 3 or keys == 1)


def _of_heads(decay: Maybe) -> Maybe:
    """Return the decay per head, which a decay per key is for a key width of 1."""
    return decay.squeeze(3) if decay is not None and decay.dim() == 4 else decay


def _refusal(rule: str = "add", widths: tuple[int, int] = (1, 1), **facts: Any) -> str:
    if rule == "dplr":
        return "the rule dplr has only a torch implementation"
    if rule == "delta" and widths[0] > sizes.DELTA_MAX_KEYS:
        return f"delta rules support key widths up to {sizes.DELTA_MAX_KEYS}, not {widths[0]}"
    return ""


def _tiles(
    arch: str, widths: tuple[int, int], rule: str = "add", decay: str | None = None, bonus: bool = False,
    resets: bool = False, dtype: torch.dtype = torch.bfloat16, batch: int = 1 << 20, length: int | None = None,
    dtypes: dict[str, Any] | None = None, **facts: Any,
) -> dict[str, dict[str, int]]:
    narrow = {dtype, *((dtypes or {}).get(name, dtype) for name in "qkv")} == {torch.bfloat16}
    if rule == "add" and not bonus and (decay != "key" or widths[0] == 1):
        size = mlstm_sizes.chunk(*widths, narrow)
        launches = {kernel: size | mlstm_sizes.tiles(kernel, *widths, narrow, arch, batch)
                    for kernel in ("states", "outputs", "state_gradients", "gradients")}
        if length is not None:
            launches["gates"] = {"EACH": int(common.ceil_div(length, size["L"]) > mlstm_sizes.WALK_MAX_CHUNKS)}
        return launches
    kernels = ["pairs", "states", "outputs", "state_gradients", "value_gradients", "weight_gradients", "key_gradients"]
    kernels += ["solve"] if rule == "delta" else []
    kernels += ["sums", "decay_gradients"] if decay else ["sums"] if resets else []
    per_key = decay == "key" and widths[0] > 1
    size = {"L": sizes.chunk(narrow, rule == "delta", widths[0])}
    return {name: size | sizes.tiles(name, *widths, per_key, rule == "delta", narrow, arch) for name in kernels}


def _example(
    widths: tuple[int, int], rule: str = "add", decay: str | None = None, bonus: bool = False, resets: bool = False,
    reverse: bool = False, heads: int = 1, group: int = 1, dtype: torch.dtype = torch.float32, **facts: Any,
) -> Any:
    from seqblocks.kernels.linear_attention import linear_attention

    (K, V), S = widths, 144
    H = heads if K * V <= 1 << 14 else min(heads, 2)
    HV = H * group
    tensors = {"q": normal(1, S, H, K), "k": normal(1, S, H, K, seed=1), "v": normal(1, S, HV, V, seed=2)}
    tensors["k"] = torch.nn.functional.normalize(tensors["k"], dim=-1)
    tensors["decay"] = -normal(1, S, HV, *((K,) if decay == "key" else ()), seed=3).exp()
    if rule == "delta":
        tensors["beta"] = normal(1, S, HV, seed=4).sigmoid()
    if bonus:
        tensors["bonus"] = normal(H, K, seed=5)
    tensors["state"] = normal(1, HV, K, V, seed=6)
    options: dict[str, Any] = {"reverse": reverse, "return_state": True}
    if resets:
        options["resets"] = (normal(1, S) > 2.0).to(facts["device"])
    return linear_attention, tensors, options


register("linear_attention", "triton", run, common.can_unless(_refusal), _tiles, _example)
