"""A reset is the end of what was before: an agent recovers from a state that is not finite.

The kernels: check_poison in tests/kernels/conformance.py, and tests/kernels/test_mlstm_resets.py.
"""

from __future__ import annotations

import pytest
import torch

import seqblocks
from seqblocks.state import map_state

STREAMING = ("mamba_small", "mlstm_small", "hybrid_small", "memoroid_agent", "transformer_small", "centaurus_mlstm")


@pytest.mark.parametrize("name", STREAMING)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_an_agent_recovers(name: str, poison: float) -> None:
    """One step with a reset on a state that is lost gives what a new state gives, and leaves nothing of the old one."""
    model = seqblocks.build(name, device="cpu", seed=0)
    first = model.init_state(3)
    shape = (3, *([model.frame_size] if model.frame_size > 1 else []))
    wire = model.spec.input
    x = torch.randint(0, 16, shape) if wire.kind == "tokens" else torch.randn(*shape, wire.features)
    lost = map_state(lambda t: torch.full_like(t, poison) if t.is_floating_point() else t + 3, first)
    with torch.no_grad():
        wanted, after = model.step(x, first)
        found, state = model.step(x, lost, resets=torch.ones(3, dtype=torch.bool))
        later, _ = model.step(x, state)
        wanted_later, _ = model.step(x, after)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(later, wanted_later)
    map_state(lambda t: pytest.fail("not finite") if not t.isfinite().all() else t, state)
