"""What a compiler makes of a kernel serves all lengths: one graph for the first, one for any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import eager

import seqblocks
from seqblocks import kernels
from tests.torch.test_transforms import REST, first

LENGTHS = (7, 9, 12, 40, 65, 130, 300)


def stretched(x: torch.Tensor, length: int) -> torch.Tensor:
    """Its tokens over and over; what has no tokens as it is."""
    if x.shape[:2] != (2, 12):
        return x
    return x.repeat(1, -(-length // 12), *(1 for _ in x.shape[2:]))[:, :length].contiguous()  # strides count too


@pytest.mark.parametrize("op", [*REST, "mlstm_memoroid"])
def test_two_graphs(op: str) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return eager(graph, inputs)

    options: dict[str, Any] = {"head_norm": {"heads": 2}, "centaurus": {"mode": "dws"}}.get(op, {})
    named = "mlstm" if op == "mlstm_memoroid" else op
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: getattr(kernels, op)(*x, **options, backend="torch"), backend=backend, fullgraph=True
    )
    for length in LENGTHS:
        x = [stretched(x, length) for x in (first(named), *REST[named])]
        torch.testing.assert_close(compiled(*x), getattr(kernels, op)(*x, **options, backend="torch"))
    assert len(graphs) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba_small", "mlstm_small", "transformer_small", "hybrid_small"])
def test_an_exported_model_takes_any_length(name: str) -> None:
    model = seqblocks.build(name, seed=0).eval()
    tokens = torch.randint(40, (2, 300), generator=torch.Generator().manual_seed(0))
    sizes = {"x": {1: torch.export.Dim("seq", min=2, max=4096)}}
    program = torch.export.export(model, (tokens[:, :40].clone(),), dynamic_shapes=sizes, strict=False).module()
    with torch.no_grad():
        for length in (2, 41, 300):
            x = tokens[:, :length].clone()
            torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)
