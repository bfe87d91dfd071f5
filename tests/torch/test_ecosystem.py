"""What tools of the ecosystem take for granted of an ordinary module. `docs/ecosystem.md` lists the results.

The tools are those of the extra `ecosystem`; a test of one that is not installed is skipped.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import seqblocks
from seqblocks import graph
from seqblocks.runtime.torch_modules import (
    CLASSES,
    BatchNorm2d,
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    Embedding,
    Linear,
    MaxPool2d,
    Upsample,
)

TEXT = """
seqblocks: 1
use: [mamba, xlstm]
let: {dim: 32}
model:
  input: {tokens: 64}
  steps:
    - embed: {features: dim}
    - repeat:
        name: layers
        times: 2
        steps: [{mamba_block: {dim: dim}}, {mlstm_block: {dim: dim, heads: 2}}, {residual: [rms_norm, {swiglu: 64}]}]
    - dropout: {p: 0.1}
    - layer_norm: {bias: false}
    - unembed: {bias: false}
"""
IDS = torch.randint(0, 64, (2, 11), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> seqblocks.SequenceModel:
    return seqblocks.build_text(TEXT, seed=0).eval()


def linears(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def steps_agree(model: Any, rtol: float = 1e-4) -> None:
    """Assert that a stream gives the results of a pass over the whole sequence."""
    with torch.no_grad():
        whole, state, found = model(IDS), None, []
        for token in IDS.unbind(1):
            y, state = model.step(token, state)
            found.append(y)
    torch.testing.assert_close(torch.stack(found, 1), whole, rtol=rtol, atol=rtol * whole.abs().max().item())


# ------------------------------------------------------------------------------------------------ torch itself


def test_steps_are_torchs_modules(model: seqblocks.SequenceModel) -> None:
    def found(kind: type[nn.Module]) -> int:
        return sum(isinstance(each, kind) for each in model.modules())

    ops = [node.op for node in graph.walk(model.graph) if node.op]
    maps = sum(op.verb in ("linear", "proj_up", "proj_down", "unembed") for op in ops)
    assert found(nn.Linear) == sum(type(each) is nn.Linear for each in model.modules()) == maps > 10
    for kind, verb in (
        (nn.Embedding, "embed"), (nn.LayerNorm, "layer_norm"), (nn.RMSNorm, "rms_norm"), (nn.Dropout, "dropout"),
        (nn.SiLU, "silu"), (nn.Conv1d, "causal_conv"),
    ):  # fmt: skip
        assert found(kind) == sum(op.verb == verb for op in ops if op.verb != "causal_conv" or op.activation == "none")


def test_attributes_are_those_of_torchs_classes() -> None:
    model = seqblocks.build_text(
        "{seqblocks: 1, model: {input: {features: 8}, steps: [linear: {features: 6}, proj_up: {features: 8}, "
        "conv1d: {features: 4, kernel: 3, dilation: 2, groups: 2}, layer_norm, rms_norm, leaky_relu: {slope: 0.2}, "
        "dropout: {p: 0.3}, causal_conv: {kernel: 3}, gelu_tanh, elu, softplus]}}"
    )
    assert (model.linear.in_features, model.linear.out_features) == (8, 6)
    assert model.proj_up.bias is None
    conv: Any = nn.Conv1d(8, 4, 3, dilation=2, groups=2)
    for name in nn.Conv1d.__constants__:
        if name != "output_padding":
            assert getattr(model.conv1d, name) == getattr(conv, name), name
    assert (model.causal_conv.groups, model.causal_conv.in_channels) == (4, 4)
    for own, torchs in (
        (model.layer_norm, nn.LayerNorm(4)), (model.rms_norm, nn.RMSNorm(4, eps=1e-6)), (model.elu, nn.ELU()),
        (model.leaky_relu, nn.LeakyReLU(0.2)), (model.gelu_tanh, nn.GELU("tanh")), (model.softplus, nn.Softplus()),
        (model.dropout, nn.Dropout(0.3)),
    ):  # fmt: skip
        for name in getattr(type(torchs), "__constants__", ()):
            assert getattr(own, name) == getattr(torchs, name), (own, name)
        x = torch.randn(2, 3, 4)
        torch.testing.assert_close(own.eval()(x), torchs.eval()(x))


# Torch's modules have the features on the second axis.
OTHER_AXES = {Conv1d, Conv2d, ConvTranspose2d, MaxPool2d, BatchNorm2d, Upsample}


@pytest.mark.parametrize("kind", sorted({*CLASSES.values()} - {Linear, *OTHER_AXES}, key=lambda kind: kind.__name__))
def test_a_step_computes_what_torchs_module_computes(kind: type[nn.Module], model: seqblocks.SequenceModel) -> None:
    """Torch's own `forward` gives the same result, with the attributes and parameters of the step."""
    steps = "linear: {features: 8}, silu, gelu, gelu_tanh, relu, leaky_relu, elu, selu, sigmoid, tanh, softplus"
    text = f"{{seqblocks: 1, model: {{input: {{features: 8}}, steps: [{steps}, dropout, layer_norm, rms_norm]}}}}"
    others = seqblocks.build_text(text, seed=1).eval()
    own = next(each for each in (*others.modules(), *model.modules()) if type(each) is kind)
    torchs = next(each for each in kind.__mro__ if each.__module__.startswith("torch.nn.modules"))
    x = IDS if kind is Embedding else torch.randn(2, 5, 8)
    torch.testing.assert_close(own(x), torchs.forward(own, x))


def test_dropout_can_be_set(model: seqblocks.SequenceModel) -> None:
    model.train()
    assert not torch.equal(model(IDS), model(IDS))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert torch.equal(model(IDS), model(IDS))


def test_apply_and_reset_parameters(model: seqblocks.SequenceModel) -> None:
    before = {name: p.clone() for name, p in model.named_parameters()}

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    model.apply(init)
    for name in linears(model):
        assert 0.01 < model.get_parameter(f"{name}.weight").std() < 0.03
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.RMSNorm):
            with torch.no_grad():
                module.weight.fill_(3.0)
            module.reset_parameters()
    for name, p in model.named_parameters():
        own = model.get_submodule(name.rpartition(".")[0])
        if isinstance(own, nn.Linear):  # torch's initial values
            assert p.std() > 1e-3, name
            assert p.abs().max() <= own.in_features**-0.5, name
        else:
            assert torch.equal(p, before[name]), name
    model.reset_parameters(seed=0)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, parametrizations.weight_norm])
def test_spectral_and_weight_norm(model: seqblocks.SequenceModel, norm: Any) -> None:
    expected = model(IDS)
    names = [name for name in linears(model) if model.get_submodule(name).weight.any()]  # torch divides by the norm
    for name in names:
        norm(model.get_submodule(name))
    found = model(IDS)
    if norm is parametrizations.weight_norm:
        torch.testing.assert_close(found, expected)
    else:
        with torch.no_grad():
            top = torch.linalg.matrix_norm(model.get_submodule(names[0]).weight, 2)
        assert 0.8 < top < 1.2  # one power iteration
    steps_agree(model)


@pytest.mark.parametrize("tokens", [4, 7])
def test_the_module_swap_of_sync_batch_norm(tokens: int) -> None:
    """torch's class has the features second: with as many tokens as features, it would normalise tokens instead."""
    model = seqblocks.build_text("seqblocks: 1\nmodel:\n  input: {features: 4}\n  steps: [batch_norm, {linear: 3}]\n")
    model.batch_norm.running_mean.copy_(torch.arange(4.0))
    model.batch_norm.running_var.copy_(1 + torch.arange(4.0))
    x = torch.randn(2, tokens, 4, generator=torch.Generator().manual_seed(0))
    expected = model.eval()(x)
    swapped = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    assert type(swapped.batch_norm) is nn.SyncBatchNorm
    torch.testing.assert_close(swapped(x), expected)


def test_torchs_flop_counter(model: seqblocks.SequenceModel) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(IDS)
    by_module = counter.get_flop_counts()
    nodes = nodes_of(model)
    for name in linears(model):
        found = sum(by_module.get(f"SequenceModel.{name}", {}).values())
        assert found == 2 * nodes[name].macs * IDS.numel(), name


def nodes_of(model: seqblocks.SequenceModel) -> dict[str, graph.Node]:
    """Return the node of each step by its name; layers that are alike share one."""
    nodes = {id(node.op): node for node in graph.walk(model.graph)}
    return {name: nodes[id(module.op)] for name, module in model.named_modules() if hasattr(module, "op")}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # as deprecated as the function that is tested
def test_dynamic_quantisation_of_torch_ao(model: seqblocks.SequenceModel) -> None:
    """The result equals a model with the dequantised weights, whose inputs are rounded by torch's own function."""
    with pytest.warns(DeprecationWarning, match="torchao"):
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert not [name for name in linears(model) if type(quantised.get_submodule(name)) is nn.Linear]

    def rounded(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        return torch.quantize_per_tensor_dynamic(*inputs, torch.quint8, reduce_range=True).dequantize()

    before = model(IDS)
    for name in linears(model):
        linear, weight = model.get_submodule(name), quantised.get_submodule(name).weight()
        linear.weight.data.copy_(weight.dequantize())
        linear.register_forward_pre_hook(rounded)
    found, state, other = quantised(IDS), None, None
    torch.testing.assert_close(found, model(IDS), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, before, rtol=0, atol=1e-3)
    for token in IDS.unbind(1):  # each tensor has one scale, so a stream is rounded in another way than a sequence
        y, state = quantised.step(token, state)
        expected, other = model.step(token, other)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_symbolic_trace_fails_and_export_works(model: seqblocks.SequenceModel) -> None:
    with pytest.raises(torch.fx.proxy.TraceError, match="control flow"):
        torch.fx.symbolic_trace(model)
    exported = torch.export.export(model, (IDS,)).module()
    torch.testing.assert_close(exported(IDS), model(IDS))


def test_a_linear_map_whose_forward_is_replaced(model: seqblocks.SequenceModel) -> None:
    """Torch's class does not report an assignment to `forward`, and a stream has to notice it."""
    whole = model(IDS)
    steps_agree(model)
    linear = next(each for name, each in model.layers[1].named_modules() if name.endswith(".in_proj"))
    torchs = linear.forward
    linear.forward = lambda x: 1.5 * torchs(x)
    assert not torch.allclose(model(IDS), whole)
    steps_agree(model)
    del linear.forward
    assert torch.equal(model(IDS), whole)
    steps_agree(model)


def test_a_wrapped_linear_map_of_a_16_bit_model() -> None:
    """It may read float32, as decays are in such a model: it gets its own dtype, as does a wrapper that passes on."""

    class Wrapper(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: Tensor, **others: Any) -> Tensor:
            return 1 * self.base(x, **others)

    steps = "{log_decay: {kind: softplus, heads: 4}}, {linear: 3}"
    text = f"{{seqblocks: 1, model: {{input: {{features: 8}}, steps: [{steps}]}}}}"
    model = seqblocks.build_text(text, dtype=torch.bfloat16)
    assert type(model.linear) is nn.Linear
    x = torch.randn(2, 5, 8, dtype=torch.bfloat16)
    expected = model(x)
    handle = model.linear.register_forward_hook(lambda *_: None)
    assert torch.equal(model(x), expected)
    handle.remove()
    model.linear = Wrapper(model.linear)
    assert torch.equal(model(x), expected)


# ------------------------------------------------------------------------------------------------ adapters


@pytest.mark.parametrize("targets", [["in_proj"], "all-linear", r".*mlstm_block.*proj_(up|down)"])
@pytest.mark.parametrize("dora", [False, True])
def test_peft(model: seqblocks.SequenceModel, targets: Any, dora: bool) -> None:
    peft = pytest.importorskip("peft")
    if dora:  # it divides by the norm of each row, and gates may begin with a weight of zero
        for name in linears(model):
            nn.init.normal_(model.get_parameter(f"{name}.weight"), std=0.05)
    names = {name: p.clone() for name, p in model.state_dict().items()}
    before = model(IDS)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, use_dora=dora))
    torch.testing.assert_close(adapted(IDS), before)  # B is 0
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    optimiser = torch.optim.SGD(adapted.parameters(), 0.5)
    for _ in range(2):
        adapted(IDS).square().mean().backward()
        optimiser.step()
    after = adapted.eval()(IDS)
    assert not torch.allclose(after, before)
    steps_agree(adapted.base_model.model)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(IDS), after, rtol=1e-4, atol=1e-5)
    assert merged.state_dict().keys() == names.keys()
    steps_agree(merged)


# ------------------------------------------------------------------------------------------------ quantisers


CONFIGS = ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "IntxWeightOnlyConfig"]


@pytest.mark.parametrize("config", CONFIGS)
def test_torchao(model: seqblocks.SequenceModel, config: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    options = {"weight_dtype": torch.int4} if config == "IntxWeightOnlyConfig" else {}
    expected = model(IDS)
    quantised = copy.deepcopy(model)
    quantization.quantize_(quantised, getattr(quantization, config)(**options))
    with torch.no_grad():
        found = quantised(IDS)
        for name in linears(quantised):
            weight: Any = quantised.get_submodule(name).weight
            assert type(weight.data) is not Tensor, name
            model.get_parameter(f"{name}.weight").copy_(weight.dequantize())
        assert not torch.allclose(found, expected, rtol=0, atol=1e-3)
        if "Dynamic" in config:  # inputs are rounded too, by 2^-8 of the largest, in each of some thirty products
            assert (found - model(IDS)).abs().max() < 0.1 * expected.abs().max()
        else:
            torch.testing.assert_close(found, model(IDS), rtol=1e-4, atol=1e-5)
            steps_agree(quantised)


def test_the_module_swap_of_bitsandbytes(model: seqblocks.SequenceModel) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for name in linears(model):
        parent, _, leaf = name.rpartition(".")
        old = model.get_submodule(name)
        new = bitsandbytes.nn.Linear8bitLt(old.in_features, old.out_features, old.bias is not None)
        setattr(model.get_submodule(parent), leaf, new)
    assert len([m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear8bitLt)]) == len(linears(model))


# ------------------------------------------------------------------------------------------------ reports


def test_fvcore(model: seqblocks.SequenceModel) -> None:
    analysis = pytest.importorskip("fvcore.nn")
    counted = analysis.FlopCountAnalysis(model, IDS).unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    by_module = counted.by_module()
    nodes = nodes_of(model)
    for name in linears(model):
        assert by_module[name] == nodes[name].macs * IDS.numel(), name


def test_captum(model: seqblocks.SequenceModel) -> None:
    attr = pytest.importorskip("captum.attr")
    layer = model.layers[0].mamba_block

    def score(ids: Tensor) -> Tensor:
        return model(ids)[:, -1, 3]

    found = attr.LayerActivation(score, layer).attribute(IDS)
    assert found.shape == (2, 11, 32)
    gradients = attr.LayerIntegratedGradients(score, model.embed, multiply_by_inputs=True)
    given, delta = gradients.attribute(IDS, baselines=0 * IDS, n_steps=64, return_convergence_delta=True)
    assert given.shape == (2, 11, 32)
    assert delta.abs().max() < 0.05 * max(1.0, (score(IDS) - score(0 * IDS)).abs().max().item())


def test_torchinfo(model: seqblocks.SequenceModel) -> None:
    torchinfo = pytest.importorskip("torchinfo")
    summary = torchinfo.summary(model, input_data=IDS, verbose=0, depth=8)
    assert summary.total_params == sum(p.numel() for p in model.parameters())
    shapes = {info.var_name: info.output_size for info in summary.summary_list}
    assert shapes["mamba_block"] == [2, 11, 32]
    assert shapes["unembed"] == [2, 11, 64]


def test_summary_of_lightning(model: seqblocks.SequenceModel) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.utilities.model_summary import ModelSummary

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.example_input_array = model, IDS

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids)

    summary = ModelSummary(Module(), max_depth=4)
    assert summary.total_parameters == sum(p.numel() for p in model.parameters())
    sizes = dict(zip(summary.layer_names, summary.out_sizes, strict=True))
    assert sizes["model.layers.0"] == [2, 11, 32]


def test_accelerate(model: seqblocks.SequenceModel) -> None:
    accelerate = pytest.importorskip("accelerate")
    sizes = accelerate.utils.compute_module_sizes(model)
    assert sizes[""] >= 4 * sum(p.numel() for p in model.parameters())
    expected = model(IDS)
    half = sizes[""] // 2
    split = accelerate.infer_auto_device_map(model, {"cpu": half, "disk": 10 * half}, no_split_module_classes=["steps"])
    assert {*split.values()} <= {"cpu", "disk"}
    accelerate.hooks.add_hook_to_module(model.layers[0], accelerate.hooks.ModelHook())
    assert torch.equal(model(IDS), expected)
