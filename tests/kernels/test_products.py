"""Products of tokens and matrices: values, layout and gradients equal torch's `linear`."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from seqblocks.kernels import products


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat all matrices as large ones of a model that fits into no cache."""
    monkeypatch.setattr(products, "LARGE", 0)
    monkeypatch.setattr(products, "CACHE", -1)


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Send all products of more than a few tokens to oneDNN. Return the shapes of their weights."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    calls: list[torch.Size] = []
    run = products._by_onednn
    monkeypatch.setattr(products, "ON_ONEDNN", True)
    monkeypatch.setattr(products, "MANY", 0)

    def noted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(weight.shape)
        return run(x, weight, bias)

    monkeypatch.setattr(products, "_by_onednn", noted)
    return calls


INFO = "processor\t: 0\nvendor_id\t: {}\ncpu family\t: {}\nmodel\t\t: 17\n\n"


@pytest.mark.parametrize(
    ("vendor", "family", "capability", "expected"),
    [
        ("AuthenticAMD", "26", "AVX512", 26), ("AuthenticAMD", "25", "AVX512", 25), ("AuthenticAMD", "25", "AVX2", 0),
        ("GenuineIntel", "6", "AVX512", 0), (None, None, "AVX512", 0),
    ],
)  # fmt: skip
def test_the_family_of_an_amd_processor(
    vendor: str | None, family: str, capability: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def text(path: Path, encoding: str) -> str:
        if vendor is None:
            raise FileNotFoundError(path)  # as on macOS
        return 2 * INFO.format(vendor, family)

    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(Path, "read_text", text)
    assert products._amd_family() == expected


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("tokens", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("rows", [1, 6, 35, 32])
@pytest.mark.parametrize("biased", [False, True])
def test_a_step_is_the_same_as_linear(tokens: int, rows: int, biased: bool) -> None:
    weight, bias, x = drawn((rows, 10), (rows,), (tokens, 10))
    found = products.prepare_linear(weight, bias if biased else None)(x)
    torch.testing.assert_close(found, linear(x, weight, bias if biased else None))
    assert found.is_contiguous()


def test_an_exported_step_takes_any_number_of_tokens() -> None:
    class Step(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return products.prepare_linear(weight)(x)

    weight, few, many = drawn((512, 512), (2, 512), (200, 512), dtype=torch.float32)
    assert few.shape[0] * weight.numel() < products.MANY < many.shape[0] * weight.numel()
    program = torch.export.export(Step(), (few,), dynamic_shapes=({0: torch.export.Dim("tokens", max=1000)},))
    torch.testing.assert_close(program.module()(many), linear(many, weight))


@pytest.mark.usefixtures("cold")
def test_all_rows_follow_a_parameter_whose_data_is_replaced() -> None:
    """With one thread, 19 rows are four blocks of four rows, and three that remain."""
    weight, other, x = drawn((19, 10), (19, 10), (1, 10))
    parameter = torch.nn.Parameter(weight)
    step = products.prepare_linear(parameter)
    parameter.data = other
    with torch.no_grad():
        torch.testing.assert_close(step(x), linear(x, other))


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("rows", [16, 19])
def test_all_rows_follow_a_parameter_that_is_transposed_in_place(rows: int) -> None:
    weight, x = drawn((rows, rows), (1, rows))
    parameter = torch.nn.Parameter(weight)
    step = products.prepare_linear(parameter)
    parameter.data = parameter.data.t()
    with torch.no_grad():
        torch.testing.assert_close(step(x), linear(x, weight.t()))


@pytest.mark.parametrize("tokens", [0, 1, products.FEW_FOR_BLOCKS, products.FEW_FOR_BLOCKS + 1, 40])
@pytest.mark.parametrize("biases", [(False, False), (True, False), (True, True)])
def test_blocks_are_the_same_as_the_matrix(tokens: int, biases: tuple[bool, ...]) -> None:
    matrices = []
    for biased in biases:
        weight = torch.block_diag(*torch.randn(3, 5, 20, dtype=torch.float64))
        matrices.append(products.Matrix(weight, torch.randn(15, dtype=torch.float64) if biased else None, 3))
    (x,) = drawn((tokens, 60))
    x = x.double()
    for some in (matrices, matrices[:1]):
        expected = torch.cat([torch.nn.functional.linear(x, m.weight, m.bias) for m in some], 1)
        torch.testing.assert_close(products.prepare_joined(some)(x), expected)


@pytest.mark.parametrize("width", [5, 6])  # an odd number of features cannot be compared as 64-bit integers
@pytest.mark.parametrize("modes", list(itertools.product([False, True], repeat=2)))
def test_a_large_joined_matrix_is_used_again_until_its_values_change(
    modes: tuple[bool, bool], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier one is never written: another thread may be reading it."""
    monkeypatch.setattr(products, "LARGE", 1)
    earlier: list[torch.Tensor] = []
    first, second = drawn((3, width), (4, width))
    first[0, 0] = torch.nan
    (x,) = drawn((2, width))
    kept = []
    for change in (0.0, 0.0, 1.0):
        second += change
        with torch.inference_mode(modes[len(kept) % 2]):
            found = products.prepare_joined([products.Matrix(first), products.Matrix(second)], earlier)(x)
        torch.testing.assert_close(found[:, 3:], linear(x, second))
        kept.append((earlier[0], earlier[0].clone()))
    assert kept[0][0] is kept[1][0] is not kept[2][0]
    assert all(torch.equal(one[1:], other[1:]) for one, other in kept)


@pytest.mark.usefixtures("cold")
def test_other_layouts_and_dtypes_are_left_to_torch() -> None:
    weight, x = torch.randn(8, 6).t(), torch.randn(2, 8)
    torch.testing.assert_close(products.prepare_linear(weight)(x), x @ weight.t())
    assert products.prepare_linear(weight.bfloat16())(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(12,), (1, 12), (2, 2, 12), (5, 12), (0, 12)])
@pytest.mark.parametrize("graded", [False, True])
def test_few_tokens_without_gradients_read_a_large_matrix_in_blocks(
    shape: tuple[int, ...], graded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias, x = drawn((35, 12), (35,), shape)
    expected = linear(x, weight, bias)
    monkeypatch.setattr(products, "CACHE", 0)
    monkeypatch.setattr(products, "ON_MKL", True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        found = products.linear(x, weight.requires_grad_(graded), bias)
    torch.testing.assert_close(found, expected)
    in_blocks = any(event.key == "aten::bmm" for event in recorded.key_averages())
    assert in_blocks == (not graded and 0 < x.numel() <= products.FEW * 12)
    with pytest.raises(RuntimeError):
        products.linear(x[..., :3], weight, bias)


def test_an_interrupted_preparation_leaves_no_size_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may arrive right after the size was set."""

    class Interrupted:
        get, set_ = staticmethod(products._weights.get), staticmethod(products._weights.set)

        def set(self, value: int) -> object:
            token = type(self).set_(value)
            if value:
                raise KeyboardInterrupt
            return token

    monkeypatch.setattr(products, "_weights", Interrupted())
    with pytest.raises(KeyboardInterrupt), products.of_model(products.CACHE + 1):
        pass
    assert products._weights.get() == 0


@pytest.mark.skipif(not products.ON_MKL, reason="MKL is for x86-64")
def test_a_matrix_is_read_in_blocks_where_a_cache_does_not_hold_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch, "bmm", lambda *tensors: calls.append(tensors[0].shape) or torch.matmul(*tensors))
    x, weight = torch.ones(1, 512), torch.ones(1024, 512)
    products.prepare_linear(weight)(x)
    with products.of_model(products.CACHE):
        products.prepare_linear(weight)(x)
    assert not calls
    with products.of_model(products.CACHE + 1):
        products.prepare_linear(weight)(x)
        products.prepare_linear(torch.ones(64, 512))(x)
    blocks = products.BLOCKS * torch.get_num_threads()
    assert calls == [(blocks, 1024 // blocks, 512)]


def test_onednn_multiplies_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps memory for each."""
    monkeypatch.setattr(products, "MOST_SHAPES", 2)
    monkeypatch.setattr(products, "_shapes", set())
    shapes = [(1, 2, 3), (2, 2, 3), (3, 2, 3), (1, 2, 3)]
    assert [products._is_known(shape) for shape in shapes] == [True, True, False, True]


@pytest.mark.skipif(not products.ON_MKL, reason="MKL is for x86-64")
@pytest.mark.parametrize(("tokens", "by_onednn"), [(4, False), (5, False), (8, True)])
def test_onednn_multiplies_smaller_matrices_that_come_from_memory(
    tokens: int, by_onednn: bool, onednn: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "MANY", 8 * 32 * 10 + 1)
    monkeypatch.setattr(products, "MANY_FROM_MEMORY", 8 * 32 * 10)
    weight, bias, x = drawn((32, 10), (32,), (tokens, 10), dtype=torch.float32)
    exact = linear(x.double(), weight.double(), bias.double()).float()
    cached = products.prepare_linear(weight, bias)
    torch.testing.assert_close(cached(x), exact)
    assert not onednn
    monkeypatch.setattr(products, "LARGE", 0)
    with products.of_model(products.CACHE + 1):
        torch.testing.assert_close(products.prepare_linear(weight, bias)(x), exact)
    assert onednn == [weight.shape] * by_onednn


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


@pytest.mark.parametrize("tokens", [0, 5, 10, 11])
@pytest.mark.parametrize("rows", [3, 20, 100])
def test_gradients_of_weights_are_sums_over_parts_of_the_tokens(
    tokens: int, rows: int, onednn: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "TOKENS", 5)
    x, weight, *grads = drawn((1, tokens, 10), (rows, 10), *3 * [(1, tokens, rows)], dtype=torch.float32)
    results = []
    for run in (products.linear, linear):
        leaf, scale = weight.clone().requires_grad_(), x.clone().requires_grad_()
        y = run(scale, leaf)
        (first,) = torch.autograd.grad(y, leaf, grads[0], retain_graph=True, create_graph=True)
        (second,) = torch.autograd.grad(first.mean(), scale, retain_graph=True)
        (several,) = torch.autograd.grad(y, leaf, torch.stack(grads), is_grads_batched=True)
        assert first.is_contiguous()
        results.append((first, second, several))
    torch.testing.assert_close(*results)
    assert tokens == 0 or rows == 3 or len(onednn) > -(-tokens // 5)  # of 3 rows, torch computes the gradient


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
    x, weight = torch.ones(3, 12, 20)[..., :10], torch.ones(10, 16)[:, :8]
    for given in ((x, weight.t()), (x[0].t(), weight.t().contiguous()), (x.transpose(0, 1), torch.ones(10, 8).t())):
        products._by_onednn(*given, None)
    for pair in seen:
        assert all(each.is_contiguous() or each.t().is_contiguous() for each in pair)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("add", [False, True])
def test_products_within_a_larger_tensor(
    threads: int, alpha: float, add: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch multiplies one matrix at a time if their results are not contiguous, so they are copied to their place."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    a, b, whole = drawn((3, 4, 5), (3, 5, 6), (3, 9, 6))
    expected = whole.clone()
    expected[:, 2:6] = alpha * (a @ b) + (expected[:, 2:6] if add else 0)
    products.multiply([a], [b], [whole[:, 2:6]], add=add, alpha=alpha)
    torch.testing.assert_close(whole, expected)
