"""The mLSTM, and linear attention with its decays and delta rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqblocks import kernels
from tests.ptx.cases import bf16, case, cast, f16, f32, marks, randn
from tests.ptx.compare import Call

MANY_CHUNKS = {"batch": 1, "length": 1 << 14}  # sizes of a call whose states are computed by one scan over the chunks


def mlstm(
    dtype: torch.dtype, batch: int, tokens: int, heads: int, keys: int, values: int, gate: str = "exp", *,
    normalize: bool = True, state: bool = True, resets: bool = False, reverse: bool = False, view: bool = False,
) -> Call:
    widths = {"q": keys, "k": keys, "v": values}
    x = {name: randn(batch, tokens, heads, n, seed=at) for at, (name, n) in enumerate(widths.items())}
    x = cast(x, dtype, view)
    x |= {"i": randn(batch, tokens, heads, seed=3), "f": randn(batch, tokens, heads, seed=4) + 2}
    if state:
        x |= {"C": randn(batch, heads, keys, values, seed=5), "n": randn(batch, heads, keys, seed=6)}
        x["m"] = randn(batch, heads, seed=7) * (gate == "exp")

    def call(C: Tensor | None = None, n: Any = None, m: Any = None, **rest: Any) -> Any:
        return kernels.mlstm(**rest, state=None if C is None else (C, n, m), return_state=True)

    return call, x, {
        "input_gate": gate, "normalize": normalize, "resets": marks(batch, tokens, 0.05) if resets else None,
        "reverse": reverse,
    }


case("mlstm bf16 32 S=150 resets", lambda: mlstm(bf16, 1, 150, 1, 32, 32, resets=True), dots=True)
case("mlstm bf16 64 S=131 reverse", lambda: mlstm(bf16, 1, 131, 1, 64, 64, resets=True, reverse=True), dots=True)
case("mlstm f32 17x20 S=67 resets", lambda: mlstm(f32, 1, 67, 2, 17, 20, resets=True), dots=True)
case("mlstm f16 32 S=70 view", lambda: mlstm(f16, 1, 70, 1, 32, 48, view=True), dots=True)
case("mlstm bf16 sigmoid 32 S=100", lambda: mlstm(bf16, 1, 100, 1, 32, 32, "sigmoid", resets=True, reverse=True),
     dots=True)
case("mlstm f32 sigmoid bare 16 S=70", lambda: mlstm(f32, 1, 70, 1, 16, 16, "sigmoid", normalize=False), dots=True)
case("mlstm bf16 many chunks 16 S=200", lambda: mlstm(bf16, 2, 200, 1, 16, 16, resets=True), sizes=MANY_CHUNKS,
     dots=True)
case("mlstm f32 many chunks 16 S=100 reverse",
     lambda: mlstm(f32, 1, 100, 1, 16, 16, state=False, reverse=True, resets=True), sizes=MANY_CHUNKS, dots=True)
case("mlstm bf16 S=1 gradients", lambda: mlstm(bf16, 2, 1, 1, 16, 24), dots=True)
case("mlstm f32 step 20x70", lambda: mlstm(f32, 2, 1, 2, 20, 70, resets=True), gradients=False)
case("mlstm bf16 step sigmoid bare", lambda: mlstm(bf16, 1, 1, 1, 64, 32, "sigmoid", normalize=False),
     gradients=False)
# Warps that hold copies of a sum over a tile write them to one place. Their last bits may differ.
WIDE: dict[str, Any] = {
    "slow": True, "dots": True,
    "accepted": ("write after another warp's write, shared, state_gradients, language/standard.py",),
}
case("mlstm bf16 128 S=150", lambda: mlstm(bf16, 1, 150, 1, 128, 128, resets=True), **WIDE)
case("mlstm bf16 128 few heads S=140", lambda: mlstm(bf16, 1, 140, 1, 128, 128, resets=True),
     sizes={"batch": 1, "length": 140}, **WIDE)
case("mlstm bf16 256x512 S=70", lambda: mlstm(bf16, 1, 70, 1, 256, 512), **WIDE)
case("mlstm f32 128 S=70", lambda: mlstm(f32, 1, 70, 1, 128, 128), **WIDE)


def linear(
    dtype: torch.dtype, tokens: int, key_heads: int, heads: int, keys: int, values: int, decay: str = "", *,
    delta: bool = False, bonus: bool = False, state: bool = True, resets: bool = False, reverse: bool = False,
    view: bool = False, normalize: bool = False, batch: int = 1,
) -> Call:
    """decay: none, or per "head" or "key"."""
    q, k = (randn(batch, tokens, key_heads, keys, seed=seed) for seed in (0, 1))
    k = k / k.norm(dim=-1, keepdim=True)
    q, k = (q.abs(), k.abs()) if normalize else (q, k)
    x = cast({"q": q, "k": k, "v": randn(batch, tokens, heads, values, seed=2)}, dtype, view)
    if decay:
        shape = (batch, tokens, heads) if decay == "head" else (batch, tokens, heads, keys)
        x["decay"] = -randn(*shape, seed=3).exp() * 0.3
    x |= {"beta": randn(batch, tokens, heads, seed=4).sigmoid()} if delta else {}
    x |= {"bonus": randn(key_heads, keys, seed=5)} if bonus else {}
    x |= {"state": randn(batch, heads, keys, values + normalize, seed=6) + 3 * normalize} if state else {}
    return kernels.linear_attention, x, {
        "resets": marks(batch, tokens, 0.05) if resets else None, "reverse": reverse, "return_state": True,
        "normalize": normalize,
    }


def linear_case(name: str, *arguments: Any, slow: bool = False, **options: Any) -> None:
    case(name, lambda: linear(*arguments, **options), dots=True, slow=slow)


linear_case("retention bf16 32 S=150 HV=2", bf16, 150, 1, 2, 32, 32)
linear_case("mamba-2 f32 16x20 S=67 HV=2 resets", f32, 67, 1, 2, 16, 20, "head", resets=True, reverse=True)
linear_case("simple GLA f16 32 S=67 view", f16, 67, 1, 2, 32, 32, "head", view=True, resets=True)
linear_case("linear attention normalised bf16 S=70", bf16, 70, 1, 1, 32, 32, normalize=True, state=False)
linear_case("GLA bf16 32x48 S=131", bf16, 131, 1, 1, 32, 48, "key", resets=True)
linear_case("GLA f32 17x20 S=67 reverse HV=2", f32, 67, 1, 2, 17, 20, "key", resets=True, reverse=True)
linear_case("GLA key width 1 f32", f32, 40, 1, 1, 1, 20, "key")
linear_case("RWKV-6 bf16 32 S=80 resets", bf16, 80, 1, 1, 32, 32, "key", bonus=True, resets=True)
linear_case("RWKV-6 f32 17 S=40 HV=2 reverse", f32, 40, 1, 2, 17, 17, "key", bonus=True, reverse=True)
linear_case("bonus f16 head decay S=40", f16, 40, 1, 1, 16, 16, "head", bonus=True, resets=True)
linear_case("delta bf16 32 S=131", bf16, 131, 1, 1, 32, 32, delta=True)
linear_case("delta f32 17x20 S=67 HV=2 resets", f32, 67, 1, 2, 17, 20, delta=True, resets=True, reverse=True)
linear_case("GDN f16 32 S=70 HV=2 view", f16, 70, 1, 2, 32, 32, "head", delta=True, view=True, resets=True)
linear_case("GDN bf16 64 S=140 resets", bf16, 140, 1, 1, 64, 64, "head", delta=True, resets=True)
linear_case("GDN f32 32 S=70 reverse", f32, 70, 1, 1, 32, 32, "head", delta=True, resets=True, reverse=True)
linear_case("KDA bf16 32x48 S=80", bf16, 80, 1, 1, 32, 48, "key", delta=True, resets=True)
linear_case("KDA f32 17x20 S=67 reverse", f32, 67, 1, 1, 17, 20, "key", delta=True, resets=True, reverse=True)
linear_case("delta bf16 S=1 gradients", bf16, 1, 1, 1, 16, 16, "head", delta=True)
linear_case("GLA f32 S=17 bare", f32, 17, 2, 2, 16, 16, "key", state=False, batch=2)
linear_case("GDN bf16 128 S=140", bf16, 140, 1, 1, 128, 128, "head", delta=True, resets=True, slow=True)
linear_case("GDN bf16 256 S=40", bf16, 40, 1, 1, 256, 64, "head", delta=True, slow=True)
linear_case("KDA bf16 128x64 S=130", bf16, 130, 1, 1, 128, 64, "key", delta=True, resets=True, slow=True)
linear_case("KDA bf16 256 S=40", bf16, 40, 1, 1, 256, 64, "key", delta=True, slow=True)
