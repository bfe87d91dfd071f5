"""Products of tokens and matrices: values, layout and gradients equal torch's `linear`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from seqblocks.kernels import joined, numerics, products


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Send all products to oneDNN, except those of a few tokens with a small matrix. Return the shapes of weights."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    calls: list[torch.Size] = []
    run = products._multiply
    for name, value in {"ON_ONEDNN": True, "ON_SLOW_READING": True, "ON_SLOW_MKL": True, "ONEDNN_MIN_MACS": 0}.items():
        monkeypatch.setattr(products, name, value)

    def noted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pads: bool) -> torch.Tensor:
        calls.append(weight.shape)
        return run(x, weight, bias, pads)

    monkeypatch.setattr(products, "_multiply", noted)
    return calls


@pytest.mark.parametrize(
    ("tokens", "rows", "width", "usual", "reading", "slow"),
    [
        (0, 1 << 11, 1024, "torch", "torch", "torch"), (1, 512, 1024, "torch", "rows", "rows"),
        (1, 256, 1024, "torch", "torch", "torch"), (2, 512, 1024, "torch", "rows", "rows"),
        (3, 512, 1024, "torch", "oneDNN", "oneDNN"), (3, 1024, 512, "torch", "oneDNN", "oneDNN"),
        (1, 256, 2048, "torch", "rows", "rows"), (1, 256, 2049, "torch", "oneDNN", "oneDNN"),
        (5, 512, 1024, "torch", "torch", "torch"), (3, 1 << 13, 1024, "torch", "oneDNN", "oneDNN"),
        (4, 1 << 11, 1024, "oneDNN", "oneDNN", "oneDNN"), (5, 1, 0, "torch", "torch", "torch"),
        (8, (1 << 20) - 1, 1, "torch", "torch", "torch"), (8, 1 << 20, 1, "oneDNN", "oneDNN", "oneDNN"),
        (15, 1 << 10, 1024, "oneDNN", "oneDNN", "oneDNN"), (16, 1 << 10, 1024, "torch", "torch", "oneDNN"),
        (64, 128, 1024, "torch", "torch", "oneDNN"),
    ],
)  # fmt: skip
def test_sizes_alone_choose_the_product(
    tokens: int, rows: int, width: int, usual: str, reading: str, slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """reading, slow: on AMD without AVX-512, and with it, which MKL does not use."""
    for on_amd, has_avx512, expected in ((False, True, usual), (True, False, reading), (True, True, slow)):
        monkeypatch.setattr(products, "ON_SLOW_READING", on_amd)
        monkeypatch.setattr(products, "ON_SLOW_MKL", on_amd and has_avx512)
        assert products.chosen(tokens * width, rows, width) == expected


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("rows", [128, 129, 300])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "slice"])
@pytest.mark.parametrize("graded", [False, True])
def test_products_with_blocks_of_rows(
    tokens: int, rows: int, layout: str, graded: bool, onednn: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "READING_MIN_ELEMENTS", 0)
    (x, weight, bias) = drawn((tokens, 40), (rows, 41), (rows,), dtype=torch.float32)
    weight = weight[:, :40]
    if layout != "slice":
        weight = weight.contiguous() if layout == "contiguous" else weight.t().contiguous().t()
    for some in (None, bias):
        inputs = [each.clone().requires_grad_(graded) for each in (x, weight)]
        found, expected = (run(*inputs, some) for run in (products.linear, linear))
        torch.testing.assert_close(found, expected)
        assert found.is_contiguous()
        if graded:
            for one, other in zip(*(torch.autograd.grad(y.sum(), inputs) for y in (found, expected)), strict=True):
                torch.testing.assert_close(one, other)
    assert onednn


def test_a_row_is_read_the_same_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of a row does not depend on the number of rows around it, but for the last ones."""
    x, weight = drawn((1, 640), (700, 640), dtype=torch.float32)
    whole = products._prepare_rows(weight, None)(x)
    assert torch.equal(products._prepare_rows(weight[:256], None)(x), whole[:, :256])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_no_view(dtype: torch.dtype, onednn: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 warns of a model whose result is one. 17 tokens are padded."""
    monkeypatch.setattr(numerics, "SLOW_KINDS", {torch.bfloat16})
    for shape in ((2, 3, 40), (17, 40), (1, 17, 40), (2, 8, 40)):
        x, weight = drawn(shape, (300, 40), dtype=dtype)
        y = products.linear(x, weight.requires_grad_())
        assert not y._is_view()
        (found,) = torch.autograd.grad(y.add_(1).square().sum(), weight)
        (expected,) = torch.autograd.grad((linear(x, weight) + 1).square().sum(), weight)
        torch.testing.assert_close(found, expected)
    assert onednn


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0), (1, 1), (15, 15), (16, 16), (17, 18), (500, 512), (512, 512), (1025, 1152)]
)
def test_few_numbers_of_tokens_are_compiled(tokens: int, expected: int) -> None:
    assert tokens + products._missing(tokens) == expected
    assert len({n + products._missing(n) for n in range(1, 4097)}) <= 80


@pytest.mark.parametrize("tokens", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [35, 300])
@torch.no_grad()
def test_a_step_is_the_same_as_linear(tokens: int, biased: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every bit as this package's, also after the matrix has changed. 300 rows are more than a block."""
    monkeypatch.setattr(products, "READING_MIN_ELEMENTS", 0)
    weight, bias, x = drawn((rows, 10), (rows,), (tokens, 10), dtype=torch.float32)
    run = products.prepare_linear(weight, some := bias if biased else None)
    for factor in (1, 3):
        weight.mul_(factor)
        found = run(x)
        torch.testing.assert_close(found, linear(x, weight, some))
        assert torch.equal(found, products.linear(x, weight, some))
        assert found.is_contiguous()


def test_an_exported_step_takes_any_number_of_tokens() -> None:
    class Step(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return products.prepare_linear(weight)(x)

    weight, few, many = drawn((512, 512), (2, 512), (200, 512), dtype=torch.float32)
    assert few.shape[0] * weight.numel() < products.ONEDNN_MIN_MACS < many.shape[0] * weight.numel()
    program = torch.export.export(Step(), (few,), dynamic_shapes=({0: torch.export.Dim("tokens", max=1000)},))
    torch.testing.assert_close(program.module()(many), linear(many, weight))


@pytest.mark.parametrize("rows", [16, 19])
def test_a_step_follows_a_parameter_whose_data_is_replaced(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "READING_MIN_ELEMENTS", 0)
    weight, other, x = drawn((rows, rows), (rows, rows), (1, rows), dtype=torch.float32)
    parameter = torch.nn.Parameter(weight)
    step = products.prepare_linear(parameter)
    for data in (other, other.t()):
        parameter.data = data
        with torch.no_grad():
            torch.testing.assert_close(step(x), linear(x, data))


@pytest.mark.parametrize("tokens", [0, 1, joined.WHOLE_BLOCKS_MAX_TOKENS, joined.WHOLE_BLOCKS_MAX_TOKENS + 1, 40])
@pytest.mark.parametrize("biases", [(False, False), (True, False), (True, True)])
def test_blocks_are_the_same_as_the_matrix(tokens: int, biases: tuple[bool, ...]) -> None:
    matrices = []
    for biased in biases:
        weight = torch.block_diag(*torch.randn(3, 5, 20, dtype=torch.float64))
        matrices.append(joined.Matrix(weight, torch.randn(15, dtype=torch.float64) if biased else None, 3))
    (x,) = drawn((tokens, 60))
    x = x.double()
    for some in (matrices, matrices[:1]):
        expected = torch.cat([torch.nn.functional.linear(x, m.weight, m.bias) for m in some], 1)
        torch.testing.assert_close(joined.prepare_joined(some)(x), expected)


@pytest.mark.usefixtures("onednn")
def test_other_layouts_and_dtypes_are_left_to_torch() -> None:
    weight, x = torch.randn(8, 6).t(), torch.randn(5, 8)
    torch.testing.assert_close(products.prepare_linear(weight)(x), x @ weight.t())
    assert products.prepare_linear(weight.bfloat16())(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("tokens", [1, 17, 33])
@pytest.mark.parametrize("graded", [False, True])
def test_numbers_of_tokens_that_are_padded(tokens: int, graded: bool, onednn: list[torch.Size]) -> None:
    x, weight, bias = drawn((1, tokens, 10), (8, 10), (8,), dtype=torch.float32)
    torch.testing.assert_close(products.linear(x, weight.requires_grad_(graded), bias), linear(x, weight, bias))
    assert bool(onednn) == (tokens > products.READING_MAX_TOKENS)


@pytest.mark.parametrize("shape", [(12, 10), (2, 6, 10), (2, 0, 10)])
@pytest.mark.parametrize("biased", [False, True])
def test_onednn_has_the_same_numbers_and_gradients(
    shape: tuple[int, ...], biased: bool, onednn: list[torch.Size]
) -> None:
    inputs = drawn(shape, (8, 10), (8,), (*shape[:-1], 8), dtype=torch.float32)
    results = []
    for run in (products.linear, linear):
        x, weight, bias = (each.clone().requires_grad_() for each in inputs[:3])
        y = run(x, weight, bias if biased else None)
        grads = torch.autograd.grad((y * inputs[3]).sum(), (x, weight, bias), create_graph=True, allow_unused=True)
        again = torch.autograd.grad(grads[0].square().sum() + grads[1].square().sum(), (x, weight), allow_unused=True)
        results.append([y, *grads, *again])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    assert shape[1] == 0 or onednn[:3] == [(8, 10), (10, 8), (10, 12)]


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("shape", [(12, 10), (2, 6, 10)])
@pytest.mark.parametrize("rows", [3, 80])
def test_onednn_gradients_of_several_losses_at_once(shape: tuple[int, ...], rows: int) -> None:
    leaves = drawn(shape, (rows, 10), (rows,), dtype=torch.float32)
    y = products.linear(*(x.requires_grad_() for x in leaves))
    losses = torch.stack(drawn(y.shape, y.shape, dtype=torch.float32))
    found = torch.autograd.grad(y, leaves, losses, is_grads_batched=True, retain_graph=True)
    for at, loss in enumerate(losses):
        torch.testing.assert_close([g[at] for g in found], [*torch.autograd.grad(y, leaves, loss, retain_graph=True)])


def test_onednn_is_for_plain_calls_in_float32(onednn: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = drawn((12, 10), (8, 10), dtype=torch.float32)
    products.linear(x[::2], weight)
    assert onednn == [(8, 10)]
    onednn.clear()
    products.linear(x.double(), weight.double())
    products.linear(x[:4], weight)  # a few tokens take the time of reading the matrix
    torch.func.vmap(products.linear, (0, None))(x[:, None].expand(12, 9, 10), weight)
    with torch.autocast("cpu"):
        assert products.linear(x, weight).dtype is torch.bfloat16
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
    products.linear(x, weight)
    assert not onednn


@pytest.mark.parametrize("bias", [torch.arange(16.0)[::2], torch.ones(1).expand(8), torch.ones(1), torch.ones(12, 8)])
def test_onednn_takes_any_bias_that_torch_takes(bias: torch.Tensor, onednn: list[torch.Size]) -> None:
    """oneDNN would read past the end of a bias with strides."""
    x, weight = drawn((12, 10), (8, 10), dtype=torch.float32)
    torch.testing.assert_close(products.linear(x, weight, bias), linear(x, weight, bias))
    assert bool(onednn) == (bias.shape == (8,))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
def test_sparse_weights_are_left_to_torch(layout: str, onednn: list[torch.Size]) -> None:
    x, weight = drawn((12, 10), (8, 10), dtype=torch.float32)
    given = getattr(x, layout)() if layout == "to_mkldnn" else x
    y = products.linear(given, getattr(weight, layout)())
    torch.testing.assert_close(y.to_dense() if layout == "to_mkldnn" else y, linear(x, weight))
    assert not onednn


@pytest.mark.parametrize("tokens", [16, 17])
def test_without_a_gradient_parameters_have_none(tokens: int, onednn: list[torch.Size]) -> None:
    class Dropped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> None:
            return None

    x, weight, bias = (each.requires_grad_() for each in drawn((tokens, 10), (8, 10), (8,), dtype=torch.float32))
    (Dropped.apply(products.linear(x, weight, bias)).sum() + x.sum()).backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert weight.grad is bias.grad is None
    assert onednn == [(8, 10)]


@pytest.mark.usefixtures("onednn")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nested_tensors_are_left_to_torch(dtype: torch.dtype) -> None:
    x = torch.nested.nested_tensor([torch.randn(20, 8), torch.randn(3, 8)], dtype=dtype, requires_grad=True)
    weight = torch.randn(6, 8, dtype=dtype)
    y = products.linear(x, weight)
    for found, expected in zip(y.unbind(), linear(x, weight).unbind(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.usefixtures("onednn")
def test_errors_are_those_of_torch() -> None:
    x, weight = drawn((12, 9), (8, 10), dtype=torch.float32)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        products.linear(x, weight)
    assert products.linear(x, x[0]).shape == (12,)


def test_onednn_gets_no_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN takes a thousand times as long for a product of a slice."""
    seen = []
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *given: seen.append(given[:2]) or given[0])
    x, weight = torch.ones(12, 20)[:, :10], torch.ones(10, 16)[:, :8]
    for given in ((x, weight.t()), (x.t(), weight.t().contiguous()), (x, torch.ones(10, 8).t())):
        products._multiply(*given, None, pads=False)
    for pair in seen:
        assert all(each.is_contiguous() or each.t().is_contiguous() for each in pair)


@pytest.mark.parametrize("shape", [(1, 20), (1, 1, 20)])
@pytest.mark.parametrize("biased", [False, True])
def test_one_token_in_bfloat16(shape: tuple[int, ...], biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mv` adds in float32 and rounds once, and a bias before that or after; its gradients are those of `linear`."""
    monkeypatch.setattr(products, "ON_FAST_MV", True)
    calls, run = [], torch.mv
    monkeypatch.setattr(torch, "mv", lambda *given: calls.append(1) or run(*given))
    x, weight, bias, dy = drawn(shape, (6, 20), (6,), (*shape[:-1], 6), dtype=torch.bfloat16)
    leaves = [each.requires_grad_() for each in (x, weight, bias)[: 2 + biased]]
    exact = [each.detach().double().requires_grad_() for each in leaves]
    y, expected = products.linear(*leaves), linear(*exact)
    assert calls == [1]
    assert y.shape == expected.shape
    eps = torch.finfo(torch.bfloat16).eps
    largest = linear(exact[0].detach(), exact[1].detach()).abs() + (exact[2].detach().abs() if biased else 0)
    assert ((y - expected).abs() <= eps * largest + 20 * 2**-24 * 20).all()
    for one, other in zip(
        torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, exact, dy.double()), strict=True
    ):
        torch.testing.assert_close(one.double(), other, rtol=eps, atol=eps)
    products.linear(x.detach().expand(*shape[:-2], 2, 20), weight)  # two tokens
    products.linear(x.detach().float(), weight.detach().float())
    monkeypatch.setattr(products, "ON_FAST_MV", False)
    products.linear(x, weight)
    assert calls == [1]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the processor one without products in 16 bits."""
    monkeypatch.setattr(numerics, "SLOW_KINDS", frozenset({torch.float16, torch.bfloat16}))


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("elements", [products.CACHED_ELEMENTS, 80])
def test_slow_dtypes_are_multiplied_in_float32(
    dtype: torch.dtype, biased: bool, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result and all gradients are those of float32, rounded once; a second derivative too.

    elements: of a matrix that are converted at once: all, or four rows.
    """
    monkeypatch.setattr(products, "CACHED_ELEMENTS", elements)
    x, weight, bias, dy = drawn((2, 8, 20), (6, 20), (6,), (2, 8, 6), dtype=dtype)
    results = []
    for run, kind in ((products.linear, dtype), (linear, torch.float32)):
        leaves = [each.to(kind).requires_grad_() for each in (x, weight, bias)]
        y = run(leaves[0], leaves[1], leaves[2] if biased else None)
        grads = torch.autograd.grad(y, leaves[: 2 + biased], dy.to(kind), create_graph=True)
        again = torch.autograd.grad(grads[0].float().square().sum(), leaves[1])
        results.append([y, *grads, *again])
    for found, expected in zip(*results, strict=True):
        assert found.dtype is dtype
        last = found is results[0][-1]  # its inputs are gradients that were rounded before
        torch.testing.assert_close(found, expected.to(dtype), rtol=16 * torch.finfo(dtype).eps if last else 0, atol=0)


@pytest.mark.usefixtures("slow")
def test_calls_that_stay_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = drawn((32, 20), (6, 20), dtype=torch.bfloat16)
    converted = []
    run = products._by_function
    monkeypatch.setattr(products, "_by_function", lambda *given, **how: converted.append(1) or run(*given, **how))
    products.linear(x[: products.MIN_CONVERTED - 1], weight)
    torch.func.vmap(products.linear, (0, None))(x[:, None].expand(32, 16, 20), weight)
    with torch.autocast("cpu", torch.bfloat16):
        products.linear(x, weight)
    torch.compile(products.linear, backend="eager")(x, weight)
    with pytest.raises(RuntimeError):
        products.linear(x, weight.float())
    assert not converted
    products.linear(x, weight)
    assert converted


@pytest.mark.parametrize(
    ("names", "slow"),
    [
        ((), {torch.float16, torch.bfloat16}), (("avx512_bf16",), {torch.float16}), (("amx_bf16",), {torch.float16}),
        (("amx_bf16", "avx512_fp16"), set()),
    ],
)  # fmt: skip
def test_the_slow_dtypes_of_a_processor(names: tuple[str, ...], slow: set[torch.dtype]) -> None:
    facts = dict.fromkeys(("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16"), False) | dict.fromkeys(names, True)
    assert numerics.slow_kinds(facts | {"architecture": "x86_64"}) == slow
    assert not numerics.slow_kinds(facts | {"architecture": "aarch64"})  # not measured
    assert not numerics.slow_kinds({})


@pytest.mark.usefixtures("slow")
def test_other_products_are_computed_in_float32_without_gradients() -> None:
    x, weight = drawn((3, 16), (5, 16), dtype=torch.float16)
    with torch.no_grad():
        found = numerics.in_float32(linear, x, weight)
    assert torch.equal(found, linear(x.float(), weight.float()).half())
    seen = []
    numerics.in_float32(lambda *given: seen.append(given) or x, x, weight.requires_grad_())
    assert seen == [(x, weight)]  # too few elements


@pytest.mark.usefixtures("slow")
def test_operands_are_converted_again_in_the_backward_pass() -> None:
    """They are not kept. Derivatives are those of the product in float32, the second one too."""
    operands = [each.requires_grad_() for each in drawn((64, 128), (5, 128), dtype=torch.float16)]
    converted = []

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        converted.append(weakref.ref(x))
        return linear(x, weight)

    y = numerics.in_float32(run, *operands)
    assert [each() for each in converted] == [None]
    for one, other in zip(derivatives(y, operands), derivatives(
        linear(*(each.float() for each in operands)).half(), operands
    ), strict=True):
        assert torch.equal(one, other)


def derivatives(y: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return y, its gradients and second derivatives."""
    first = torch.autograd.grad((y / 8).square().sum(), inputs, create_graph=True)
    return [y, *first, *torch.autograd.grad(sum((each / 8).square().sum() for each in first), inputs)]


@pytest.mark.parametrize(
    ("shape", "is_mv"), [((1, 8), True), ((8,), True), ((2, 8), False)]
)
def test_one_compiled_token_is_multiplied_by_mv(
    shape: tuple[int, ...], is_mv: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "ON_SLOW_READING", True)
    monkeypatch.setattr(products, "READING_MIN_ELEMENTS", 48)
    x, weight, bias = drawn(shape, (6, 8), (6,), dtype=torch.float32)
    targets = traced_targets(products.linear, x, weight, bias)
    assert (torch.mv in targets, linear in targets) == (is_mv, not is_mv)
    assert linear in traced_targets(products.linear, x, weight[:5], bias[:5])  # a small matrix


def test_compiled_tokens_that_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast does not convert operands of `mv`, and an exported program must not depend on the number of tokens."""
    monkeypatch.setattr(products, "ON_SLOW_READING", True)
    monkeypatch.setattr(products, "READING_MIN_ELEMENTS", 48)
    x, weight = drawn((1, 8), (6, 8), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.mv not in traced_targets(products.linear, x, weight)
    assert torch.mv not in traced_targets(products.linear, x.double(), weight.double())
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="same dtype"):  # a sum with the bias would be float64
        torch.compile(products.linear, backend="eager")(x, weight, torch.ones(6, dtype=torch.float64))
    sizes = ({0: torch.export.Dim("tokens", min=1, max=64)}, None)
    program = torch.export.export(Product(), (x.expand(3, 8), weight), dynamic_shapes=sizes)
    assert program.module()(x, weight).shape == (1, 6)


class Product(torch.nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return products.linear(x, weight)


def traced_targets(function: Callable[..., torch.Tensor], *given: torch.Tensor) -> set[Any]:
    """Return what a compiled function calls, after a comparison with its own result."""
    found: set[Any] = set()

    def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.update(node.target for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(function, backend=keep, fullgraph=True)(*given), function(*given))
    return found
