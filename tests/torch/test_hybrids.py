"""Specs that combine systems: each part computes the same as it does alone."""

from __future__ import annotations

import pytest
import torch

import seqblocks
from seqblocks import graph
from seqblocks.analysis import check


def walk(order: str, rows: int, columns: int) -> torch.Tensor:
    """Return the tokens of a grid in the order of a walk written out explicitly."""
    tokens = torch.arange(rows * columns).view(rows, columns)
    path = (tokens.t() if order.startswith("columns") else tokens).flatten()
    return path.flip(0) if order.endswith("reverse") else path


@pytest.mark.parametrize("order", ["forward", "reverse", "columns", "columns_reverse"])
def test_an_order_is_a_walk_over_the_image(order: str) -> None:
    """The block in an order equals the forward block on permuted tokens, permuted back; gradients too."""
    def block(order: str) -> seqblocks.SequenceModel:
        text = (
            "seqblocks: 1\nuse: [vil]\n"
            f"model: {{input: {{features: 8, grid: [3, 5]}}, steps: [{{vil: {{dim: 8, order: {order}}}}}]}}"
        )
        made = seqblocks.build_text(text, dtype=torch.float64, seed=1)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
        return made

    x = torch.randn(2, 15, 8, dtype=torch.float64, requires_grad=True)
    path = walk(order, 3, 5)
    found, expected = block(order)(x), block("forward")(x[:, path])[:, path.argsort()]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (a,), (b,) = (torch.autograd.grad(y.square().sum(), x) for y in (found, expected))
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_the_four_orders_are_in_turn() -> None:
    made = check.load_model("vil_tiny_four_orders")
    orders = [node.arguments.orders for node in graph.walk(made.graph) if node.kind == "scan"]
    assert orders == [("forward",), ("reverse",), ("columns",), ("columns_reverse",)] * 6


def test_the_hybrid_forgets_between_documents_in_every_mixer() -> None:
    """Packed documents give the same results as separate ones: no convolution, state or window crosses a boundary."""
    model = seqblocks.build("hybrid_small", set={"dim": 16, "vocabulary": 11, "window": 4}, dtype=torch.float64).eval()
    tokens = torch.randint(11, (1, 40), generator=torch.Generator().manual_seed(0))
    packed = model(tokens, cu_seqlens=torch.tensor([0, 7, 8, 40]))
    alone = torch.cat([model(tokens[:, a:b]) for a, b in ((0, 7), (7, 8), (8, 40))], 1)
    # The stabiliser of the mLSTM starts at a reset as at the beginning; float64 rounding of sums over 40 tokens.
    torch.testing.assert_close(packed, alone, rtol=1e-10, atol=1e-10)


def test_counts_by_hand() -> None:
    """At width 128 an mLSTM block has 109,448 parameters, Mamba's 116,608, attention 41,088 with one key-value head and
    49,280 with two, a gated network 147,584."""
    ends = 256 * 128 + 128  # the tied embedding and the last norm
    expected = {
        "mlstm_small": 5 * 109_448 + ends,
        "mamba_small": 5 * 116_608 + ends,
        "transformer_small": 3 * (49_280 + 147_584) + ends,
        "hybrid_small": 109_448 + 116_608 + 41_088 + 2 * 147_584 + ends,
    }
    assert {name: graph.count(check.load_model(name).graph) for name in expected} == expected
    front = 464 + 7_808 + 5_952  # full 1 -> 16, neck 16 -> 64 with its skip, separable 64
    assert graph.count(check.load_model("centaurus_mlstm").graph) == front + 2 * 30_152 + 64 + 65
