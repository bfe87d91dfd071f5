"""Which parameters weight decay reaches, after they were parametrised, pruned, normalised, wrapped or replaced."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import seqblocks

TEXT = """
seqblocks: 1
use: [mamba]
model:
  input: {tokens: 16}
  steps:
    - embed: {features: 8}
    - repeat: {name: layers, times: 2, steps: [layer_norm, mamba_mixer: {dim: 8, state: 4}]}
    - scan: {order: [forward, reverse], own: [causal_conv.weight], steps: [causal_conv: {kernel: 2}]}
    - unembed: {bias: false, tie: embed}
expect: {lookahead: 1}
"""


@pytest.fixture
def model() -> Any:
    return seqblocks.build_text(TEXT, seed=0)


def with_decay(model: Any) -> set[str]:
    """Return the names of the parameters that decay, of which tied ones have two."""
    decayed, plain = model.parameter_groups(0.1)
    assert {id(p) for group in (decayed, plain) for p in group["params"]} == {id(p) for p in model.parameters()}
    found = {id(p) for p in decayed["params"]}
    return {name for name, p in model.named_parameters() if id(p) in found}


def original(name: str) -> str:
    """Return the name that a parameter had before torch renamed it."""
    name = re.sub(r"parametrizations\.(\w+)\..*", r"\1", name)
    return re.sub(r"(weight|bias|A_log|D)_(orig|g|v)$", r"\1", name)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def parametrised(module: nn.Module, name: str) -> None:
    parametrize.register_parametrization(module, name, nn.Identity())


def scaled(module: nn.Module, name: str) -> None:
    parametrize.register_parametrization(module, name, Scaled())


CHANGES = (parametrised, scaled, parametrizations.weight_norm, nn.utils.weight_norm, prune.identity)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("change", CHANGES)
def test_renamed_parameters_keep_the_rule_of_their_owner(model: Any, change: Callable[..., Any]) -> None:
    before = with_decay(model)
    assert {"layers.0.mamba_mixer.in_proj.weight", "scan.rev.causal_conv.weight"} <= before
    for module in [*model.modules()]:
        for name, p in [*module.named_parameters(recurse=False)]:
            if module not in (model.embed, model.unembed) and (p.ndim > 1 or "norm" not in change.__name__):
                change(module, name)
    decayed = with_decay(model)
    assert {original(name) for name in decayed} == before
    assert before.isdisjoint(original(name) for name, _ in model.named_parameters() if name not in decayed)


def test_a_tied_weight_that_is_renamed_keeps_the_rule_of_the_embedding(model: Any) -> None:
    prune.identity(model.embed, "weight")
    parametrize.register_parametrization(model.unembed, "weight", nn.Identity())
    assert not [name for name in with_decay(model) if "embed" in name]


def test_rules_hold_inside_of_wrappers_and_for_replaced_steps(model: Any) -> None:
    before = with_decay(model)
    model.layers[0] = Wrapper(model.layers[0])
    model.layers[1].mamba_mixer = Wrapper(model.layers[1].mamba_mixer)
    assert {name.replace("inner.", "") for name in with_decay(model)} == before
    model.embed = Wrapper(copy.deepcopy(model.embed))
    assert {name.replace("inner.", "") for name in with_decay(model)} == before
    model.embed = nn.Embedding(16, 8)
    assert with_decay(model).isdisjoint({"embed.weight", "unembed.weight"})


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.inner(*inputs, **options)
