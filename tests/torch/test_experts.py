"""experts: values and gradients against a loop over all experts and tokens, the losses, and execution."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seqblocks
from seqblocks import graph
from seqblocks.analysis.checkpoint_maps.translation import official_name
from seqblocks.checkpoint import load_official
from seqblocks.descriptions.summary import summarise
from seqblocks.errors import RunError
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.call import Call
from seqblocks.testing import check_law

ROUTES = [
    "count: 5, top: 2",
    "count: 5, top: 2, normalize: false",
    "count: 4, top: 1",
    "count: 3, top: 3",
    "count: 1, top: 1, score: sigmoid",
    "count: 6, top: 3, score: sigmoid",
    "count: 6, top: 1, score: sigmoid",
    "count: 6, top: 2, score: sigmoid, eps: 0.25",
    "count: 6, top: 2, score: sigmoid, corrected: true",
    "count: 5, top: 2, corrected: true",
    "count: 4, top: 2, bias: true",
    "count: 6, top: 3, groups: 3, top_groups: 2",
    "count: 8, top: 3, groups: 2, score: sigmoid, corrected: true",
    "count: 4, top: 2, groups: 4, top_groups: 2, score: sigmoid, corrected: true",
    "count: 5, top: 2, capacity: 0.8",
    "count: 3, top: 1, capacity: 0.5, factor: 2.5",
    "count: 6, top: 3, score: sigmoid, capacity: 1.25, shared: [{linear: {features: 6, name: all}}]",
]
STEPS = "[{linear: {features: 7, name: up}}, silu, {linear: {features: 6, name: down}}]"


def build(route: str, dtype: Any = torch.float64, steps: str = STEPS, head: str = "{features: 4}") -> SequenceModel:
    text = f"seqblocks: 1\nmodel: {{input: {head}, steps: [{{experts: {{{route}, steps: {steps}}}}}]}}\n"
    model = seqblocks.build_text(text, dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(("correction", "router.bias")):
            nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
    return model


def in_groups(ranked: list[float], arguments: Any) -> list[int]:
    """Return the experts of a token's best groups."""
    size = arguments.count // arguments.groups
    groups = [range(at * size, at * size + size) for at in range(arguments.groups)]
    few = 2 if arguments.corrected else 1
    best = sorted(groups, key=lambda group: -sum(sorted((ranked[each] for each in group), reverse=True)[:few]))
    return [each for group in best[: arguments.top_groups] for each in group]


def choice(model: SequenceModel, token: Tensor, arguments: Any) -> list[int]:
    """Return the experts of a token, the best one first."""
    weights = dict(model.named_parameters())
    logits = weights["experts.router.weight"] @ token + weights.get("experts.router.bias", 0)
    scores = logits.softmax(0) if arguments.score == "softmax" else logits.sigmoid()
    ranked = (scores + weights.get("experts.router.correction", 0)).tolist()
    return sorted(in_groups(ranked, arguments), key=lambda each: -ranked[each])[: arguments.top]


def by_loops(model: SequenceModel, x: Tensor, arguments: Any) -> Tensor:
    """Apply every expert to every token, by the definition."""
    top, score, normalize = arguments.top, arguments.score, arguments.normalizes
    weights = dict(model.named_parameters())
    rows, tokens = [], x.flatten(0, -2)
    choices = [choice(model, token, arguments) for token in tokens]
    limit = arguments.capacity if model.training and arguments.capacity else math.inf
    most = limit if limit == math.inf else math.ceil(limit * len(tokens) * top / arguments.count)
    room, kept = dict.fromkeys(range(arguments.count), most), set()
    for rank in range(top):  # first choices before second ones
        for at, chosen in enumerate(choices):
            if room[chosen[rank]] > 0:
                room[chosen[rank]] -= 1
                kept.add((at, chosen[rank]))
    for at, token in enumerate(tokens):
        logits = weights["experts.router.weight"] @ token + weights.get("experts.router.bias", 0)
        scores = logits.softmax(0) if score == "softmax" else logits.sigmoid()
        chosen = choices[at]
        total = sum(scores[each] for each in chosen) if normalize else 1.0
        made: Any = 0
        for each in range(len(scores)):
            hidden = weights[f"experts.{each}.up.weight"] @ token + weights[f"experts.{each}.up.bias"]
            hidden = nn.functional.silu(hidden)
            y = weights[f"experts.{each}.down.weight"] @ hidden + weights[f"experts.{each}.down.bias"]
            weight = arguments.factor * scores[each] / (total + arguments.eps * normalize)
            made = made + (weight * y if (at, each) in kept else 0 * y)
        if "experts.shared.all.weight" in weights:
            made = made + weights["experts.shared.all.weight"] @ token + weights["experts.shared.all.bias"]
        rows.append(made)
    return torch.stack(rows).unflatten(0, x.shape[:-1])


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def test_a_router_with_a_correction_may_be_wrapped_but_not_replaced() -> None:
    model, x = build("count: 5, top: 2, corrected: true").eval(), torch.ones(1, 3, 4, dtype=torch.float64)
    expected = model(x)
    model.experts.router = Wrapper(model.experts.router)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    model.experts.router = nn.Linear(4, 5).double()
    with pytest.raises(RunError, match=r"experts.router: the Linear that replaces it has no correction of the scores"):
        model(x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("route", ROUTES)
def test_values_and_gradients(route: str, training: bool) -> None:
    model = build(route).train(training)
    arguments = model.graph.nodes[0].arguments
    x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    leaves = [x, *model.parameters()]
    y, expected = model(x), by_loops(model, x, arguments)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-14)
    weights = torch.randn_like(y)
    found = torch.autograd.grad((y * weights).sum(), leaves)  # of experts without tokens too
    expected_gradients = torch.autograd.grad((expected * weights).sum(), leaves, allow_unused=arguments.corrected)
    for mine, theirs, leaf in zip(found, expected_gradients, leaves, strict=True):
        theirs = torch.zeros_like(leaf) if theirs is None else theirs  # of the correction
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("route", ROUTES)
def test_the_law(route: str) -> None:
    check_law(build(route).eval())  # there is no capacity in evaluation mode


def test_a_full_expert_drops_tokens_in_training_only() -> None:
    """All tokens prefer expert 0, of 2, which computes half of them: the first ones of the batch."""
    limited = build("count: 2, top: 1, capacity: 1")
    free = build("count: 2, top: 1")
    free.load_state_dict(limited.state_dict())
    for model in (limited, free):
        nn.init.zeros_(model.experts.router.weight)  # of equal scores, the first expert is taken
    x = torch.randn(2, 4, 4, dtype=torch.float64)
    found, expected = limited(x), free(x)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-14)
    assert not found[1].any()
    assert expected[1].any()
    assert limited.auxiliary_losses() == free.auxiliary_losses()  # of the choices, before the limit
    torch.testing.assert_close(limited.eval()(x), free.eval()(x), rtol=1e-12, atol=1e-14)


def test_shared_steps_are_those_of_a_branch_beside_the_experts() -> None:
    """They read wires around them, stream by a planned step, and count for each token."""
    around = "{linear: {features: 5, name: up}}, {linear: {features: 4, name: down}}, {add: {with: v}}"
    first = f"{{linear: {{features: 4, as: v}}}}, {{experts: {{count: 4, top: 2, steps: [silu], shared: [{around}]}}}}"
    text = f"seqblocks: 1\nmodel: {{input: {{features: 4}}, steps: [{first}]}}\n"
    model = seqblocks.build_text(text, dtype=torch.float64).eval()
    check_law(model)
    branches = f"branches: [{{sent: [{{experts: {{count: 4, top: 2, steps: [silu]}}}}]}}, {{all: [{around}]}}]"
    steps = f"[{{linear: {{features: 4, as: v}}}}, parallel: {{{branches}}}]"
    plain = f"seqblocks: 1\nmodel: {{input: {{features: 4}}, steps: {steps}}}\n"
    other = seqblocks.build_text(plain, dtype=torch.float64).eval()
    names = [name.replace("experts.shared", "parallel.all") for name in model.state_dict()]
    names = [name.replace("experts.", "parallel.sent.experts.") for name in names]
    other.load_state_dict(dict(zip(names, model.state_dict().values(), strict=True)))
    x = torch.randn(2, 7, 4, dtype=torch.float64)
    torch.testing.assert_close(model(x), other(x), rtol=1e-12, atol=1e-14)
    mine, theirs = summarise(model), summarise(other)
    assert (mine.params, mine.active_params) == (theirs.params, theirs.active_params)
    assert mine.macs_per_token == theirs.macs_per_token
    assert [row.names for row in mine.rows[1].rows] == [["router"], ["0", "1", "2", "3"], ["shared"]]


def test_groups_of_deepseek_v3() -> None:
    """The experts and weights of a token are those of transformers' router."""
    module = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    route = "count: 12, top: 4, groups: 4, top_groups: 2, score: sigmoid, corrected: true, bias: false"
    model = build(route, torch.float32)
    config = module.DeepseekV3Config(
        hidden_size=4, n_routed_experts=12, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=1.0,
    )  # fmt: skip
    router = module.DeepseekV3TopkRouter(config)
    router.weight.data.copy_(model.experts.router.weight.data)
    router.e_score_correction_bias.copy_(model.experts.router.correction.data)
    x = torch.randn(50, 4)
    _, expected, theirs = router(x)
    model(x[None])
    _, weights, chosen = model.experts.route(x @ model.experts.router.weight.T, Call(False))
    found = torch.zeros(50, 12).scatter(1, chosen, weights)
    torch.testing.assert_close(found, torch.zeros(50, 12).scatter(1, theirs, expected), rtol=1e-5, atol=1e-6)


def test_groups_of_deepseek_v2() -> None:
    module = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")
    model = build("count: 12, top: 4, groups: 4, top_groups: 2, normalize: false", torch.float32)
    config = module.DeepseekV2Config(
        hidden_size=4, n_routed_experts=12, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=1.0,
        topk_method="group_limited_greedy", num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    router = module.DeepseekV2TopkRouter(config)
    router.weight.data.copy_(model.experts.router.weight.data)
    x = torch.randn(50, 4)
    _, expected, theirs = router(x)
    _, weights, chosen = model.experts.route(x @ model.experts.router.weight.T, Call(False))
    found = torch.zeros(50, 12).scatter(1, chosen, weights)
    torch.testing.assert_close(found, torch.zeros(50, 12).scatter(1, theirs, expected), rtol=1e-5, atol=1e-6)


def test_experts_of_gpt_oss() -> None:
    """A bias of the router, and networks with clamped factors: the same as transformers with the same weights."""
    module = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    network = "[{swiglu: {hidden: 5, bias: true, limit: 0.7, slope: 1.702, offset: 1}}]"
    model = build("count: 3, top: 2, bias: true", torch.float32, network)
    config = module.GptOssConfig(
        hidden_size=4, intermediate_size=5, num_local_experts=3, num_experts_per_tok=2, swiglu_limit=0.7,
    )  # fmt: skip
    config._experts_implementation = "eager"
    theirs = module.GptOssMLP(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        theirs.router.weight.copy_(model.experts.router.weight)
        theirs.router.bias.copy_(model.experts.router.bias)
        for at in range(3):
            own = model.get_submodule(f"experts.{at}.swiglu")
            both = [(own.gate_weight.T, own.up_weight.T), (own.gate_bias, own.up_bias)]
            weight, bias = (torch.stack(pair, -1).flatten(-2) for pair in both)
            theirs.experts.gate_up_proj[at], theirs.experts.gate_up_proj_bias[at] = weight, bias
            theirs.experts.down_proj[at], theirs.experts.down_proj_bias[at] = own.down_weight.T, own.down_bias
        x = torch.randn(2, 7, 4)
        expected = theirs(x)
    torch.testing.assert_close(model(x), expected[0] if isinstance(expected, tuple) else expected)


def test_the_law_in_a_stack_with_state() -> None:
    text = """
seqblocks: 1
use: [prenorm, xlstm]
model:
  input: {features: 8}
  steps:
    - repeat:
        times: 2
        steps:
          - prenorm: {mixer: [{mlstm_layer: {dim: 8, heads: 2}}], name: mix}
          - prenorm: {mixer: [{experts: {count: 4, steps: [{swiglu: 12}]}}], name: ffn}
"""
    check_law(seqblocks.build_text(text, dtype=torch.float64))


def test_wires_from_outside_are_sent_along() -> None:
    steps = "[{linear: {features: 4, as: v}}, {multiply: {by: w}}]"
    text = f"""
seqblocks: 1
model:
  input: {{features: 4}}
  steps: [{{linear: {{features: 4, as: w}}}}, {{experts: {{from: input, count: 3, top: 1, steps: {steps}}}}}]
"""
    model = seqblocks.build_text(text, dtype=torch.float64)
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    weights, w = dict(model.named_parameters()), model.w(x)
    scores, chosen = (x @ weights["experts.router.weight"].T).softmax(-1).max(-1)
    maps = torch.stack([weights[f"experts.{each}.v.weight"] for each in range(3)])
    biases = torch.stack([weights[f"experts.{each}.v.bias"] for each in range(3)])
    expected = (torch.einsum("bsoi,bsi->bso", maps[chosen], x) + biases[chosen]) * w * scores.unsqueeze(-1)
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-14)


def test_vectors_and_few_tokens() -> None:
    model = build("count: 3", head="{features: 4, length: 5}").eval()
    assert model(torch.randn(0, 5, 4, dtype=torch.float64)).shape == (0, 5, 6)
    assert model.train()(torch.randn(0, 5, 4, dtype=torch.float64)).shape == (0, 5, 6)
    text = """
seqblocks: 1
model: {input: {features: 4}, steps: [{pool: {mode: last}}, {experts: {count: 3, steps: [{linear: 6}]}}]}
"""
    model = seqblocks.build_text(text, dtype=torch.float64)
    assert model(torch.randn(2, 5, 4, dtype=torch.float64)).shape == (2, 6)
    check_law(model)


def test_experts_in_experts_and_in_both_directions() -> None:
    inner = "[{experts: {count: 2, steps: [{linear: 4}]}}]"
    model = build("count: 3, top: 1", steps=inner)
    check_law(model)
    model.train()(torch.randn(1, 1, 4, dtype=torch.float64)).sum().backward()
    losses = model.auxiliary_losses()
    assert {*losses} == {"experts", *(f"experts.{each}.experts" for each in range(3))}
    assert all(loss.isfinite() for loss in losses.values())
    for own in ("all", "[experts.router.weight]", "[experts.1]", "none"):
        steps = "[{experts: {count: 3, steps: [{linear: 4}]}}]"
        scan = f"scan: {{order: [forward, reverse], own: {own}, steps: {steps}}}"
        text = f"seqblocks: 1\nmodel: {{input: {{features: 4}}, steps: [{scan}]}}\n"
        both = seqblocks.build_text(text, dtype=torch.float64)
        both(torch.randn(2, 5, 4, dtype=torch.float64)).sum().backward()
        assert all(p.grad is not None for p in both.parameters())
        assert sum(p.numel() for p in both.parameters()) == graph.count(both.graph)


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", [route for route in ROUTES if "groups" not in route and "bias" not in route])
def test_the_losses(route: str) -> None:
    model = build(route)
    arguments = model.graph.nodes[0].arguments
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    model(x)
    logits = x.flatten(0, 1) @ model.get_parameter("experts.router.weight").T
    scores = logits.softmax(-1) if arguments.score == "softmax" else logits.sigmoid()
    shares, count = scores / scores.sum(-1, keepdim=True), arguments.count
    chosen = (scores + dict(model.named_parameters()).get("experts.router.correction", 0)).topk(arguments.top).indices
    used = [(chosen == each).sum() / chosen.numel() for each in range(count)]
    balance = count * sum(used[each] * shares[:, each].mean() for each in range(count))
    torch.testing.assert_close(model.auxiliary_losses(), {"experts": balance})
    z = sum(logit.exp().sum().log() ** 2 for logit in logits) / len(logits)
    torch.testing.assert_close(model.auxiliary_losses("router_z"), {"experts": z})


def test_losses_are_those_of_the_latest_call() -> None:
    model = build("count: 4")
    with pytest.raises(seqblocks.RunError, match=r"model\.train\(\)"):
        model.auxiliary_losses()
    x, other = torch.randn(2, 2, 5, 4, dtype=torch.float64)
    model(x)
    first = model.auxiliary_losses()["experts"]
    model(other)
    second = model.auxiliary_losses()["experts"]
    assert first != second
    (gradient,) = torch.autograd.grad(second, [model.get_parameter("experts.router.weight")])
    assert gradient.abs().sum() > 0
    model.eval()(x)
    with pytest.raises(seqblocks.RunError):
        model.auxiliary_losses()
    model.train()(x)
    with torch.no_grad():
        model.eval().step(x[:, 0])
    with pytest.raises(seqblocks.RunError):
        model.auxiliary_losses()
    with pytest.raises(seqblocks.UsageError, match="balance"):
        model.auxiliary_losses("balanced")
    assert seqblocks.build("mlstm_small").auxiliary_losses() == {}


def test_the_loss_ranges_from_1_to_the_number_of_experts() -> None:
    model = build("count: 4, top: 1")
    with torch.no_grad():
        model.get_parameter("experts.router.weight").copy_(40 * torch.eye(4))
    model(torch.eye(4, dtype=torch.float64)[None])
    assert model.auxiliary_losses()["experts"].item() == pytest.approx(1)
    model(torch.eye(4, dtype=torch.float64)[None, :1].expand(1, 4, 4))
    assert model.auxiliary_losses()["experts"].item() == pytest.approx(4)


# --- execution -----------------------------------------------------------------------------------------------------


def test_experts_compute_only_their_tokens() -> None:
    model = build("count: 4, top: 1").eval()
    seen = []
    for each in range(4):
        module = model.get_submodule(f"experts.{each}")
        module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    model(torch.randn(2, 9, 4, dtype=torch.float64))
    assert sum(seen) == 18


def test_copies_and_pickles_omit_the_latest_call() -> None:
    model = build("count: 4")
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    y = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), y, rtol=0, atol=0)


def test_the_router_is_float32_in_half_precision() -> None:
    model = build("count: 4, normalize: false", dtype=torch.float32)
    x = torch.randn(2, 5, 4)
    expected = model(x)
    logits = []
    model.get_submodule("experts.router").register_forward_hook(lambda _, __, out: logits.append(out))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    assert logits[0].dtype == torch.float32
    torch.testing.assert_close(logits[0], x @ model.get_parameter("experts.router.weight").T)
    torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.02)
    assert build("count: 4", dtype=torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


def test_export_and_the_meta_device() -> None:
    model = build("count: 4").eval()
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    exported = torch.export.export(model, (x,), strict=False).module()
    for _ in range(3):
        torch.testing.assert_close(exported(x), model(x))
        x = torch.randn(2, 5, 4, dtype=torch.float64)
    text = "seqblocks: 1\nmodel: {input: {features: 4}, steps: [{experts: {count: 3, steps: [{linear: 6}]}}]}\n"
    assert seqblocks.build_text(text, device="meta")(torch.empty(2, 5, 4, device="meta")).shape == (2, 5, 6)


@torch._dynamo.config.patch(capture_scalar_outputs=True)  # reverts the change of configuration
def test_transforms_of_torch_func() -> None:
    """vmap cannot read how many tokens an expert has, so each expert computes all of them."""
    model = build("count: 5, top: 2").eval()
    x = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights: dict[str, Tensor], one: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(model, weights, (one.unsqueeze(0),))
        return found.square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    for at, one in enumerate(x):
        (model(one.unsqueeze(0)).square().sum()).backward()
        for name, parameter in model.named_parameters():
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(each[name][at], found, rtol=1e-9, atol=1e-12)
            parameter.grad = None


def test_it_compiles_to_one_graph_where_sizes_may_depend_on_values() -> None:
    model = build("count: 4")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(compiled(x), model(x))
    (compiled(x).sum() + sum(model.auxiliary_losses().values())).backward()
    assert all(p.grad is not None for p in model.parameters())


# --- counts -----------------------------------------------------------------------------------------------------------


def test_active_parameters_and_costs() -> None:
    model = build("count: 5, top: 2")
    found = summarise(model)
    expert = 7 * 5 + 6 * 8
    assert (found.params, found.active_params) == (20 + 5 * expert, 20 + 2 * expert)
    assert found.macs_per_token == 20 + 2 * (7 * 4 + 6 * 7)
    assert found.rows[0].rows[1].names == [str(each) for each in range(5)]
    assert found.as_data()["active_params"] == found.active_params


# --- with other parts of the language ---------------------------------------------------------------------------------

CONTEXT = """
seqblocks: 1
use: [prenorm, transformer]
let: {dim: 8}
blocks:
  encoder:
    args: {mixer: steps}
    steps: [prenorm: [mixer], {prenorm: {mixer: [{experts: {count: 3, steps: [{swiglu: 12}]}}], name: network}}]
  gated: {args: {mixer: steps, by: wire}, steps: [mixer, {gate: {by: by}}]}
model:
  inputs: {x: {features: 8}, other: {features: 8, length: 6}}
  steps:
    - encoder: {from: other, mixer: [{attention_layer: {dim: dim, heads: 2}}], as: memory}
    - pool: {from: memory, mode: mean, as: seen}
    - experts: {from: x, count: 4, steps: [{linear: {features: 8, as: v}}, {multiply: {by: v}}], as: h}
    - multiply: {by: seen}
    - gated: {mixer: [causal_conv, {experts: {count: 2, top: 1, steps: [{linear: 8}]}}], by: h, as: out}
  outputs: [out]
"""

MIXTRAL = """
seqblocks: 1
use: [prenorm]
blocks:
  moe:
    args: {expert: steps, count: 4}
    steps: [{experts: {count: count, steps: [expert]}}]
    checkpoint:
      experts.router: gate
      experts.{expert}.expert.swiglu.gate_weight: experts.{expert}.w1.weight
      experts.{expert}.expert.swiglu.down_weight: experts.{expert}.w2.weight
      experts.{expert}.expert.swiglu.up_weight: experts.{expert}.w3.weight
model:
  input: {features: 8}
  steps:
    - repeat: {name: layers, times: 2, steps: [prenorm: [{moe: {expert: [{swiglu: 12}], name: moe}}]]}
checkpoint:
  layers.{layer}.prenorm.residual.norm.rms_norm: model.layers.{layer}.post_attention_layernorm
  layers.{layer}.prenorm.residual.mixer.moe: model.layers.{layer}.block_sparse_moe
"""


def test_the_law_with_context_in_which_there_are_experts_too() -> None:
    model = seqblocks.build_text(CONTEXT, dtype=torch.float64)
    check_law(model)
    model.train()(x=torch.randn(2, 5, 8, dtype=torch.float64), other=torch.randn(2, 6, 8, dtype=torch.float64))
    assert {*model.auxiliary_losses()} == {"memory.network.residual.mixer.experts", "h", "out.mixer.experts"}


def test_names_of_an_official_release() -> None:
    model, other = seqblocks.build_text(MIXTRAL), seqblocks.build_text(MIXTRAL, seed=1)
    official = {official_name(model.spec, name): weight for name, weight in model.state_dict().items()}
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in official
    assert "model.layers.0.block_sparse_moe.gate.weight" in official
    load_official(other, official)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    model = build("count: 4", steps="[{linear: 4}]")
    x = torch.randn(2, 5, 4, dtype=torch.float64)

    def gradients() -> list[Tensor]:
        loss = model(x).square().sum() + sum(model.auxiliary_losses().values())
        return list(torch.autograd.grad(loss, list(model.parameters())))

    expected = gradients()
    step, own = model.get_submodule("experts"), model.get_submodule("experts").forward
    step.forward = lambda *x, **more: checkpoint(own, *x, use_reentrant=False, **more)
    torch.testing.assert_close(gradients(), expected, rtol=0, atol=0)


def test_shared_experts_share_their_corrections() -> None:
    text = """
seqblocks: 1
model:
  input: {features: 4}
  steps:
    - experts: {count: 4, top: 1, corrected: true, steps: [{linear: 4}], name: a}
    - experts: {count: 4, top: 1, corrected: true, steps: [{linear: 4}], name: b, share: a}
"""
    model = seqblocks.build_text(text, dtype=torch.float64)
    assert [name for name, _ in model.named_parameters() if "correction" in name] == ["a.router.correction"]
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    with torch.no_grad():
        model.a.router.correction.copy_(torch.tensor([-9.0, -9.0, 9.0, -9.0]))  # so that the third one is chosen
        expected, weights = x, dict(model.named_parameters())
        for _ in range(2):
            share = (expected @ weights["a.router.weight"].T).softmax(-1)[..., 2:3]
            expected = share * (expected @ weights["a.2.linear.weight"].T + weights["a.2.linear.bias"])
        torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-14)
