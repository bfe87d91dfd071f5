"""A block as a layer of another model: `seqblocks.block` and `seqblocks.block_text`."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqblocks
from seqblocks.analysis import check, layers
from seqblocks.errors import RunError, SeqblocksError, SpecError, UsageError
from seqblocks.testing import check_law
from tests.sampled import sampled

MIXER: dict[str, Any] = {"dim": 16, "heads": 2, "head": 8}
OWN = """
seqblocks: 1
let: {width: 12}
blocks:
  first:
    args: {dim: int, kernel: 3}
    steps: [{linear: dim}, {causal_conv: {kernel: kernel}}]
  gated:
    args: {by: wire, clip: wire}
    steps: [{multiply: {by: by}}, {add: {with: clip}}]
  pair:
    args: {dim: int}
    steps: [{linear: "2 * dim"}]
  features_of:
    args: {features: int}
    steps: [{linear: features}]
"""

# Arguments that make each bundled block small; all others are the defaults.
SMALL: dict[str, dict[str, Any]] = {
    "attention_mixer": {"heads": 2}, "gated_attention_mixer": {"heads": 2, "kv_heads": 1, "head": 8, "turned": 4},
    "latent_attention_mixer": {"heads": 2, "head": 8, "rank": 4}, "centaurus_block": {"features": 16, "state": 4},
    "centaurus_resize": {"state": 4}, "deltanet_mixer": {"heads": 2}, "gated_deltanet_mixer": {"heads": 2, "head": 8},
    "gated_deltaproduct_mixer": {"heads": 2, "head": 8}, "fla_layer": {"mixer": ["silu"]},
    "gla_mixer": {"heads": 2}, "simple_gla_mixer": {"heads": 2}, "rg_lru": {"width": 16, "heads": 2, "features": 16},
    "griffin_mixer": {"heads": 2}, "griffin_attention": {"heads": 2, "window": 4},
    "griffin_layer": {"mixer": ["silu"], "hidden": 8}, "hgrn_mixer": {"lower": 16},
    "hgrn2_mixer": {"lower": 16, "key": 8}, "decoder_layer": {"mixer": ["silu"], "network": ["tanh"], "features": 16},
    "postnorm_layer": {"mixer": ["silu"], "network": ["tanh"], "features": 16}, "sparse_network": {"experts": 4},
    "sandwich_layer": {"mixer": ["silu"], "network": ["tanh"], "features": 16}, "geglu_mlp": {"hidden": 24},
    "grouped_network": {"experts": 4, "features": 16}, "corrected_network": {"experts": 4, "features": 16},
    "kda_mixer": {"heads": 2, "head": 8},
    "product_map": {"heads": 2, "width": 8, "features": 16}, "t2r_map": {"heads": 2, "width": 8, "features": 16},
    "hedgehog_map": {"heads": 2, "width": 8, "features": 16}, "dpfp_map": {"heads": 2, "width": 8, "features": 16},
    "linear_attention_mixer": {"heads": 2}, "mamba_mixer": {"state": 4}, "mamba_block": {"state": 4},
    "vim_v1_mixer": {"state": 4}, "vim_v2_mixer": {"state": 4}, "mamba2_mixer": {"state": 4, "head": 8},
    "mamba2_block": {"state": 4, "head": 8},
    "mamba3_memory": {
        "heads": 2, "state": 4, "features": 16, "B": 4, "C": 4, "step_size": 2, "decay": 2, "trap": 2, "angle": 2,
    },
    "mamba3_mixer": {"state": 4, "head": 8}, "prenorm": {"mixer": ["silu"], "features": 16},
    "retention_mixer": {"heads": 2}, "rwkv6_mixer": {"heads": 2, "mix_rank": 4, "decay_rank": 4},
    "rwkv7_memory": {"head": 8, "r": 16, "k": 16, "v": 16, "a": 16, "decay": 16},
    "rwkv7_mixer": {"head": 8, "values": 16, "layer": 1, "layers": 2}, "attention_layer": {"heads": 2},
    "cross_attention_layer": {"heads": 2, "memory": {"features": 6}},
    "decoder_block": {"heads": 2, "memory": {"features": 6}}, "transformer_block": {"heads": 2},
    "gpt_block": {"heads": 2}, "vil2_layer": {"input": {"features": 16, "grid": [2, 3]}},
    "vil2": {"input": {"features": 16, "grid": [2, 3]}}, "mlstm_cell": {"q": 16, "k": 16, "features": 16},
    "slstm_layer": {"gates": 16}, "zamba2_block": {"embedded": 16, "heads": 2, "hidden": 16},
}  # fmt: skip
WHOLE_SEQUENCES = {"vim_v1_mixer", "vim_v2_mixer", "vil2_layer", "vil2"}  # they do not stream
RANGES = {"hgrn_mixer": (0, 1), "hgrn2_mixer": (0, 1), "rwkv7_memory": (-1, 0), "mamba3_memory": (-1, 0)}  # of wires
BLOCKS = {name: block for file, _ in layers.block_files() for name, block in check.load_spec(file)[0].blocks.items()}


def small(name: str, **more: Any) -> Any:
    dim = {"dim": 16} if "dim" in BLOCKS[name].args else {}
    return seqblocks.block(name, **dim, **SMALL.get(name, {}), **more)


@pytest.mark.parametrize("name", sampled(BLOCKS, ci=1))
def test_each_bundled_block_is_a_layer(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = small(name, dtype=torch.float64, seed=0).eval()
    if name in WHOLE_SEQUENCES:
        with pytest.raises(RunError, match="cannot stream"):
            layer.init_state(2)
        assert layer(torch.randn(2, 6, 16, dtype=torch.float64)).shape[:2] == (2, 6)
    elif name in RANGES:
        x = torch.empty(2, 5, layer.spec.input.features, dtype=torch.float64).uniform_(*RANGES[name])
        first, state = layer(x[:, :2], return_state=True)
        last, _ = layer(x[:, 2:], state=state, return_state=True)
        assert torch.allclose(torch.cat([first, last], 1), layer(x), atol=1e-12)  # 5 tokens in float64
    else:
        check_law(layer, seq=5, cuts=(2,))


def test_a_layer_is_the_block_of_a_model() -> None:
    """Names of parameters and states, values, gradients and resets are those of the block in a model of one step."""
    text = "{use: [deltanet], seqblocks: 1, model: {input: {features: 16}, steps: [{gated_deltanet_mixer: %s}]}}"
    model = seqblocks.build_text(text % "{dim: 16, heads: 2, head: 8}")
    layer = seqblocks.block("gated_deltanet_mixer", **MIXER)
    prefix = "gated_deltanet_mixer."
    assert [prefix + name for name in layer.state_dict()] == [*model.state_dict()]
    layer.load_state_dict({name.removeprefix(prefix): x for name, x in model.state_dict().items()})
    x, resets = torch.randn(2, 9, 16), torch.rand(2, 9) < 0.3
    for marks in ({}, {"resets": resets}):
        assert torch.equal(layer(x, **marks), model(x, **marks))
    assert torch.equal(layer(x[:1], cu_seqlens=torch.tensor([0, 4, 9])), layer(x[:1], resets=_first(4)))
    _, state = layer(x, return_state=True)
    assert torch.equal(layer.step(x[:, 0], state)[0], model.step(x[:, 0], {prefix[:-1]: state})[0])
    layer(x).sum().backward()
    model(x).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(layer.parameters(), model.parameters(), strict=True))


def _first(at: int) -> Tensor:
    marks = torch.zeros(1, 9, dtype=torch.bool)
    marks[:, at] = True
    return marks


def test_a_layer_streams() -> None:
    layer, x = seqblocks.block("gated_deltanet_mixer", **MIXER).eval(), torch.randn(2, 5, 16)
    stream = layer.stream(2)
    steps = torch.stack([stream.step(x[:, t]) for t in range(5)], 1)
    assert torch.allclose(steps, layer(x), atol=1e-6)  # 5 tokens in float32


# ------------------------------------------------------------------------------
# Wires, outputs, steps


@pytest.mark.parametrize("name", ["hgrn_mixer", "rwkv7_mixer", "zamba2_block", "slstm_layer"])
def test_wires_are_read_with_each_token(name: str) -> None:
    layer = small(name, dtype=torch.float64).eval()
    (wire,) = layer._widths  # type: ignore[attr-defined]
    x, other = torch.randn(2, 5, 16, dtype=torch.float64), torch.rand(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p))  # some begin at 0
    whole = layer(x, **{wire: other})
    first, state = layer(x[:, :2], **{wire: other[:, :2]}, return_state=True)
    outs = [first]
    for t in range(2, 5):
        y, state = layer.step(x[:, t], state, **{wire: other[:, t]})  # type: ignore[call-arg]
        outs.append(y[:, None])
    assert torch.allclose(torch.cat(outs, 1), whole, atol=1e-12)  # 5 tokens in float64
    with torch.no_grad():
        planned, _ = layer.step(x[:, 0], **{wire: other[:, 0]})  # type: ignore[call-arg]
    assert layer.token_plan is not None
    assert torch.allclose(planned, whole[:, 0], atol=1e-12)
    assert torch.equal(layer(torch.cat([x, other], -1)), whole)
    assert not torch.equal(layer(x, **{wire: other.flip(1)}), whole)


def test_wires_keep_their_order() -> None:
    layer = seqblocks.block_text(OWN, "gated", features=4, by=4, clip=4)
    assert "input joined with by 4, clip 4" in repr(layer)
    x, by, clip = torch.randn(3, 2, 5, 4).unbind()
    assert torch.equal(layer(x, clip=clip, by=by), x * by + clip)


def test_context_has_a_length_of_its_own() -> None:
    layer = small("decoder_block", dtype=torch.float64).eval()
    x, memory = torch.randn(2, 5, 16, dtype=torch.float64), torch.randn(2, 3, 6, dtype=torch.float64)
    whole, state = layer(x, memory=memory), layer.init_state(2, memory=memory)
    steps = []
    for t in range(5):
        y, state = layer.step(x[:, t], state)
        steps.append(y)
    assert torch.allclose(torch.stack(steps, 1), whole, atol=1e-12)  # 5 tokens in float64


def test_context_and_wires_together() -> None:
    text = """
seqblocks: 1
blocks:
  mixed:
    args: {by: wire, scene: wire}
    steps: [{multiply: {by: by}}, {add: {with: scene}}]
"""
    layer = seqblocks.block_text(text, "mixed", features=4, by=4, scene={"vector": 4})
    x, by, scene = torch.randn(2, 5, 4), torch.randn(2, 5, 4), torch.randn(2, 4)
    whole = layer(x, by=by, scene=scene)
    assert torch.equal(whole, x * by + scene[:, None])
    y, _ = layer.step(x[:, 0], layer.init_state(2, scene=scene), by=by[:, 0])  # type: ignore[call-arg]
    assert torch.equal(y, whole[:, 0])


@pytest.mark.parametrize("outputs", [["y", "values"], {"y": 16, "values": 16}])
def test_parts_of_the_output_have_names(outputs: Any) -> None:
    given: dict[str, Any] = {"dim": 16, "values": 16, "head": 8, "seed": 1}  # the first layer also returns values
    layer, plain = seqblocks.block("rwkv7_mixer", **given, outputs=outputs), seqblocks.block("rwkv7_mixer", **given)
    assert [*layer.state_dict()] == [*plain.state_dict()]
    x, values = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    whole, parts = plain(x, values=values), layer(x, values=values)
    assert torch.equal(torch.cat([parts["y"], parts["values"]], -1), whole)


def test_steps_may_be_any_bundled_block() -> None:
    steps = [{"gated_deltanet_mixer": MIXER}, "silu"]
    layer = seqblocks.block("prenorm", features=16, mixer=steps, norm=["layer_norm"])
    assert "residual.mixer.gated_deltanet_mixer.q_proj.weight" in layer.state_dict()
    assert "residual.norm.layer_norm.weight" in layer.state_dict()


# ------------------------------------------------------------------------------
# Where a block comes from, and what it reads


def test_blocks_of_files_and_texts(tmp_path: Path) -> None:
    (tmp_path / "blocks.yaml").write_text(OWN)
    (tmp_path / "uses.yaml").write_text("{seqblocks: 1, use: [./blocks.yaml], model: {input: {tokens: 9}, steps: [a]}}")
    found = [
        seqblocks.block(tmp_path / "blocks.yaml", "first", dim=12),
        seqblocks.block(tmp_path / "uses.yaml", "first", dim=12),
        seqblocks.block_text(OWN, "first", dim=seqblocks.yaml("3 * 4")),
        seqblocks.block_text(OWN, "first", dim=seqblocks.yaml("width")),
    ]
    names = ("linear.weight", "linear.bias", "causal_conv.weight", "causal_conv.bias")
    assert {tuple(layer.state_dict()) for layer in found} == {names}
    assert {tuple(layer(torch.zeros(1, 2, 12)).shape) for layer in found} == {(1, 2, 12)}
    assert seqblocks.block("caduceus_small", "joined", features=4, other=8).spec.name == "joined"


def test_the_width_of_the_input() -> None:
    assert seqblocks.block("centaurus_resize", dim=8, features=4, state=4)(torch.zeros(1, 2, 4)).shape == (1, 2, 8)
    of_the_same_name = seqblocks.block_text(OWN, "features_of", features=4, args={"features": 8})
    assert of_the_same_name(torch.zeros(1, 2, 4)).shape == (1, 2, 8)
    assert seqblocks.block("mlstm_block", dim=torch.tensor(16))(torch.zeros(1, 2, 16)).shape == (1, 2, 16)
    assert small("vil2")(torch.zeros(1, 20, 16), grid=(4, 5)).shape == (1, 20, 16)


def test_weights_follow_torchs_generator() -> None:
    def made(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return seqblocks.block("mingru_mixer", dim=8), seqblocks.block("mingru_mixer", dim=8)

    def equal(a: nn.Module, b: nn.Module) -> bool:
        return all(map(torch.equal, a.parameters(), b.parameters()))

    (a, b), (again, _), (other, _) = made(0), made(0), made(1)
    assert equal(a, again)
    assert not equal(a, b)
    assert not equal(a, other)
    assert equal(seqblocks.block("mingru_mixer", dim=8, seed=3), seqblocks.block("mingru_mixer", dim=8, seed=3))


def test_device_and_dtype_are_torchs() -> None:
    with torch.device("meta"):
        layer = seqblocks.block("mingru_mixer", dim=8)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float32)}
    torch.set_default_dtype(torch.float64)
    try:
        layer = seqblocks.block("mingru_mixer", dim=8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in layer.parameters()} == {torch.float64}


# ------------------------------------------------------------------------------
# In the models of others


class Mine(nn.Module):
    """A model of somebody else's: embedding, two layers with residuals, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.mixers = nn.ModuleList(seqblocks.block("gated_deltanet_mixer", **MIXER) for _ in range(2))
        self.head = nn.Linear(16, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for mixer in self.mixers:
            x = x + mixer(x)
        return self.head(x)


IDS = torch.arange(14).remainder(11).reshape(2, 7)


def test_copies_and_files_of_a_model_with_layers(tmp_path: Path) -> None:
    model, other = Mine(), Mine()
    expected = model(IDS)
    assert "mixers.1.decay.A_log" in model.state_dict()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    assert not torch.equal(other(IDS), expected)
    other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert torch.equal(other(IDS), expected)
    assert torch.equal(copy.deepcopy(model)(IDS), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(IDS), expected)
    whole = io.BytesIO()
    torch.save(model, whole)
    whole.seek(0)
    assert torch.equal(torch.load(whole, weights_only=False)(IDS), expected)


def test_functional_call_and_transforms() -> None:
    model = Mine()
    zeros = {name: torch.zeros_like(x) for name, x in model.named_parameters()}
    assert torch.equal(torch.func.functional_call(model, zeros, (IDS,)), torch.zeros(2, 7, 11))
    layer, x = model.mixers[0], torch.randn(2, 3, 16)
    twice = {name: 2 * p for name, p in layer.named_parameters()}
    changed = torch.func.functional_call(layer, twice, (x,), {"resets": torch.zeros(2, 3, dtype=torch.bool)})
    assert not torch.allclose(changed, layer(x))
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        for p in copied.parameters():
            p.mul_(2)
    assert torch.equal(changed, copied(x))


def test_layers_in_sequential_share_parameters() -> None:
    layer = seqblocks.block("mingru_mixer", dim=8)
    both = nn.Sequential(layer, nn.LayerNorm(8), layer)
    assert len([*both.parameters()]) == len([*layer.parameters()]) + 2
    x = torch.randn(2, 3, 8)
    assert torch.equal(both(x), layer(both[1](layer(x))))
    other = seqblocks.block("mingru_mixer", dim=8).eval()
    name, _ = next(iter(other.named_children()))
    setattr(other, name, getattr(layer, name))  # two layers that share one step
    assert len({*layer.parameters()} & {*other.parameters()}) == len([*getattr(layer, name).parameters()])
    (layer(x).sum() + other(x).sum()).backward()
    with torch.no_grad():
        step, _ = other.step(x[:, 0], other.init_state(2))
        for p in getattr(layer, name).parameters():
            p.add_(1)
        changed, _ = other.step(x[:, 0], other.init_state(2))
    assert not torch.allclose(step, changed)
    assert torch.allclose(changed, other(x[:, :1])[:, 0])


def test_hooks_freezing_and_parameter_groups() -> None:
    layer, x, seen = seqblocks.block("mingru_mixer", dim=8), torch.randn(2, 3, 8), []
    layer.register_forward_hook(lambda module, args, y: seen.append(y.shape) or 2 * y)
    plain = copy.deepcopy(layer)
    plain._forward_hooks.clear()
    assert torch.equal(nn.Sequential(layer)(x), 2 * plain(x))
    assert seen == [(2, 3, 8)]
    layer.requires_grad_(False)
    assert not nn.Sequential(layer)(x).requires_grad
    assert sum(len(group["params"]) for group in layer.parameter_groups(0.1)) == len([*layer.parameters()])


class Wired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mixer = nn.Embedding(11, 16), seqblocks.block("hgrn_mixer", dim=16, lower=16)
        self.second = seqblocks.block("mingru_mixer", dim=16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.second(self.mixer(x, lower=torch.sigmoid(x)))


def test_a_model_with_layers_compiles_to_one_graph() -> None:
    model = Wired()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(IDS), model(IDS), atol=1e-6)  # float32


def test_summary_of_a_layer() -> None:
    layer = seqblocks.block("gated_deltanet_mixer", **MIXER)
    figures = seqblocks.summarise(layer)
    assert figures.name == "gated_deltanet_mixer"
    assert figures.params == sum(p.numel() for p in layer.parameters())


def test_a_layer_is_saved_with_its_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"torch\.save"):
        seqblocks.save(seqblocks.block("mingru_mixer", dim=8), tmp_path / "layer")


# ------------------------------------------------------------------------------
# Errors

MISTAKES: dict[str, tuple[Any, str]] = {
    "block": (lambda: seqblocks.block("gated_deltanet_mixr", dim=8), "E301.*did you mean 'gated_deltanet_mixer'"),
    "file": (lambda: seqblocks.block("deltanet", dim=8), "E301.*deltanet_mixer, gated_deltanet_mixer"),
    "verb": (lambda: seqblocks.block("mlstm", heads=4), "E301.*mlstm is a step"),
    "path": (lambda: seqblocks.block("my.yaml"), r'block\("my\.yaml", "name"'),
    "no file": (lambda: seqblocks.block("my.yaml", "mine"), "E803"),
    "block of a file": (lambda: seqblocks.block("vil", "vl"), "E301.*vil.yaml has no block 'vl'.*did you mean 'vil'"),
    "no blocks": (lambda: seqblocks.block_text("{seqblocks: 1}", "a"), "E301.*define one in `blocks:`"),
    "not YAML": (lambda: seqblocks.block_text("a: [", "a"), "E101"),
    "argument": (lambda: seqblocks.block("mlstm_block", dim=8, head=2), "E201.*did you mean 'heads'"),
    "required": (lambda: seqblocks.block("mlstm_block", heads=2), "E202.*block mlstm_block needs 'dim'"),
    "value": (lambda: seqblocks.block("mlstm_block", dim=16, heads=3), r"E401.*block\(mlstm_block\):5"),
    "None": (lambda: seqblocks.block("mlstm_block", dim=None), "E203.*expected a number"),
    "width": (lambda: seqblocks.block("prenorm", mixer=["silu"]), "E202.*pass features=64"),
    "other width": (lambda: seqblocks.block("mlstm_block", dim=16, features=8), r"E404.*\[batch, seq, 8\]"),
    "wire": (lambda: seqblocks.block("hgrn_mixer", dim=8), "E411.*pass lower=8 .* or lower="),
    "wire that is a word": (lambda: seqblocks.block("hgrn_mixer", dim=8, lower="x"), "E203.*'lower' is a wire"),
    "wire of no width": (lambda: seqblocks.block("hgrn_mixer", dim=8, lower=0), "E405"),
    "wire of an image": (
        lambda: seqblocks.block("hgrn_mixer", dim=8, lower=8, input={"image": {"size": 8}}), "E203.*which is image",
    ),
    "input": (lambda: seqblocks.block("vil2", dim=8, input=8), "input is a mapping"),
    "key of the input": (lambda: seqblocks.block("vil2", dim=8, input={"featurs": 8}), "E201.*did you mean 'features'"),
    "outputs": (lambda: seqblocks.block("mingru_mixer", dim=8, outputs="y"), "outputs are names"),
    "parts": (lambda: seqblocks.block("mingru_mixer", dim=8, outputs=["a", "b", "c"]), "E405"),
    "steps": (lambda: seqblocks.block("prenorm", features=8, mixer=["slu"]), "E301.*did you mean 'silu'"),
    "no list": (lambda: seqblocks.block("prenorm", features=8, mixer="silu"), "E203.*must be a list of steps"),
    "twice": (lambda: seqblocks.block("mingru_mixer", dim=8, args={"dim": 8}), "'dim' is given twice"),
    "seed": (lambda: seqblocks.block("mingru_mixer", dim=8, seed="a"), "a seed must be an integer"),
    "dtype": (lambda: seqblocks.block("mingru_mixer", dim=8, dtype="float33"), "dtype"),
    "number": (lambda: seqblocks.block(3), "block takes a name"),
    "text": (lambda: seqblocks.block_text(3, "a"), "expected the text of a spec"),
    "name": (lambda: seqblocks.block_text(OWN, 3), "the name of a block is a string"),
    "by position": (lambda: seqblocks.block("mlstm_block", 64), r"by name: block\("),
    "key of a step": (lambda: seqblocks.block("mingru_mixer", dim=8, when=False), "E201.*'when'.*belongs to a step"),
    "another one": (lambda: seqblocks.block("mingru_mixer", dim=8, args={"from": "x"}), "E201.*'from'.*belongs to"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_explained(mistake: str) -> None:
    make, expected = MISTAKES[mistake]
    with pytest.raises(SeqblocksError, match=f"(?s){expected}"):
        make()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "the wire by is missing"),
        ({"by": torch.zeros(2, 5, 4), "clop": torch.zeros(2, 5, 4)}, "no wire 'clop': did you mean 'clip'"),
        ({"by": torch.zeros(2, 5, 4), "clip": torch.zeros(2, 4, 4)}, "they need the same tokens"),
        ({"by": torch.zeros(2, 5, 4), "clip": torch.zeros(2, 5, 3)}, r"the wire clip reads \[batch, seq, 4\]"),
        ({"by": torch.zeros(2, 5, 4), "clip": None}, "the wire clip reads a tensor, not NoneType"),
    ],
)
def test_wrong_wires_are_explained(given: dict[str, Any], expected: str) -> None:
    layer = seqblocks.block_text(OWN, "gated", features=4, by=4, clip=4)
    with pytest.raises(RunError, match=expected):
        layer(torch.zeros(2, 5, 4), **given)


def test_faults_in_a_file_have_its_lines(tmp_path: Path) -> None:
    text = "seqblocks: 1\nblocks:\n  a:\n    args: {dim: int}\n    steps: [{linar: dim}]\n"
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(SpecError, match=r"mine\.yaml:5:14(?s:.)*did you mean 'linear'"):
        seqblocks.block(tmp_path / "mine.yaml", "a", dim=4)
