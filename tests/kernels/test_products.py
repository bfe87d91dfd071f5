"""Products of few tokens with large matrices: the same numbers as `linear`, in the same layout."""

from __future__ import annotations

import pytest
import torch

from seqblocks.kernels import products


@pytest.mark.parametrize("tokens", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("rows", [1, 6, 32])
@pytest.mark.parametrize("biased", [False, True])
def test_the_same_as_linear(tokens: int, rows: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LARGE", 0)
    generator = torch.Generator().manual_seed(rows)
    weight, bias, x = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((rows, 10), (rows,), (tokens, 10))
    )
    found = products.linear_of_few(x, weight, bias if biased else None)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, bias if biased else None))
    assert found.is_contiguous()


def test_other_layouts_and_dtypes_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LARGE", 0)
    weight, x = torch.randn(8, 6).t(), torch.randn(2, 8)
    torch.testing.assert_close(products.linear_of_few(x, weight), x @ weight.t())
    assert products.linear_of_few(x.bfloat16(), weight.bfloat16()).dtype == torch.bfloat16


@pytest.mark.skipif(not products.ON_MKL, reason="MKL is for x86-64")
def test_a_large_matrix_is_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch, "bmm", lambda *tensors: calls.append(tensors[0].shape) or torch.matmul(*tensors))
    products.linear_of_few(torch.ones(1, 512), torch.ones(1024, 512))
    products.linear_of_few(torch.ones(1, 512), torch.ones(1023, 512))
    assert calls == [(16, 64, 512)]
