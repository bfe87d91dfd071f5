"""Huge pages for the parameters of large models (seqblocks/runtime/huge_pages.py)."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch
from torch import nn

import seqblocks
from seqblocks.runtime import huge_pages

MB = 1 << 20


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Record the spans of memory for which huge pages are requested, and the kind of request."""
    spans: list[tuple[int, int, int]] = []
    monkeypatch.setattr(huge_pages.sys, "platform", "linux")
    monkeypatch.setattr(huge_pages, "_advise", lambda *given: spans.append(given))
    return spans


def test_only_memory_of_the_parameters_of_a_large_model_is_advised(advised: list[tuple[int, int, int]]) -> None:
    small, large = nn.Linear(64, 64), nn.Linear(4096, 2048)
    huge_pages.request_huge_pages(small)
    assert not advised
    huge_pages.request_huge_pages(large)
    start, end, advice = advised[0]
    assert advice == huge_pages.MADV_HUGEPAGE
    first = large.weight.data_ptr()
    assert start % huge_pages.HUGE == end % huge_pages.HUGE == 0
    assert first <= start < first + huge_pages.HUGE
    assert first + 30 * MB <= end <= first + 32 * MB + huge_pages.GAP


def test_neighbouring_parameters_share_huge_pages() -> None:
    spans = [(0, 3 * MB), (3 * MB + 64, 5 * MB), (9 * MB, 10 * MB)]
    assert huge_pages._joined(spans) == [[0, 5 * MB], [9 * MB, 10 * MB]]


def test_without_the_system_call_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    monkeypatch.setattr(huge_pages, "LARGE_MODEL", 0)
    model = seqblocks.build("mamba_small", set={"depth": 1})
    assert torch.isfinite(model(torch.zeros(1, 3, dtype=torch.long))).all()


@pytest.mark.skipif(sys.platform != "linux", reason="madvise is of Linux")
def test_linux_accepts_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(8 * MB)
    found = []
    real = ctypes.CDLL(None).madvise
    library = type("Library", (), {"madvise": staticmethod(lambda *given: found.append(real(*given)))})
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    huge_pages.request_huge_pages(nn.ParameterList([nn.Parameter(x)]))
    assert found[0] in (0, -1)  # -1: a kernel without huge pages
    assert x.fill_(2.0).sum() == 2 * x.numel()


def test_pages_to_which_the_allocator_has_written_become_huge(advised: list[tuple[int, int, int]]) -> None:
    parts = torch.empty(4, 4 + 9 * MB // 4)
    blocks = [nn.Parameter(part[4:]) for part in parts]  # 16 bytes before each block are the allocator's
    huge_pages.request_huge_pages(nn.ParameterList(blocks))
    found = [(start, end) for start, end, advice in advised if advice == huge_pages.MADV_COLLAPSE]
    written = [(block.data_ptr() - 1) // huge_pages.HUGE * huge_pages.HUGE for block in blocks[1:]]
    assert found == [(page, page + huge_pages.HUGE) for page in written]
