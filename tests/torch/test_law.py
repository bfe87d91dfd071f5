"""The state law for every bundled spec that streams, at a small size: whole = chunks = steps, value and gradient.

float64; the bar is 1e-9 of the largest value: rounding of about length * 2^-52 on intermediate values of order 1e2.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import seqblocks
from seqblocks.module import SequenceModel
from seqblocks.testing import check_law

SMALL = {
    "xlstm_125m_7_1": {"dim": 16, "vocabulary": 11, "model.blocks.pattern": "m s m"},
    "xlstm_7b": {"dim": 16, "heads": 2, "depth": 2, "vocabulary": 11},
    "vil_small_block": {"dim": 8},
    "mamba_130m": {"dim": 16, "depth": 2, "vocabulary": 11},
    "memoroid_agent": {"dim": 8, "observation": 5},
}


def model(name: str, seed: int) -> SequenceModel:
    made = seqblocks.build(name, set=SMALL[name], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return made.eval()


@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=8)
@given(
    seq=st.integers(1, 60),
    cuts=st.lists(st.integers(1, 59), max_size=3),
    resets=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 59)), max_size=3),
    seed=st.integers(0, 3),
)
def test_whole_is_chunks_is_steps(
    name: str, seq: int, cuts: list[int], resets: list[tuple[int, int]], seed: int
) -> None:
    check_law(model(name, seed), seq=seq, cuts=cuts, resets=resets, seed=seed, tolerance=1e-9)


def test_truncated_backpropagation_stops_where_it_is_cut() -> None:
    from seqblocks import state as states

    made = model("xlstm_125m_7_1", 0)
    tokens = torch.randint(11, (2, 12))
    _, state = made(tokens[:, :6], return_state=True)
    assert any(t.requires_grad for t in torch.utils._pytree.tree_leaves(state))
    cut = states.detach(state)
    (made(tokens[:, 6:], state=cut)).sum().backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in made.parameters())
    assert not any(t.requires_grad for t in torch.utils._pytree.tree_leaves(cut))
