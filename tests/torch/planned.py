"""Models whose steps are planned, and what must hold for them."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import seqblocks
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.body import Block
from seqblocks.runtime.primitive import Primitive

SPEC = """
seqblocks: 1
use: [xlstm, mamba, transformer, memoroid]
model:
  input: {tokens: 11}
  steps:
    - embed: {features: 16}
    - mlstm_block: {dim: 16, heads: 2}
    - slstm_block: {dim: 16, heads: 2}
    - mamba_block: {dim: 16}
    - attention_layer: {dim: 16, heads: 2, window: 3}
    - swiglu_layer: {dim: 16}
    - parallel:
        merge: concat
        branches:
          - a: [rms_norm, token_shift]
          - b: [{repeat: {times: 2, steps: [layer_norm, {causal_conv: {kernel: 3}}]}}]
    - headwise_linear: {block: 8, features: 16}
    - unembed
"""
CONVOLUTIONS = """
seqblocks: 1
model:
  input: {tokens: 11}
  steps:
    - embed: {features: 12, as: x}
    - linear: {features: 6, name: a}
    - causal_conv: {activation: silu, as: p}
    - linear: {from: x, features: 4, name: b}
    - causal_conv: {activation: silu, as: q}
    - linear: {from: x, features: 8, name: c}
    - causal_conv: {activation: silu, as: r}
    - causal_conv: {kernel: 3, activation: silu, as: s}
    - linear: {from: [p, q, r, s], features: 11}
"""
GATES = """
seqblocks: 1
model:
  input: {tokens: 11}
  steps:
    - embed: {features: 12, as: x}
    - linear: {features: 24, as: w}
    - headwise_linear: {from: x, block: 6, features: 8, as: i, bias: true}
    - headwise_linear: {from: w, block: 12, features: 8, as: f}
    - causal_conv: {from: w, as: c}
    - headwise_linear: {from: c, block: BLOCK, features: 8, as: z, bias: true}
    - headwise_linear: {from: x, block: 6, features: 8, as: o, name: o}
    - slstm: {i: i, f: f, z: z, o: o, heads: 2, as: y}
    - linear: {from: [y, READ], features: 11}
"""

SMALL = """
seqblocks: 1
use: [xlstm]
model:
  input: {tokens: 11}
  steps:
    - embed: {features: 32}
    - mlstm_block: {dim: 32, heads: 2}
    - headwise_linear: {block: 8, features: 16}
    - unembed
"""
EXPERTS = """
seqblocks: 1
model:
  input: {tokens: 11}
  steps:
    - embed: {features: 8, as: h}
    - linear: {features: 4, as: a}
    - linear: {from: h, features: 4, as: b}
    - add: {with: a}
    - experts: {count: 3, top: 1, steps: [{experts: {count: 2, top: 2, steps: [{linear: 4}]}}]}
    - unembed
"""

LINEAR = [
    "decay: g, heads: 2", "decay: gk, heads: 2", "heads: 2", "heads: 1, value_heads: 2, fixed_decay: retention",
    "decay: gk, heads: 2, bonus: true", "decay: g, heads: 2, normalize: true", "beta: b, heads: 2, rule: delta",
    "decay: g, beta: b, heads: 1, value_heads: 2, rule: delta, qk_norm: l2",
    "decay: gk, a: v, b: k, heads: 2, rule: dplr",
]  # fmt: skip


def linear_attention(mixer: str) -> SequenceModel:
    """Return a model whose last step is `mixer`, in float64. It reads some of the wires q, k, v, g, gk, gv, a and b."""
    width = 4 if "heads: 1" in mixer else 8
    spec = f"""
seqblocks: 1
model:
  input: {{features: 6}}
  steps:
    - identity: {{as: x}}
    - linear: {{from: x, features: {width}, as: q}}
    - linear: {{from: x, features: {width}, name: of_k}}
    - l2_norm: {{heads: {width // 4}, as: k}}
    - linear: {{from: x, features: 8, as: v}}
    - linear: {{from: x, features: 2, name: of_g}}
    - log_decay: {{kind: exp, as: g}}
    - linear: {{from: x, features: 8, name: of_gk}}
    - log_decay: {{kind: exp, as: gk}}
    - linear: {{from: x, features: 8, name: of_gv}}
    - log_decay: {{kind: exp, as: gv}}
    - linear: {{from: x, features: 2, name: of_b}}
    - sigmoid: {{as: b}}
    - {mixer}
"""
    used = {name for name in ("q", "k", "g", "gk", "gv", "b") if f": {name}," in mixer or f": {name}}}" in mixer}
    return seqblocks.build_text(_only(spec, used), dtype=torch.float64, seed=0).eval()


def _only(spec: str, used: set[str]) -> str:
    """Return the spec without unused wires, which would be errors."""
    lines = spec.splitlines()
    for name in ("q", "k", "g", "gk", "gv", "b"):
        if name not in used:
            at = next(n for n, line in enumerate(lines) if f"as: {name}}}" in line)
            del lines[at if name == "q" else at - 1 : at + 1]
    return "\n".join(lines)


def build(spec: str = SPEC, **options: Any) -> SequenceModel:
    model = seqblocks.build_model(seqblocks.load_text(spec)[1], **({"dtype": torch.float64} | options)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def tokens() -> Tensor:
    return torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(4))


def steps(model: SequenceModel, resets: Tensor | None = None) -> tuple[Tensor, Any]:
    """Return outputs token by token without gradients, and the last state."""
    outputs, state, x = [], None, tokens()
    with torch.no_grad():
        for t in range(x.shape[1]):
            y, state = model.step(x[:, t], state, resets=None if resets is None else resets[:, t])
            outputs.append(y)
    return torch.stack(outputs, 1), state


def assert_follows(model: SequenceModel, resets: Tensor | None = None) -> None:
    found, state = steps(model, resets)
    with torch.no_grad():
        expected, last = model(tokens(), return_state=True, resets=resets)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for one, other in zip(torch.utils._pytree.tree_leaves(state), torch.utils._pytree.tree_leaves(last), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def add_to_all(model: SequenceModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)


def load_others(model: SequenceModel) -> None:
    model.load_state_dict({name: x + 0.1 for name, x in model.state_dict().items()})


def assign_others(model: SequenceModel) -> None:
    model.load_state_dict({name: x + 0.1 for name, x in model.state_dict().items()}, assign=True)


def replace_last(model: SequenceModel) -> None:
    model.headwise_linear = nn.Linear(32, 16, bias=False, dtype=torch.float64)


def parametrize_last(model: SequenceModel) -> None:
    nn.utils.parametrizations.weight_norm(model.headwise_linear, "weight")
    with torch.no_grad():
        model.headwise_linear.parametrizations.weight.original0.mul_(1.5)


def hook_block(model: SequenceModel) -> None:
    model.mlstm_block.register_forward_hook(lambda module, inputs, output: output * 2)


def hook_inside(model: SequenceModel) -> None:
    layer = model.mlstm_block.residual.mlstm_layer
    layer.q.register_forward_hook(lambda module, inputs, output: output * 2)


class Doubled(Primitive):
    """A primitive that returns twice its output."""

    def forward(self, *tensors: Tensor, call: Any) -> Any:
        return 2 * super().forward(*tensors, call=call)


class DoubledBlock(Block):
    def forward(self, *tensors: Tensor, call: Any) -> Any:
        return 2 * super().forward(*tensors, call=call)


class DoubledModel(SequenceModel):
    def forward(self, *given: Any, **options: Any) -> Any:  # type: ignore[override]
        y = super().forward(*given, **options)
        return (2 * y[0], y[1]) if isinstance(y, tuple) else 2 * y


def set_class(model: SequenceModel) -> None:
    model.headwise_linear.__class__ = Doubled


def set_class_of_block(model: SequenceModel) -> None:
    model.mlstm_block.__class__ = DoubledBlock


def set_class_of_model(model: SequenceModel) -> None:
    model.__class__ = DoubledModel


def set_op(model: SequenceModel) -> None:
    norm = model.mlstm_block.residual.mlstm_layer.cell.head_norm
    norm.op = norm.op.model_copy(update={"eps": 0.5})


def set_data(model: SequenceModel) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.1


def compiled(model: SequenceModel) -> Any:
    torch._dynamo.reset()
    return torch.compile(model.step, backend="eager", fullgraph=True)


def assert_compiled_follows(model: SequenceModel, step: Any) -> None:
    x, state = tokens(), model.init_state(2)
    with torch.no_grad():
        expected, last = model.step(x[:, 0], state)
        expected, _ = model.step(x[:, 1], last)
        y, after = step(x[:, 0], _reversed(state))
        y, _ = step(x[:, 1], after)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


def _reversed(state: Any) -> Any:
    """Return the same state, with the entries of all dicts in another order."""
    return {name: _reversed(x) for name, x in reversed(state.items())} if isinstance(state, dict) else state


@lru_cache
def benchmark() -> Any:
    """Return the module `benchmarks/steps.py`."""
    path = Path(__file__).parents[2] / "benchmarks" / "steps.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_steps", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
