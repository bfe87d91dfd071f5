"""The check before the first use launches the same as the call: kernels, tiles, warps, options and dtypes."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from seqblocks import kernels
from seqblocks.kernels import triton_common
from seqblocks.kernels.dispatch import custom_op, self_check

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
Launched = set[tuple[Any, ...]]


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch, numbers: bool = False) -> Iterator[Launched]:
    """Record launches without running them: kernels, the dtypes of their tensors, and their constants.

    With `numbers` also for what kinds of integers Triton compiles them: see `kinds`.
    """
    found: Launched = set()

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        def note(*args: Any, **options: Any) -> None:
            dtypes = tuple(x.dtype for x in args if isinstance(x, Tensor))
            absent = tuple(at for at, x in enumerate(args) if x is None)
            constants = sorted((k, str(v)) for k, v in options.items())
            found.add((kernel.function.__name__, dtypes, absent, *constants, *(kinds(kernel, args) if numbers else ())))

        return note

    with monkeypatch.context() as patch, FakeTensorMode():
        patch.setattr(triton_common.Kernel, "__getitem__", launch)
        patch.setattr(custom_op, "is_seen", lambda args: False)  # torch.library would stop at the shapes
        yield found


def kinds(kernel: triton_common.Kernel, args: tuple[Any, ...]) -> list[tuple[str, str]]:
    """Return which integers are 1 and which are multiples of 16, as Triton compiles differently for these."""
    named = zip(inspect.signature(kernel.function.fn).parameters, args, strict=False)
    integers = ((name, x) for name, x in named if isinstance(x, int) and name not in kernel.general)
    return [(name, "1" if x == 1 else "multiple of 16" if x % 16 == 0 else "other") for name, x in integers]


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a GPU: calls on the CPU launch as on that GPU."""
    processors = triton_common.PROCESSORS[request.param]
    monkeypatch.setattr(triton_common, "INTERPRETED", True)  # so that Triton can be selected on the CPU
    monkeypatch.setattr(triton_common, "arch", lambda x: request.param)
    monkeypatch.setattr(triton_common, "processors_of", lambda index: processors)
    monkeypatch.setattr(self_check, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def leaf(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def conv(B: int, S: int, D: int, K: int, x: torch.dtype, w: torch.dtype, **options: Any) -> Any:
    out = kernels.causal_conv(leaf(B, S, D, dtype=x), leaf(D, 1, K, dtype=w), **options, backend="triton")
    return [out]


def norm(rows: int, heads: int, width: int, x: torch.dtype, w: torch.dtype, gated: bool = False) -> Any:
    n = heads * width
    more = {"skip": leaf(rows, n, dtype=x), "skip_weight": leaf(n), "gate": leaf(rows, n, dtype=x)} if gated else {}
    activation = "silu" if gated else "none"
    bias = None if gated else leaf(n, dtype=w)
    y = kernels.head_norm(leaf(rows, n, dtype=x), heads, leaf(n, dtype=w), bias, activation=activation, **more,
                          backend="triton")
    return [y]


def residual(rows: int, width: int, x: torch.dtype, w: torch.dtype, added: bool) -> Any:
    residual = leaf(rows, width, dtype=x) if added else None
    return [*kernels.residual_norm(leaf(rows, width, dtype=x), residual, leaf(width, dtype=w), backend="triton")]


def headwise(rows: int, G: int, O: int, I: int, x: torch.dtype, w: torch.dtype) -> Any:
    return [kernels.headwise_linear(leaf(rows, G * I, dtype=x), leaf(G, O, I, dtype=w), backend="triton")]


def mlstm(B: int, S: int, H: int, DK: int, DV: int, x: torch.dtype, f: torch.dtype, **options: Any) -> Any:
    q, k = (leaf(B, S, H, DK, dtype=x) for _ in range(2))
    i, forget = (leaf(B, S, H, dtype=f) for _ in range(2))
    state = options.pop("state", False)
    if state:
        options["state"] = (leaf(B, H, DK, DV), leaf(B, H, DK), leaf(B, H))
    h, last = kernels.mlstm(q, k, leaf(B, S, H, DV, dtype=x), i, forget, return_state=True, **options, backend="triton")
    return [h, *last]


def linear(
    B: int, S: int, K: int, V: int, x: torch.dtype, g: torch.dtype, decay: str, delta: bool, bonus: bool,
    heads: tuple[int, int] = (2, 4), **options: Any
) -> Any:
    H, HV = heads
    q, k = (leaf(B, S, H, K, dtype=x) for _ in range(2))
    shapes = {"head": (B, S, HV), "key": (B, S, HV, K)}
    y, last = kernels.linear_attention(
        q, k, leaf(B, S, HV, V, dtype=x), decay=leaf(*shapes[decay], dtype=g) if decay else None,
        beta=leaf(B, S, HV, dtype=g) if delta else None, bonus=leaf(H, K) if bonus else None, return_state=True,
        **options, backend="triton",
    )
    return [y, last]


def scan(B: int, S: int, E: int, N: int, x: torch.dtype, bc: torch.dtype, G: int = 0, constant: bool = False) -> Any:
    u, dt = (leaf(B, S, E, dtype=x) for _ in range(2))
    shared = (E, N) if constant else (B, S, G, N) if G else (B, S, N)
    y, last = kernels.selective_scan(
        u, dt, leaf(E, N), leaf(*shared, dtype=bc), leaf(*shared, dtype=bc), D=leaf(E) if G else None,
        z=None if constant else leaf(B, S, E, dtype=x), return_state=True, backend="triton",
    )
    return [y, last]


def slstm(B: int, S: int, H: int, D: int, x: torch.dtype, z: torch.dtype, **options: Any) -> Any:
    i, f, o = (leaf(B, S, H * D, dtype=x) for _ in range(3))
    y, last = kernels.slstm(
        i, f, leaf(B, S, H * D, dtype=z), o, leaf(H, D, 4, D), leaf(4, H, D), return_state=True, **options,
        backend="triton",
    )
    return [y, *last]


def bank(B: int, S: int, H: int, N: int, M: int, x: torch.dtype, mode: str, keeps: bool) -> Any:
    A, turn = leaf(N, M), leaf(N, M)
    into, out_of = ((N, H), (H, N)) if mode == "neck" else ((N,), (N,))
    out = kernels.centaurus(
        leaf(B, S, H, dtype=x), A, turn, leaf(N), leaf(*into), leaf(*out_of), leaf(N, M), mode=mode, return_state=keeps,
        backend="triton",
    )
    return [*out] if keeps else [out]


PAIRS = ((F32, F32), (BF16, BF16), (F16, F16), (BF16, F32))


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    of = functools.partial
    for B, S, D, (x, w) in itertools.product((1, 64), (5, 33, 4096), (24, 100, 2048), PAIRS):
        yield "causal_conv", of(conv, B, S, D, 4, x, w, activation=None if D == 24 else "silu")
    for rows, heads, width, (x, w) in itertools.product((3, 4096), (1, 4), (4, 192, 2048), PAIRS):
        yield "head_norm", of(norm, rows, heads, width, x, w, gated=rows == 3)
    for rows, width, (x, w) in itertools.product((3, 4096), (4, 768, 8192), PAIRS):
        yield "residual_norm", of(residual, rows, width, x, w, rows == 3)
    for rows, (G, O, I), (x, w) in itertools.product((3, 70000, 1 << 20), ((64, 4, 4), (5, 3, 16), (2, 2, 2)), PAIRS):
        yield "headwise_linear", of(headwise, rows, G, O, I, x, w)
    for B, S, (DK, DV), (x, f) in itertools.product((1, 200), (1, 40, 5000), ((16, 20), (64, 128), (256, 512)), PAIRS):
        yield "mlstm", of(mlstm, B, S, 4, DK, DV, x, f, state=S == 40, input_gate="exp" if S < 5000 else "sigmoid")
    for (B, S), (K, V), decay, delta, (x, g) in itertools.product(
        ((1, 40), (200, 5000)), ((16, 20), (64, 128), (1, 4)), ("", "head", "key"), (False, True), PAIRS
    ):
        yield "linear_attention", of(linear, B, S, K, V, x, g, decay, delta, decay == "key" and B == 1 and not delta)
    for B, S, (E, N), (x, bc) in itertools.product(
        (1, 8, 256), (40, 2048), ((24, 4), (70, 17), (2048, 16), (256, 128)), PAIRS
    ):
        yield "selective_scan", of(scan, B, S, E, N, x, bc)
    for B, (E, N), G, (x, bc) in itertools.product((1, 64), ((24, 4), (2048, 16), (256, 128)), (0, 4), PAIRS):
        yield "selective_scan", of(scan, B, 1, E, N, x, bc, G=G)
    for B, S, (x, bc) in itertools.product((1, 64), (40, 2048), PAIRS):
        yield "selective_scan", of(scan, B, S, 256, 16, x, bc, G=4)
        yield "selective_scan", of(scan, B, S, 256, 16, x, bc, constant=True)
    for B, H, D, (x, z) in itertools.product((2, 50, 3000), (1, 4), (24, 128, 240, 1024), PAIRS):
        yield "slstm", of(slstm, B, 7, H, D, x, z, reverse=B == 50)
    widths = ((16, 16, 4), (64, 128, 8), (40, 40, 64))
    for B, S, (H, N, M), x in itertools.product((1, 64), (40, 4096), widths, (F32, BF16)):
        yield "centaurus", of(bank, B, S, H, N, M, x, "neck", S == 40)
        yield "centaurus", of(bank, B, S, N, N, M, x, "dws", S == 40)
        yield "centaurus", of(bank, B, S, H, H * 2, M, x, "full", S == 40)


CALLS = [*calls()]


def run(call: Callable[[], Any]) -> None:
    out = call()
    torch.autograd.grad([x for x in out if x.requires_grad], leaves_of(out), [torch.empty_like(x) for x in out])
    with torch.no_grad():
        call()


def leaves_of(out: Any) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    todo, seen = [x.grad_fn for x in out], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        todo += [function for function, _ in node.next_functions]
    return [*found.values()]


LONGEST = ("centaurus", "linear_attention", "mlstm", "selective_scan", "slstm")


def cases() -> Iterator[Any]:
    """Return architecture, kernel, and one of how many calls to compare.

    Of the kernels that take longest, every fifth call is compared without `long`. There are four pairs of dtypes, so
    each occurs with every shape or with its neighbour.
    """
    for op in sorted({op for op, _ in CALLS}):
        for arch in ("sm_80", "sm_90"):
            mark = pytest.mark.long if op in LONGEST else pytest.mark.slow if arch == "sm_80" else ()
            yield pytest.param(arch, op, 1, marks=mark)
        if op in LONGEST:
            yield pytest.param("sm_90", op, 5, marks=pytest.mark.slow)


@pytest.mark.parametrize(("device", "op", "every"), [*cases()], indirect=["device"])
def test_the_check_launches_what_the_call_launches(
    op: str, every: int, device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[self_check.KernelCall] = []
    monkeypatch.setattr(self_check, "fault_of", lambda call: checked.append(call) or "")
    keys: dict[str, Launched] = {}
    for call in [call for name, call in CALLS if name == op][::every]:
        checked.clear()
        with recorded(monkeypatch) as expected:
            run(call)
        assert expected, call
        about = checked[0]
        key = self_check.key_of(about, "a device", triton_common.arch(torch.empty(0)), "", "")
        if key not in keys:
            with recorded(monkeypatch) as found:
                for _ in self_check.results(about):
                    pass
            keys[key] = found
        assert expected <= keys[key], (call, expected - keys[key], keys[key])
    assert len(keys) > 4


# Shapes of training and of small models: lengths that are multiples of 16, several sequences
TYPICAL = [
    *(("mlstm", functools.partial(mlstm, 8, 2048, H, DK, DV, BF16, F32))
      for H in (1, 3, 4, 16) for DK, DV in ((64, 128), (128, 128), (256, 512), (20, 24))
      if H < 16 or DK * DV <= 1 << 12),  # the reference would save 1 GB of states or more, so examples have 2 heads
    *(("linear_attention", functools.partial(linear, 8, 2048, K, V, BF16, F32, decay, delta, False, heads=heads))
      for heads in ((1, 1), (4, 4), (16, 16), (2, 8)) for K, V in ((64, 128), (128, 128))
      for decay, delta in (("head", False), ("head", True), ("key", True))),
    ("causal_conv", functools.partial(conv, 8, 2048, 4096, 4, BF16, BF16, activation="silu")),
    ("head_norm", functools.partial(norm, 4096, 4, 192, BF16, F32)),
    ("residual_norm", functools.partial(residual, 4096, 768, BF16, F32, True)),
    ("headwise_linear", functools.partial(headwise, 1 << 13, 64, 4, 4, BF16, BF16)),
    ("selective_scan", functools.partial(scan, 8, 2048, 2048, 16, BF16, BF16)),
    ("selective_scan", functools.partial(scan, 8, 2048, 768, 16, BF16, BF16, G=4)),
    ("slstm", functools.partial(slstm, 8, 64, 4, 128, BF16, BF16)),
    ("centaurus", functools.partial(bank, 8, 4096, 64, 128, 8, BF16, "neck", False)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_90"], indirect=True)
@pytest.mark.parametrize("op", sorted({op for op, _ in TYPICAL}))
def test_the_check_compiles_what_a_typical_call_compiles(
    op: str, device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example's widths, strides and heads are 1, or multiples of 16, where those of the call are."""
    checked: list[self_check.KernelCall] = []
    monkeypatch.setattr(self_check, "fault_of", lambda call: checked.append(call) or "")
    for _, call in (each for each in TYPICAL if each[0] == op):
        checked.clear()
        with recorded(monkeypatch, numbers=True) as expected:
            run(call)
        about = checked[0]
        with recorded(monkeypatch, numbers=True) as found:
            for _ in self_check.results(about):
                pass
        assert expected <= found, (call, *(sorted(map(str, x)) for x in (expected - found, found)))
