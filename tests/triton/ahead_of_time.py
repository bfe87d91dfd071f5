"""Compile the kernels that calls would launch for GPUs that are not present, and print a table of compiler statistics.

A separate program, because it needs triton without its interpreter. Host code runs unchanged, on CPU tensors and with a
simulated architecture. In place of each launch, a recorder compiles the kernel for that architecture, with the types,
constants and alignments that triton would derive from the arguments.

    python -m tests.triton.ahead_of_time                    all cases
    python -m tests.triton.ahead_of_time NAME [NAME ...]    cases with these names or prefixes; 'NAME | sm_90': for
                                                            one architecture
    python -m tests.triton.ahead_of_time --names            list the names

A line has the case, the kernel, the architecture, the launch, registers per thread, bytes of local memory per thread
(spills and indexed arrays), bytes of shared memory per program, and machine instructions, counting loops once. Where no
device measures time, growing kernels show here. A line `fault: ...` follows each kernel that the compiler got wrong in
one of the ways that `compiler_faults.py` finds.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from seqblocks.kernels import triton_common
from seqblocks.kernels.causal_conv import triton as causal_conv_triton
from seqblocks.kernels.centaurus.triton import launch as centaurus_triton
from seqblocks.kernels.head_norm import triton as head_norm_triton
from seqblocks.kernels.headwise_linear import triton as headwise_linear_triton
from seqblocks.kernels.linear_attention import triton as linear_attention_triton
from seqblocks.kernels.mlstm import triton as mlstm_triton
from seqblocks.kernels.residual_norm import triton as residual_norm_triton
from seqblocks.kernels.selective_scan.triton import launch as selective_scan_triton
from seqblocks.kernels.slstm.triton import launch as slstm_triton
from tests.triton.compiler_faults import overwritten, unwritten

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
SHOWN = (
    "BB", "BU", "L", "T", "BLOCKS", "BI", "BO", "TILES", "BE", "BK", "BN", "BT", "BV", "BD", "BC", "BF", "BM", "STEPS",
    "num_warps",
)
TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8",
    torch.int32: "i32",
}


Launch = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


def launches(arch: str, call: Callable[[], None]) -> list[Launch]:
    """Return the kernels that `call` launches, with their arguments."""
    found: list[Launch] = []

    def launch(kernel: triton_common.Kernel, grid: Any) -> Callable[..., None]:
        function, shared = kernel.function, triton_common.launch_options()
        return lambda *args, **options: found.append((function.__name__, function, args, {**options, **shared}))

    pretend = mock.patch.object(triton_common, "arch", return_value=arch)
    with mock.patch.object(triton_common.Kernel, "__getitem__", launch), pretend:
        call()
    return found


def compiled(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: GPUTarget) -> Any:
    """Compile the kernel as triton's own launcher would for these arguments."""
    constants = {p.name for p in kernel.params if p.is_constexpr}
    general = {p.name for p in kernel.params if p.do_not_specialize}
    values = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    options = {name: values.pop(name) for name in list(values) if name not in kernel.arg_names}
    signature, constexprs, attrs = {}, {}, {}
    for at, name in enumerate(kernel.arg_names):
        x = values[name]
        if isinstance(x, Tensor):
            signature[name] = "*" + TYPES[x.dtype]
        elif isinstance(x, float):
            signature[name] = "fp32"
            continue
        elif name in constants or x is None or (x == 1 and name not in general):
            signature[name], constexprs[(at,)] = "constexpr", x
        else:
            signature[name] = "i32" if abs(x) < 1 << 31 else "i64"
        if isinstance(x, Tensor) or (signature[name] != "constexpr" and x % 16 == 0 and name not in general):
            attrs[(at,)] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(kernel, signature, constexprs, attrs), target=target, options=options)


def usage(binary: Any) -> dict[str, Any]:
    """Return registers per thread, bytes of local memory per thread, shared bytes per program, instructions, and
    faults of the compiler."""
    shared = binary.metadata.shared
    if "amdgcn" in binary.asm:
        text = binary.asm["amdgcn"]
        found = {key: int(re.search(rf"\.{key}:\s+(\d+)", text)[1]) for key in (
            "vgpr_count", "agpr_count", "private_segment_fixed_size")}
        count = len(re.findall(r"^\t(?:v|s|ds|global|buffer|flat)_", text, re.MULTILINE))
        used = {"registers": found["vgpr_count"], "local": found["private_segment_fixed_size"]}
        return {**used, "shared": shared, "instructions": count, "faults": []}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        text, code = (
            subprocess.run([tools / tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for tool, flag in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    count = len(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?!NOP)\S", code, re.MULTILINE))
    used = {"registers": int(registers), "local": int(stack), "shared": shared, "instructions": count}
    return {**used, "faults": [*overwritten(binary.asm["ttgir"]), *unwritten(code)]}


# ------------------------------------------------------------------------------
# The cases


def selective_scan(states: int, dtype: torch.dtype, **change: Any) -> None:
    batch, seq, width = change.pop("batch", 64), change.pop("seq", 64), change.pop("width", 256)
    shared = (batch, seq, states)

    def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    u, dt, z = (leaf(batch, seq, width, dtype=dtype) for _ in range(3))
    B, C = (leaf(*shared, dtype=dtype) for _ in range(2))
    given: dict[str, Any] = {
        "D": leaf(width), "z": z, "dt_bias": leaf(width), "softplus": True, "state": None, "resets": None,
        "reverse": False,
    }
    if change.pop("constant", False):
        B, C = leaf(width, states), leaf(width, states)
    y, last = selective_scan_triton.run(u, dt, leaf(width, states), B, C, **given | change)
    (y.sum() + last.sum()).backward()


def selective_scan_token(states: int, dtype: torch.dtype) -> None:
    u, dt, z = (torch.zeros(2, 1, 256, dtype=dtype) for _ in range(3))
    B, C = (torch.zeros(2, 1, states, dtype=dtype) for _ in range(2))
    A, D, bias = -torch.ones(256, states), torch.zeros(256), torch.zeros(256)
    selective_scan_triton.run(u, dt, A, B, C, D, z, bias, True, torch.zeros(2, 256, states), None, False)


def causal_conv(taps: int, dtype: torch.dtype, activation: str | None = "silu", **change: Any) -> None:
    x = torch.zeros(2, 256, 384, dtype=dtype, requires_grad=True)
    weight, bias = (torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in ((384, 1, taps), (384,)))
    given: dict[str, Any] = {"state": x.new_zeros(2, taps - 1, 384), "resets": None, "reverse": False}
    causal_conv_triton.run(x, weight, bias, activation=activation, **given | change).sum().backward()


def head_norm(width: int, dtype: torch.dtype, gated: bool = False) -> None:
    x = torch.zeros(100, 4 * width, dtype=dtype, requires_grad=True)
    weight, bias = (torch.zeros(4 * width, requires_grad=True) for _ in range(2))
    more: tuple[Any, ...] = ()
    if gated:
        skip, gate = (torch.zeros(100, 4 * width, dtype=dtype, requires_grad=True) for _ in range(2))
        more = (skip, torch.zeros(4 * width, requires_grad=True), gate, "silu")
    head_norm_triton.run(x, 4, weight, bias, 1e-5, *more).sum().backward()


def residual_norm(width: int, dtype: torch.dtype, *, residual: bool = True, **options: bool) -> None:
    x, added = (torch.zeros(100, width, dtype=dtype, requires_grad=True) for _ in range(2))
    weight, bias = (torch.zeros(width, requires_grad=True) for _ in range(2))
    y, total = residual_norm_triton.run(x, added if residual else None, weight, bias, 1e-6, **options)
    (y.sum() + total.sum()).backward()


def headwise_linear(O: int, I: int, dtype: torch.dtype) -> None:
    x = torch.zeros(1 << 13, 64 * I, dtype=dtype, requires_grad=True)
    w = torch.zeros(64, O, I, dtype=dtype, requires_grad=True)
    headwise_linear_triton.run(x, w).sum().backward()


def mlstm(width: int, dtype: torch.dtype, **change: Any) -> None:
    batch, seq = change.pop("batch", 2), change.pop("seq", 256)
    widths = (width, width, change.pop("values", width))
    q, k, v = (torch.zeros(batch, seq, 4, n, dtype=dtype, requires_grad=True) for n in widths)
    i, f = (torch.zeros(batch, seq, 4, requires_grad=True) for _ in range(2))
    given: dict[str, Any] = {"reverse": False, "chunk_size": None, "eps": 1e-6, "input_gate": "exp"}
    marks = torch.zeros(2, seq, dtype=torch.bool) if change.pop("resets", False) else None
    h, last = mlstm_triton.run(q, k, v, i, f, None, marks, **given | change, normalize=True, return_state=True)
    (h.sum() + sum(x.sum() for x in last)).backward()


def mlstm_step(width: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.zeros(2, 1, 4, width, dtype=dtype) for _ in range(3))
    i, f = (torch.zeros(2, 1, 4) for _ in range(2))
    state = mlstm_triton.MLSTMState(*(torch.zeros(2, 4, *shape) for shape in ((width, width), (width,), ())))
    given: dict[str, Any] = {"reverse": False, "chunk_size": None, "eps": 1e-6, "input_gate": "exp"}
    mlstm_triton.run(q, k, v, i, f, state, None, **given, normalize=True, return_state=True)


def linear_attention(width: int, dtype: torch.dtype, decay: str = "", delta: bool = False, **change: Any) -> None:
    batch, seq, heads = 2, change.pop("seq", 256), change.pop("heads", 4)

    def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    values = change.pop("values", width)
    q, k = (leaf(batch, seq, change.get("key_heads", heads), width, dtype=dtype) for _ in range(2))
    change.pop("key_heads", None)
    v, state = leaf(batch, seq, heads, values, dtype=dtype), leaf(batch, heads, width, values)
    shapes = {"head": (batch, seq, heads), "key": (batch, seq, heads, width)}
    g = leaf(*shapes[decay]) if decay else None
    beta = leaf(batch, seq, heads) if delta else None
    bonus = leaf(heads, width) if change.pop("bonus", False) else None
    marks = torch.zeros(batch, seq, dtype=torch.bool) if change.pop("resets", False) else None
    y, last = linear_attention_triton.run(
        q, k, v, g, beta, None, None, bonus, state, marks, change.pop("reverse", False), width**-0.5, False, 64
    )
    (y.sum() + last.sum()).backward()


def centaurus(batch: int, substates: int, dtype: torch.dtype, fan: int = 1, **change: Any) -> None:
    seq, width = 512, 256 if fan == 1 else 40 * fan
    u = torch.zeros(batch, seq, width if fan == 1 else fan, dtype=dtype, requires_grad=True)
    parameters = [torch.zeros(width, substates, requires_grad=True) for _ in range(4)]
    marks = torch.zeros(batch, seq, dtype=torch.uint8) if change.pop("resets", False) else None
    state = torch.zeros(batch, width, substates, 2, requires_grad=True)
    v, last = centaurus_triton._op(u, *parameters, state, marks, change.pop("reverse", False), fan)
    (v.sum() + last.sum()).backward()


def slstm(width: int, dtype: torch.dtype, **change: Any) -> None:
    batch, heads = change.pop("batch", 2), change.pop("heads", 2)
    gates = [torch.zeros(batch, 8, heads * width, dtype=dtype, requires_grad=True) for _ in range(4)]
    recurrent, bias = torch.zeros(heads, width, 4, width, requires_grad=True), torch.zeros(4, heads, width)
    state = slstm_triton.SLSTMState(*(torch.zeros(batch, heads, width) for _ in range(4)))
    marks = torch.zeros(batch, 8, dtype=torch.bool) if change.pop("resets", False) else None
    y, last = slstm_triton.run(tuple(gates), recurrent, bias, state, marks, change.pop("reverse", False))
    (y.sum() + sum(x.sum() for x in last)).backward()


def cases_of_linear_attention() -> Iterator[tuple[str, Callable[[], None]]]:
    yield "linear_attention D=128 bf16 per head", lambda: linear_attention(128, torch.bfloat16, "head")
    yield "linear_attention D=64 bf16 groups resets", lambda: linear_attention(
        64, torch.bfloat16, key_heads=1, resets=True)
    yield "linear_attention D=128 bf16 per key", lambda: linear_attention(128, torch.bfloat16, "key")
    yield "linear_attention D=64 bf16 per key bonus resets", lambda: linear_attention(
        64, torch.bfloat16, "key", bonus=True, resets=True)
    yield "linear_attention D=128 bf16 delta per head", lambda: linear_attention(128, torch.bfloat16, "head", True)
    yield "linear_attention D=256 to 512 bf16 delta per head reverse resets", lambda: linear_attention(
        256, torch.bfloat16, "head", True, values=512, reverse=True, resets=True)
    yield "linear_attention D=128 bf16 delta per key", lambda: linear_attention(128, torch.bfloat16, "key", True)
    yield "linear_attention D=64 fp32 delta", lambda: linear_attention(64, torch.float32, delta=True)
    # Some versions of Triton keep values of these outside of registers: SPILLS in test_ahead_of_time.py
    yield "linear_attention D=128 to 256 bf16 delta per head", lambda: linear_attention(
        128, torch.bfloat16, "head", True, values=256)
    yield "linear_attention D=128 bf16 resets delta per key", lambda: linear_attention(
        128, torch.bfloat16, "key", True, resets=True)
    yield "linear_attention D=256 bf16 delta per key", lambda: linear_attention(256, torch.bfloat16, "key", True)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Return the cases as (name, call)."""
    for states in (1, 16, 32, 64, 256):
        yield f"selective_scan N={states} bf16", lambda n=states: selective_scan(n, torch.bfloat16)
    yield "selective_scan N=16 fp32", lambda: selective_scan(16, torch.float32)
    for states in (16, 128):
        yield f"selective_scan token N={states} bf16", lambda n=states: selective_scan_token(n, torch.bfloat16)
    marks = torch.zeros(1, 1024, dtype=torch.bool)
    yield "selective_scan N=16 bf16 segments resets", lambda: selective_scan(
        16, torch.bfloat16, batch=1, seq=1024, resets=marks)
    marks = torch.zeros(64, 64, dtype=torch.bool)
    yield "selective_scan N=16 bf16 reverse resets", lambda: selective_scan(
        16, torch.bfloat16, reverse=True, resets=marks)
    yield "selective_scan N=17 E=70 bf16 resets", lambda: selective_scan(
        17, torch.bfloat16, width=70, resets=marks)
    yield "selective_scan N=16 bf16 constant", lambda: selective_scan(
        16, torch.bfloat16, constant=True, z=None, softplus=False)
    for dtype in (torch.bfloat16, torch.float32):
        yield f"causal_conv K=4 {TYPES[dtype]} silu", lambda dtype=dtype: causal_conv(4, dtype)
    yield "causal_conv K=4 bf16", lambda: causal_conv(4, torch.bfloat16, None)
    marks = torch.zeros(2, 256, dtype=torch.bool)
    yield "causal_conv K=4 bf16 silu reverse resets", lambda: causal_conv(
        4, torch.bfloat16, reverse=True, resets=marks)
    yield "causal_conv K=8 bf16 silu", lambda: causal_conv(8, torch.bfloat16)
    for width in (4, 192, 8192):
        yield f"head_norm D={width} bf16", lambda n=width: head_norm(n, torch.bfloat16)
    for width in (192, 4096):
        yield f"head_norm D={width} bf16 skip gate", lambda n=width: head_norm(
            n, torch.bfloat16, True)
    for width in (64, 768, 4096, 8192):
        yield f"residual_norm D={width} bf16", lambda n=width: residual_norm(n, torch.bfloat16)
    yield "residual_norm D=768 bf16 layer one_plus", lambda: residual_norm(
        768, torch.bfloat16, centred=True, one_plus=True)
    yield "residual_norm D=768 fp32 alone", lambda: residual_norm(768, torch.float32, residual=False)
    for O, I in ((4, 4), (3, 5), (16, 16)):
        for dtype in (torch.bfloat16, torch.float32):
            yield f"headwise_linear O={O} I={I} {TYPES[dtype]}", (
                lambda o=O, i=I, dtype=dtype: headwise_linear(o, i, dtype))
    yield "mlstm D=16 bf16", lambda: mlstm(16, torch.bfloat16)
    yield "mlstm D=64 bf16", lambda: mlstm(64, torch.bfloat16)
    yield "mlstm D=128 bf16", lambda: mlstm(128, torch.bfloat16)  # more than a tile, so any number
    yield "mlstm D=128 fp32", lambda: mlstm(128, torch.float32)
    yield "mlstm D=64 fp16", lambda: mlstm(64, torch.float16)
    yield "mlstm D=128 bf16 sigmoid reverse resets", lambda: mlstm(
        128, torch.bfloat16, input_gate="sigmoid", reverse=True, resets=True)
    yield "mlstm D=128 bf16 many chunks resets", lambda: mlstm(
        128, torch.bfloat16, seq=2048, resets=True)
    yield "mlstm D=512 bf16 many heads", lambda: mlstm(512, torch.bfloat16, batch=4)
    yield "mlstm D=256 to 512 bf16 many heads", lambda: mlstm(
        256, torch.bfloat16, values=512, batch=8)
    yield "mlstm D=1024 bf16", lambda: mlstm(1024, torch.bfloat16)
    yield "mlstm step D=128 bf16", lambda: mlstm_step(128, torch.bfloat16)
    for width in (32, 64, 128, 256, 512, 1024):
        yield f"slstm D={width} bf16", lambda n=width: slstm(n, torch.bfloat16)
    for width in (64, 128):
        yield f"slstm D={width} fp32", lambda n=width: slstm(n, torch.float32)
    yield "slstm D=64 bf16 reverse resets", lambda: slstm(64, torch.bfloat16, reverse=True, resets=True)
    yield "slstm D=256 fp16", lambda: slstm(256, torch.float16)
    yield "slstm D=240 bf16 many sequences resets", lambda: slstm(
        240, torch.bfloat16, batch=200, heads=4, resets=True)
    yield "slstm D=512 bf16 many heads reverse resets", lambda: slstm(
        512, torch.bfloat16, batch=32, heads=4, reverse=True, resets=True)
    yield from cases_of_linear_attention()
    for substates in (1, 8, 64):
        yield f"centaurus M={substates} bf16", lambda m=substates: centaurus(128, m, torch.bfloat16)
    yield "centaurus M=8 bf16 full", lambda: centaurus(2, 8, torch.bfloat16, fan=64)
    yield "centaurus M=8 bf16 segments reverse resets", lambda: centaurus(
        1, 8, torch.bfloat16, reverse=True, resets=True)


def rows(words: list[str]) -> Iterator[str]:
    """Return the lines of the table."""
    wanted = [(name, arch) for name, _, arch in (word.partition(" | ") for word in words)] or [("", "")]
    for name, call in cases():
        for arch, target in TARGETS.items():
            if not any(f"{name} ".startswith(f"{start} ".lstrip()) and only in ("", arch) for start, only in wanted):
                continue
            for kernel, function, args, kwargs in launches(arch, call):
                found = usage(compiled(function, args, kwargs, GPUTarget(*target)))
                tile = " ".join(f"{key}={kwargs[key]}" for key in sorted(kwargs) if key in SHOWN)
                yield " | ".join([f"{name:<44}", f"{kernel:<16}", f"{arch:<6}", f"{tile:<32}", *(
                    f"{found[key]:>6}" for key in ("registers", "local", "shared", "instructions"))])
                yield from (f"fault: {name} | {kernel} | {arch}: {fault}" for fault in found["faults"])


def main(words: list[str]) -> None:
    if words == ["--names"]:
        print("\n".join(name for name, _ in cases()))
        return
    print(f"triton {triton.__version__}")
    for row in rows(words):
        print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
