"""The bundled blocks of linear attention, delta rules and gated recurrences against the official layers' float64 runs.

Outputs, last states and every gradient, of inputs and weights; the cotangents of the states are part of the cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.checkpoint import load_official, official_name
from tests.torch import golden


def same(x: Tensor) -> Tensor:
    return x


def value_first(x: Tensor) -> Tensor:
    """Transpose states that the official cache stores with the value axis before the key axis."""
    return x.transpose(-1, -2)


class Case(NamedTuple):
    """A block's call, its file, its recurrent step, the official layout of its state, and its additional input wires.
    """

    call: str
    use: str
    step: str
    layout: Callable[[Tensor], Tensor] = same
    state: str = "S"
    wire: str = ""


CASES = {
    "linear_attention/layer_retention_T33": Case("retention_mixer: {dim: 16, heads: 2}", "retnet", "linear_attention"),
    "linear_attention/layer_gla_T33": Case("gla_mixer: {dim: 32, heads: 2}", "gla", "linear_attention", value_first),
    "linear_attention/layer_simple_gla_T17": Case(
        "simple_gla_mixer: {dim: 16, heads: 2}", "gla", "linear_attention", value_first
    ),
    "linear_attention/layer_hgrn_T17": Case(
        "hgrn_mixer: {dim: 16, lower: wired}", "hgrn", "gated_recurrence", state="h", wire="zeros"
    ),
    "linear_attention/layer_hgrn2_T17": Case(
        "hgrn2_mixer: {dim: 16, key: 8, lower: wired}", "hgrn", "linear_attention", value_first, wire="lower_bound"
    ),
    "linear_attention/layer_deltanet_T33": Case(
        "deltanet_mixer: {dim: 16, heads: 2}", "deltanet", "linear_attention"
    ),
    "linear_attention/layer_gated_deltanet_T33": Case(
        "gated_deltanet_mixer: {dim: 16, heads: 2, head: 6}", "deltanet", "linear_attention", value_first
    ),
    "linear_attention/layer_gated_deltanet_T9_neg_gva": Case(
        "gated_deltanet_mixer: {dim: 16, heads: 2, value_heads: 4, head: 6, expand_v: 1, negative: true}", "deltanet",
        "linear_attention", value_first,
    ),
    "linear_attention/layer_kda_T33": Case(
        "kda_mixer: {dim: 16, heads: 2, head: 8}", "kda", "linear_attention", value_first
    ),
    "linear_attention/layer_griffin_T17": Case(
        "griffin_mixer: {dim: 16, heads: 2}", "griffin", "rg_lru.gated_recurrence", state="h"
    ),
    "linear_attention/cell_rglru_T20_resets": Case(
        "rg_lru: {width: 12, heads: 3}", "griffin", "gated_recurrence", state="h"
    ),
    "linear_attention/cell_rglru_T33": Case("rg_lru: {width: 16, heads: 2}", "griffin", "gated_recurrence", state="h"),
    "linear_attention/layer_mingru_T33": Case(
        "mingru_mixer: {dim: 12, expand: 1.5}", "mingru", "gated_recurrence", state="h"
    ),
    "linear_attention/layer_minlstm_T17": Case("minlstm_mixer: {dim: 12}", "mingru", "gated_recurrence", state="h"),
    "linear_attention/layer_rwkv6_T17": Case(
        "rwkv6_mixer: {dim: 16, heads: 2, mix_rank: 4, decay_rank: 6}", "rwkv6", "linear_attention"
    ),
    "linear_attention/layer_rwkv7_T17_first": Case(
        "rwkv7_mixer: {dim: 16, head: 8, decay_rank: 4, gate_rank: 6, erase_rank: 4, layers: 4, values: wired}",
        "rwkv7", "memory.linear_attention", wire="zeros",
    ),
    "linear_attention/layer_rwkv7_T33_later": Case(
        "rwkv7_mixer: {dim: 16, head: 8, decay_rank: 4, gate_rank: 6, erase_rank: 4, value_rank: 3, layer: 2, "
        "layers: 4, values: wired}", "rwkv7", "memory.linear_attention", wire="v_first",
    ),
    "mamba/mamba2_L1_d16_h4_N4": Case(
        "mamba2_mixer: {dim: 16, state: 4, head: 8}", "mamba2", "linear_attention", value_first
    ),
    "mamba/mamba2_L9_d16_h4_N4": Case(
        "mamba2_mixer: {dim: 16, state: 4, head: 8}", "mamba2", "linear_attention", value_first
    ),
    "mamba/mamba2_L64_d32_h4_N16_g2": Case(
        "mamba2_mixer: {dim: 32, state: 16, head: 16, groups: 2}", "mamba2", "linear_attention", value_first
    ),
    "mamba/mamba2_opt_L9_Dhdim_normbeforegate": Case(
        "mamba2_mixer: {dim: 16, state: 4, head: 8, groups: 2, skip_per_feature: true, gate: after}", "mamba2",
        "linear_attention", value_first,
    ),
    "mamba/mamba2_opt_L9_norms_off": Case(
        "mamba2_mixer: {dim: 16, state: 4, head: 8, norm: false}", "mamba2", "linear_attention", value_first
    ),
}  # fmt: skip


class Read(NamedTuple):
    data: Any
    cfg: dict[str, Any]

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        x = torch.from_numpy(self.data[name])
        return x.to(dtype) if x.is_floating_point() else x


def read(name: str) -> Read:
    return Read(*golden.read(name, "cfg"))


def built(name: str, dtype: torch.dtype) -> tuple[Read, Any]:
    """Return the block with the case's weights. Additional wires are further features of the input."""
    case, found = CASES[name], read(name)
    width = found.data["in/x"].shape[-1]
    more = width if case.wire else 0
    verb, _, arguments = case.call.partition(": {")
    model = seqblocks.build_text(f"""
seqblocks: 1
use: [{case.use}]
model:
  input: {{features: {width + more}}}
  steps:
    - select: {{features: {width}, name: x, as: x}}
    {f'- select: {{from: input, first: {width}, features: {more}, as: wired}}' if more else ''}
    - {verb}: {{from: x, name: it, {arguments}
checkpoint: {{it: ""}}
""", dtype=dtype)
    load_official(model, {key[2:]: found.tensor(key, dtype) for key in found.data if key.startswith("w/")})
    return found, model.eval()


def given_state(found: Read, case: Case, model: Any, dtype: torch.dtype) -> tuple[Any, Tensor | None]:
    if "in/initial_state" not in found.data:
        return None, None
    first = found.tensor("in/initial_state", dtype).requires_grad_()
    state = model.init_state(first.shape[0])
    here = at(state["it"], case.step)
    here[case.state] = first.reshape(here[case.state].shape)
    if "begun" in here:
        here["begun"] = found.tensor("in/position_ids", dtype)[:, 0]
    return state, first


def at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree[part]
    return tree


def run(name: str, dtype: torch.dtype) -> tuple[Read, dict[str, Tensor]]:
    case, (found, model) = CASES[name], built(name, dtype)
    leaves = {"x": found.tensor("in/x", dtype).requires_grad_()}
    x = leaves["x"]
    if case.wire:
        wired = torch.zeros_like(x)
        if case.wire != "zeros":
            leaves[case.wire] = wired = found.tensor(f"in/{case.wire}", dtype).requires_grad_()
        x = torch.cat([x, wired.expand_as(x)], -1)
    state, first = given_state(found, case, model, dtype)
    leaves |= {} if first is None else {"initial_state": first}
    resets = found.tensor("in/position_ids", dtype) == 0 if "in/position_ids" in found.data else None
    y, last = model(x, state=state, return_state=True, resets=resets)
    recurrent = case.layout(at(last["it"], case.step)[case.state])
    width = found.data["out/y"].shape[-1]
    results = {"y": y[..., :width]} | ({"v_first": y[..., width:]} if "out/v_first" in found.data else {})
    for key in ("recurrent_state", "final_state", "ssm_state"):
        if f"out/{key}" in found.data:
            results[key] = recurrent.reshape(found.data[f"out/{key}"].shape)
    pairs = [(results[key], found.tensor(f"cot/{key}", dtype)) for key in results if f"cot/{key}" in found.data]
    loss = torch.stack([(out * cotangent).sum() for out, cotangent in pairs]).sum()
    names = [key for key in leaves if f"grad/{key}" in found.data]
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, [*(leaves[key] for key in names), *parameters.values()])
    out = {f"out/{key}": each.detach() for key, each in results.items()}
    out |= {f"grad/{key}": g for key, g in zip(names, grads, strict=False)}
    parts: dict[str, list[tuple[Any, Tensor]]] = {}
    for key, g in zip(parameters, grads[len(names) :], strict=True):
        recipe = official_name(model.spec, key)
        official = recipe if isinstance(recipe, str) else next(iter(recipe.values()))
        parts.setdefault(official, []).append((recipe, g))
    weights = {name: joined(each, found.data[f"w/{name}"]) for name, each in parts.items()}
    return found, out | {f"grad/{name}": g for name, g in weights.items()}


def joined(parts: list[tuple[Any, Tensor]], like: Any) -> Tensor:
    """Return the gradient of an official tensor, from those of the parameters that are read from it."""
    (recipe, gradient), *others = parts
    if not isinstance(recipe, str) and "split" in recipe:
        return torch.cat([g for _, g in parts], recipe.get("axis", 0)).reshape(like.shape)
    assert not others
    transposed = not isinstance(recipe, str) and "transpose" in recipe
    return (gradient.transpose(-1, -2) if transposed else gradient).reshape(like.shape)


@pytest.mark.filterwarnings("ignore:.*may be above 0")  # the lower bounds of HGRN's decays are an input here
@pytest.mark.parametrize("name", CASES)
def test_the_official_layers(name: str) -> None:
    found, results = run(name, torch.float64)
    expected = {key for key in found.data if key.startswith("grad/")}
    assert {key for key in results if key.startswith("grad/")} == expected
    for key, result in results.items():
        torch.testing.assert_close(result, torch.from_numpy(found.data[key]), rtol=1e-9, atol=1e-10, msg=key)


@pytest.mark.filterwarnings("ignore:.*may be above 0")
@pytest.mark.parametrize("name", CASES)
def test_float32_is_as_exact_as_the_official_layers(name: str) -> None:
    """At most ten times the official float32 error of outputs and gradients, plus 1e-6 of the largest number."""
    found, results = run(name, torch.float32)
    measured = found.cfg.get("measured", found.cfg)
    outputs = measured["maxdiff_f32_vs_f64"]
    outputs = outputs if isinstance(outputs, dict) else {"y": outputs}
    differences = {f"out/{n}": x for n, x in outputs.items()}
    differences |= {f"grad/{n}": x for n, x in measured.get("maxdiff_grad_f32", {}).items()}
    for key, loss in differences.items():
        if key in results:
            expected = torch.from_numpy(found.data[key])
            error = (results[key].double() - expected).abs().max().item()
            assert error <= 10 * loss + 1e-6 * max(1.0, expected.abs().max().item()), key


# ------------------------------------------------------------------------------------------------ other layouts


def joined_convolutions(w: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"conv1d.weight": torch.cat([w.pop(f"{name}_conv1d.weight") for name in "qkv"])}


def qwen3_next(w: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Permute projections into the order by key heads that Qwen3-Next's modules use."""
    def of_heads(*names: str) -> Tensor:
        return torch.cat([w.pop(f"{name}_proj.weight").unflatten(0, (heads, -1)) for name in names], 1).flatten(0, 1)

    projections = {"in_proj_qkvz.weight": of_heads(*"qkvg"), "in_proj_ba.weight": of_heads(*"ba")}
    out = {"norm.weight": w.pop("o_norm.weight"), "out_proj.weight": w.pop("o_proj.weight")}
    return {**projections, **joined_convolutions(w), **out, **w}


def qwen3_5(w: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    out = {"in_proj_qkv.weight": torch.cat([w.pop(f"{name}_proj.weight") for name in "qkv"])}
    out |= {f"in_proj_{new}.weight": w.pop(f"{old}_proj.weight") for new, old in zip("zba", "gba", strict=True)}
    out |= {"norm.weight": w.pop("o_norm.weight"), "out_proj.weight": w.pop("o_proj.weight")}
    return {**out, **joined_convolutions(w), **w}


def olmo_hybrid(w: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    return {**joined_convolutions(w), **w}


def kimi_linear(w: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    renamed = {"f_proj.0": "forget_gate.f_a_proj", "f_proj.1": "forget_gate.f_b_proj", "g_proj.0": "g_a_proj"}
    renamed |= {"g_proj.1": "g_b_proj"}
    out = {f"{new}.weight": w.pop(f"{old}.weight") for old, new in renamed.items()}
    out |= {"forget_gate.A_log": w.pop("A_log").view(1, 1, heads, 1), "forget_gate.dt_bias": w.pop("dt_bias")}
    return {**out, **joined_convolutions(w), **w}


@pytest.mark.parametrize("layout", [qwen3_next, qwen3_5, olmo_hybrid])
@pytest.mark.parametrize("name", [name for name in CASES if "gated_deltanet" in name])
def test_gated_deltanet_in_other_layouts(name: str, layout: Callable[..., dict[str, Tensor]]) -> None:
    """The same weights in the layout of another release give the same model."""
    found, model = built(name, torch.float64)
    before = {key: t.clone() for key, t in model.state_dict().items()}
    w = {key[2:]: found.tensor(key, torch.float64) for key in found.data if key.startswith("w/")}
    load_official(model, layout(w, 2))
    for key, t in model.state_dict().items():
        assert torch.equal(t, before[key]), key


def test_kda_in_the_layout_of_kimi_linear() -> None:
    found = read("linear_attention/layer_kda_T33")
    w = {key[2:]: found.tensor(key, torch.float64) for key in found.data if key.startswith("w/")}
    del w["g_proj.1.bias"]
    spec = """
seqblocks: 1
use: [kda]
model: {input: {features: 16}, steps: [kda_mixer: {name: it, dim: 16, heads: 2, head: 8, gate_bias: false}]}
checkpoint: {it: ""}
"""
    states = []
    for weights in (dict(w), kimi_linear(dict(w), 2)):
        model = seqblocks.build_text(spec, dtype=torch.float64)
        load_official(model, weights)
        states.append(model.state_dict())
    for key, t in states[0].items():
        assert torch.equal(t, states[1][key]), key


# ------------------------------------------------------------------------------------------------ 16 bits


@pytest.mark.filterwarnings("ignore:.*may be above 0")
@pytest.mark.parametrize("name", CASES)
def test_layers_in_16_bits(name: str) -> None:
    """Decays are float32. Outputs are bfloat16, finite, and within a few percent of the reference."""
    found, model = built(name, torch.bfloat16)
    x = found.tensor("in/x", torch.bfloat16)
    if CASES[name].wire:
        wired = torch.zeros_like(x)
        if CASES[name].wire != "zeros":
            wired = found.tensor(f"in/{CASES[name].wire}", torch.bfloat16).expand_as(x)
        x = torch.cat([x, wired], -1)
    y, state = model(x, return_state=True)
    assert y.dtype == torch.bfloat16
    assert at(state["it"], CASES[name].step)[CASES[name].state].dtype == torch.float32
    exact = torch.from_numpy(found.data["out/y"])
    if "in/initial_state" not in found.data and "in/position_ids" not in found.data:
        error = (y[..., : exact.shape[-1]].double() - exact).square().mean().sqrt()
        assert error <= 0.05 * exact.square().mean().sqrt()
    y.float().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
