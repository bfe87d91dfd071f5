"""`share:`: one set of parameters for several steps, in values, gradients, and all torch operations on a model."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear, silu
from torch.nn.utils import parametrize

import seqblocks
from seqblocks.checkpoint import load, load_official, save
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime import fusion
from seqblocks.testing import check_law
from tests.unshared import check_unshared

BLOCKS = """
  memory:
    args: {dim: int}
    steps:
      - residual:
        - rms_norm
        - linear: {features: 2 * dim, as: [u, z]}
        - causal_conv: {from: u, kernel: 3, activation: silu, as: c}
        - linear: {features: dim, as: dt, bias: false}
        - ssm: {from: c, dt: dt, B: u, C: z, state: dim, softplus: true}
        - linear: {features: dim, name: out}
"""


def built(steps: str, blocks: str = BLOCKS, dtype: torch.dtype = torch.float64, **more: Any) -> SequenceModel:
    lines = "".join(f"    {line}\n" for line in steps.strip().splitlines())
    text = f"seqblocks: 1\nblocks:{blocks}\nmodel:\n  input: {{features: 4}}\n  steps:\n{lines}"
    return seqblocks.build_text(text, dtype=dtype, **more)


STEPS = """
- linear: {features: 4, name: first}
- silu
- linear: {features: 4, name: second, share: first}
- memory: {dim: 4, name: m}
- memory: {dim: 4, name: n, share: m}
- repeat:
    times: 3
    name: deep
    share: [narrow]
    steps:
      - linear: {features: 4, name: own}
      - linear: {features: 4, name: narrow}
      - linear: {features: 4, name: again, share: narrow}
      - linear: {features: 4, name: outer, share: first}
"""


@pytest.fixture
def model() -> SequenceModel:
    return built(STEPS)


X = torch.randn(2, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_stored_parameters(model: SequenceModel) -> None:
    names = {name.rpartition(".")[0] for name in model.state_dict()}
    assert names >= {"first", "m.residual.ssm", "deep.0.own", "deep.2.own", "deep.0.narrow"}
    assert not [name for name in names if name.startswith(("second", "n.", "deep.1.n", "deep.0.again", "deep.0.outer"))]
    assert sum(p.numel() for p in model.parameters()) == seqblocks.summarise(model).params


def test_values_and_gradients_are_those_of_modules_used_several_times() -> None:
    model = built(
        """
        - linear: {features: 4, name: a}
        - silu
        - linear: {features: 4, name: b, share: a}
        - repeat: {times: 3, share: all, steps: [residual: [{linear: {features: 4, bias: false}}, silu]]}
        """.replace("\n        ", "\n")
    )
    a, layer = nn.Linear(4, 4).double(), nn.Linear(4, 4, bias=False).double()
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), (*a.parameters(), *layer.parameters()), strict=True):
            theirs.copy_(ours)
    expected = a(silu(a(X)))
    for _ in range(3):
        expected = expected + silu(layer(expected))
    y = model(X)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    y.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(model.parameters(), (*a.parameters(), *layer.parameters()), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-13, atol=1e-13)


def test_values_and_gradients_are_those_of_a_copy_for_each_use(model: SequenceModel) -> None:
    check_unshared(model, seq=7)


def test_each_use_has_a_state_of_its_own(model: SequenceModel) -> None:
    check_law(model, seq=7, cuts=[2, 3], tolerance=1e-12)
    check_law(model, seq=7, cuts=[3], resets=[(0, 4), (1, 1)], tolerance=1e-12)
    _, state = model(X, return_state=True)
    assert not torch.equal(state["m"]["residual"]["ssm"]["h"], state["n"]["residual"]["ssm"]["h"])


def test_weights_are_drawn_by_the_name_of_the_owner() -> None:
    alone = built("- memory: {dim: 4, name: m}", seed=3)
    twice = built("- memory: {dim: 4, name: m}\n- memory: {dim: 4, name: n, share: m}", seed=3)
    for name, parameter in alone.state_dict().items():
        assert torch.equal(parameter, twice.state_dict()[name])


# --- torch operations on a model -------------------------------------------------------------------------------------


def doubled(model: SequenceModel, x: Tensor = X) -> Tensor:
    """Double the owner's weight and return the output, which must equal that of a model with these weights."""
    weights = {k: v * 2 if k == "first.weight" else v for k, v in model.state_dict().items()}
    return functional_call(built(STEPS), weights, (x,))


def double(model: SequenceModel) -> None:
    with torch.no_grad():
        model.get_parameter("first.weight").mul_(2)


def test_functional_call_reaches_all_uses(model: SequenceModel) -> None:
    by_hand = built(STEPS.replace(", share: first", "").replace(", share: narrow", "").replace(", share: m", ""))
    weights = model.state_dict()
    owners = {"second": "first", "outer": "first", "again": "deep.0.narrow", "narrow": "deep.0.narrow"}

    def owned(name: str) -> Tensor:
        step, _, leaf = name.rpartition(".")
        if name.startswith("n."):
            return weights["m" + name[1:]]
        last = step.rpartition(".")[2]
        return weights[f"{owners.get(last, step)}.{leaf}"]

    expected = functional_call(by_hand, {name: owned(name) for name in by_hand.state_dict()}, (X,))
    torch.testing.assert_close(model(X), expected, rtol=0, atol=0)
    twice = {name: 2 * weight for name, weight in weights.items()}
    expected = functional_call(by_hand, {name: 2 * owned(name) for name in by_hand.state_dict()}, (X,))
    torch.testing.assert_close(functional_call(model, twice, (X,)), expected, rtol=0, atol=0)


def test_loading_preserves_sharing(model: SequenceModel) -> None:
    other, expected = built(STEPS, seed=1), doubled(model)
    double(model)
    for assign in (False, True):
        other.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=assign)
        torch.testing.assert_close(other(X), expected, rtol=0, atol=0)


def test_copies_and_pickles_share_among_themselves(model: SequenceModel) -> None:
    y, expected = model(X), doubled(model)
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(kept, weights_only=False)]
    for each in copies:
        double(each)
        torch.testing.assert_close(each(X), expected, rtol=0, atol=0)
    assert torch.equal(model(X), y)


def test_dtypes_and_devices(model: SequenceModel) -> None:
    assert model.to(torch.float32)(X.float()).dtype == torch.float32
    assert model.bfloat16()(X.bfloat16()).dtype == torch.bfloat16
    assert seqblocks.build_model(model.spec, device="meta")(X.float().to("meta")).device.type == "meta"
    again = seqblocks.build_model(model.spec, device="meta", dtype="float64").to_empty(device="cpu")
    again.reset_parameters(0)
    torch.testing.assert_close(again(X), built(STEPS)(X), rtol=0, atol=0)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_parametrisations_reach_all_uses(model: SequenceModel) -> None:
    expected = doubled(model)
    parametrize.register_parametrization(model.first, "weight", Doubled())
    torch.testing.assert_close(model(X), expected, rtol=0, atol=0)


def test_replaced_parameters_are_used_by_all(model: SequenceModel) -> None:
    """Sharding also replaces parameters by others, of another class."""
    expected = doubled(model)
    weight = nn.Parameter(2 * model.first.weight.detach())
    model.first.register_parameter("weight", weight)
    model.first.__class__ = type("Sharded", (type(model.first),), {})
    torch.testing.assert_close(model(X), expected, rtol=0, atol=0)
    model(X).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("change", ["in place", "replaced", "parametrised", "loaded"])
def test_planned_steps_follow_the_owner(model: SequenceModel, change: str) -> None:
    """Steps without gradients are planned once, with the current parameters."""

    def streamed() -> Tensor:
        state = model.init_state(2)
        found = []
        for t in range(X.shape[1]):
            y, state = model.step(X[:, t], state)
            found.append(y)
        return torch.stack(found, 1)

    with torch.no_grad():
        model.eval()
        torch.testing.assert_close(streamed(), model(X), rtol=1e-12, atol=1e-12)
        weight, expected = 2 * model.first.weight, doubled(model)
        if change == "in place":
            double(model)
        elif change == "replaced":
            model.first.register_parameter("weight", nn.Parameter(weight))
        elif change == "loaded":
            model.load_state_dict({**model.state_dict(), "first.weight": weight}, assign=True)
        else:
            parametrize.register_parametrization(model.first, "weight", Doubled())
        torch.testing.assert_close(streamed(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:FSDP2")
def test_a_sharded_model(model: SequenceModel) -> None:
    """The owner's parameters must be whole while another step uses them: shard the model at once, or leave them whole.
    """
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    expected = model(X)
    expected.sum().backward()
    gradient = model.first.weight.grad
    model.zero_grad()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        parts = copy.deepcopy(model)
        for part in (parts.first, parts.m):
            fully_shard(part, mesh=mesh, reshard_after_forward=False)
        for sharded in (model, parts):
            fully_shard(sharded, mesh=mesh)
            y = sharded(X)
            torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
            y.sum().backward()
            torch.testing.assert_close(sharded.first.weight.grad.full_tensor(), gradient, rtol=1e-12, atol=1e-12)
    finally:
        distributed.destroy_process_group()


def test_between_a_context_and_what_streams() -> None:
    """An encoder of the context and a streaming decoder share one block."""
    text = """
seqblocks: 1
use: [transformer]
model:
  inputs: {text: {features: 4}, memory: {features: 4}}
  steps:
    - swiglu_layer: {from: memory, dim: 4, hidden: 6, name: encoder, as: seen}
    - swiglu_layer: {from: text, dim: 4, hidden: 6, name: decoder, share: encoder}
    - cross_attention_layer: {dim: 4, memory: seen, heads: 2, name: cross}
    - swiglu_layer: {dim: 4, hidden: 6, name: last, share: decoder}
"""
    model = seqblocks.build_text(text, dtype=torch.float64)
    assert not [name for name in model.state_dict() if name.startswith(("decoder", "last"))]
    check_law(model, seq=6, cuts=[2], tolerance=1e-12)
    check_unshared(model, seq=6)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_a_wrapper_around_the_owner_or_a_user(model: SequenceModel) -> None:
    expected = doubled(model)
    double(model)
    model.m, model.n, model.first = Wrapper(model.m), Wrapper(model.n), Wrapper(model.first)
    torch.testing.assert_close(model(X), expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [False, True])
def test_export(model: SequenceModel, strict: bool) -> None:
    exported = torch.export.export(model, (X,), strict=strict).module()
    torch.testing.assert_close(exported(X), model(X), rtol=1e-13, atol=1e-13)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compile(model: SequenceModel) -> None:
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), model(X), rtol=0, atol=0)
    expected = doubled(model)
    double(model)
    torch.testing.assert_close(compiled(X), expected, rtol=0, atol=0)
    compiled(X).sum().backward()
    assert model.first.weight.grad is not None


def test_groups_of_an_optimiser_hold_each_parameter_once(model: SequenceModel) -> None:
    found = [p for group in model.parameter_groups() for p in group["params"]]
    assert len(found) == len({id(p) for p in found}) == len(model.state_dict())


# --- files --------------------------------------------------------------------------------------------------------


def test_a_saved_file_has_one_copy(model: SequenceModel, tmp_path: Path) -> None:
    double(model)
    save(model, tmp_path / "saved")
    again = load(tmp_path / "saved")
    torch.testing.assert_close(again(X), model(X), rtol=0, atol=0)
    assert again.state_dict().keys() == model.state_dict().keys()


OFFICIAL = """seqblocks: 1
model:
  input: {features: 4}
  steps:
    - linear: {features: 4, name: a}
    - linear: {features: 4, name: b, share: a}
    - repeat: {times: 2, share: all, name: layers, steps: [{linear: {features: 4, bias: false}}]}
checkpoint: {a: net.0, b: net.1, "layers.{layer}.linear": "deep.{layer}"}
"""


def official(*names: str) -> dict[str, Tensor]:
    each = {"weight": torch.arange(16.0).reshape(4, 4), "bias": torch.arange(4.0)}
    return {name: each[name.rpartition(".")[2]].clone() for name in names}


ONCE = ("net.0.weight", "net.0.bias", "deep.0.weight")


@pytest.mark.parametrize("more", [(), ("net.1.weight", "net.1.bias", "deep.1.weight"), ("net.1.bias",)])
def test_official_weights_may_have_one_copy_or_several(more: tuple[str, ...]) -> None:
    model = seqblocks.build_text(OFFICIAL)
    load_official(model, official(*ONCE, *more))
    assert torch.equal(model.get_parameter("a.weight"), torch.arange(16.0).reshape(4, 4))


def test_official_weights_of_the_sharing_step_alone() -> None:
    model = seqblocks.build_text(OFFICIAL)
    load_official(model, official("net.1.weight", "net.1.bias", "deep.1.weight"))
    assert torch.equal(model.get_parameter("layers.0.linear.weight"), torch.arange(16.0).reshape(4, 4))


def test_official_weights_with_one_name_for_all_layers() -> None:
    model = seqblocks.build_text(OFFICIAL.replace('"deep.{layer}"', "deep"))
    load_official(model, official("net.0.weight", "net.0.bias", "deep.weight"))
    assert torch.equal(model.get_parameter("layers.0.linear.weight"), torch.arange(16.0).reshape(4, 4))


def test_a_long_chain_is_copied_and_pickled() -> None:
    steps = "".join(f"- linear: {{features: 4, name: n{i}, share: n{i - 1}}}\n" for i in range(1, 600))
    model = built(f"- linear: {{features: 4, name: n0}}\n{steps}")
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(each(X), model(X), rtol=0, atol=0)


def test_official_weights_that_differ() -> None:
    weights = official(*ONCE, "net.1.weight")
    weights["net.1.weight"] += 1
    with pytest.raises(seqblocks.RunError, match=r"b\.weight shares the parameter a\.weight, but the official weights"):
        load_official(seqblocks.build_text(OFFICIAL), weights)


def test_steps_that_run_as_one() -> None:
    """A fused kernel for several steps reads the shared parameters of each."""
    model = built(
        """
- identity: {as: z}
- head_norm: {heads: 2, name: norm}
- learnable_skip: {with: input, name: skip}
- gate: {by: z, as: g}
- head_norm: {heads: 2, name: norm_2, share: norm}
- learnable_skip: {with: z, name: skip_2, share: skip}
- gate: {by: g, name: gate_2}
"""
    )
    assert [len(each.nodes) for each in fusion.find(model.graph, model.spec.types).values()] == [3, 3]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    assert set(model.state_dict()) == {"norm.weight", "skip.weight"}
    check_unshared(model, seq=5)


# --- directions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", ["none", "all", "[p]"])
def test_inside_a_scan_of_two_orders(own: str) -> None:
    """A step shares parameters with the step of its own direction, or with one outside."""
    model = built(
        f"""
- linear: {{features: 4, name: out}}
- scan:
    order: [forward, reverse]
    own: {own}
    steps:
      - linear: {{features: 4, name: p}}
      - causal_conv: {{kernel: 3, name: c}}
      - linear: {{features: 4, name: q, share: p}}
      - causal_conv: {{kernel: 3, name: d, share: c}}
      - linear: {{features: 4, name: o, share: out}}
"""
    )
    w = model.state_dict()
    assert len(w) == {"none": 6, "all": 10, "[p]": 8}[own]

    def conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        padded = nn.functional.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
        return nn.functional.conv1d(padded, weight.reshape(4, 1, -1), bias, groups=4).transpose(1, 2)

    def step(name: str, direction: str) -> tuple[Tensor, Tensor]:
        path = f"scan.{direction}.{name}" if own == "all" or own == f"[{name}]" else f"scan.{name}"
        return w[f"{path}.weight"], w[f"{path}.bias"]

    def one(x: Tensor, direction: str) -> Tensor:
        for _ in range(2):
            x = conv(linear(x, *step("p", direction)), *step("c", direction))
        return linear(x, w["out.weight"], w["out.bias"])

    x = linear(X, w["out.weight"], w["out.bias"])
    torch.testing.assert_close(model(X), one(x, "fwd") + one(x.flip(1), "rev").flip(1), rtol=1e-12, atol=1e-12)
    check_unshared(model, seq=7)


@pytest.mark.parametrize("own", ["none", "all", "[p]"])
def test_a_scan_that_shares_with_another(own: str) -> None:
    inside = "steps: [{linear: {features: 4, name: p}}, {causal_conv: {kernel: 3}}]"
    scan = f"- scan: {{order: [forward, reverse], own: {own}, name: NAME, {inside}}}\n"
    model = built(scan.replace("NAME", "a") + scan.replace("NAME", "b, share: a"))
    alone = built(scan.replace("NAME", "a"))
    assert model.state_dict().keys() == alone.state_dict().keys()
    torch.testing.assert_close(model(X), alone(alone(X)), rtol=0, atol=0)
    check_unshared(model, seq=7)


@pytest.mark.parametrize(
    "steps",
    [
        "- experts: {EXPERTS, name: a}\n- experts: {EXPERTS, share: a}",
        "- repeat: {times: 3, share: all, steps: [{residual: [{experts: {EXPERTS}}]}]}",
        "- repeat: {times: 3, share: [experts.1, experts.router], steps: [{experts: {EXPERTS}}]}",
    ],
)
def test_experts_that_are_shared(steps: str) -> None:
    model = built(steps.replace("EXPERTS", "count: 3, top: 2, steps: [{swiglu: {hidden: 3}}]"))
    check_unshared(model, seq=7)
    check_law(model, seq=7, cuts=[3], tolerance=1e-12)
    found = seqblocks.summarise(model)
    assert found.params == sum(p.numel() for p in model.parameters())
