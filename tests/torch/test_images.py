"""Steps on the grid of an image against torch.nn in float64: values, gradients, grids, shapes and costs."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqblocks
from seqblocks.errors import RunError
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.testing import check_shapes
from tests.draws import draw
from tests.sampled import sampled

GRID = "{features: 6, grid: [7, 9]}"
IMAGE = "{image: {size: [7, 9], channels: 6}}"


def built(*steps: str, input: str = GRID) -> SequenceModel:
    text = f"seqblocks: 1\nmodel: {{input: {input}, steps: [{', '.join(steps)}]}}\n"
    return seqblocks.build_text(text, dtype=torch.float64)


def tokens_of(maps: Tensor) -> Tensor:
    return maps.flatten(2).transpose(1, 2)


def maps_of(x: Tensor, rows: int = 7, columns: int = 9) -> Tensor:
    return x.transpose(1, 2).unflatten(2, (rows, columns))


WINDOWS: dict[str, tuple[str, nn.Module]] = {
    "depthwise": ("conv2d: {kernel: 5, NAME}", nn.Conv2d(6, 6, 5, padding=2, groups=6)),
    "depthwise, strided": ("conv2d: {stride: 2, NAME}", nn.Conv2d(6, 6, 3, 2, 1, groups=6)),
    "dense": ("conv2d: {features: 4, NAME}", nn.Conv2d(6, 4, 3, padding=1)),
    "no bias": ("conv2d: {features: 4, bias: false, NAME}", nn.Conv2d(6, 4, 3, padding=1, bias=False)),
    "even, strided": ("conv2d: {features: 8, kernel: 2, stride: 2, padding: 0, NAME}", nn.Conv2d(6, 8, 2, 2)),
    "stem": ("conv2d: {features: 8, kernel: 7, stride: 2, NAME}", nn.Conv2d(6, 8, 7, 2, 3)),
    "groups": ("conv2d: {features: 9, groups: 3, padding: 0, NAME}", nn.Conv2d(6, 9, 3, groups=3)),
    "dilation": ("conv2d: {features: 4, dilation: 2, NAME}", nn.Conv2d(6, 4, 3, dilation=2, padding=2)),
    "wide padding": ("conv2d: {features: 4, padding: 5, stride: 3, NAME}", nn.Conv2d(6, 4, 3, 3, 5)),
    "transposed": (
        "conv_transpose2d: {features: 4, kernel: 2, stride: 2, NAME}", nn.ConvTranspose2d(6, 4, 2, 2),
    ),
    "transposed, groups": (
        "conv_transpose2d: {features: 4, kernel: 5, stride: 3, padding: 1, output_padding: 2, groups: 2, NAME}",
        nn.ConvTranspose2d(6, 4, 5, 3, 1, 2, groups=2),
    ),
    "max": ("pool2d: {NAME}", nn.MaxPool2d(2)),
    "max, overlapping": ("pool2d: {kernel: 3, stride: 2, padding: 1, NAME}", nn.MaxPool2d(3, 2, 1)),
    "mean": ("pool2d: {mode: mean, kernel: 3, NAME}", nn.AvgPool2d(3)),
    "mean, padded": ("pool2d: {mode: mean, kernel: 3, stride: 1, padding: 1, NAME}", nn.AvgPool2d(3, 1, 1)),
}  # fmt: skip


def copied(model: SequenceModel, official: nn.Module, name: str = "it") -> SequenceModel:
    """Give a step the parameters and buffers of torch's module, under torch's names."""
    model.load_state_dict({f"{name}.{key}": value.double() for key, value in official.state_dict().items()})
    return model


@pytest.mark.parametrize("input", [GRID, IMAGE])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_equal_torch(name: str, input: str) -> None:
    """The sum of at most 6 * 25 products: their order may differ, so some units in the last place."""
    step, official = WINDOWS[name]
    official = official.double()
    official.zero_grad()
    model = copied(built(f"{{{step.replace('NAME', 'name: it')}}}", input=input), official)
    maps = draw(2, 6, 7, 9).requires_grad_()
    expected = official(maps)
    x = (maps if "image" in input else tokens_of(maps)).detach().requires_grad_()
    y = model(x)
    torch.testing.assert_close(y, tokens_of(expected), rtol=0, atol=1e-13)
    weight = draw(*y.shape)
    y.mul(weight).sum().backward()
    tokens_of(expected).mul(weight).sum().backward()
    assert x.grad is not None
    assert maps.grad is not None
    torch.testing.assert_close(x.grad, maps.grad if "image" in input else tokens_of(maps.grad), rtol=0, atol=1e-12)
    for mine, theirs in zip(model.parameters(), official.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-11)
    output = model.spec.output
    assert output
    assert (output.grid, output.axes[1:]) == (tuple(expected.shape[2:]), tuple(y.shape[1:]))
    assert seqblocks.summarise(model).params == sum(p.numel() for p in official.parameters())
    check_shapes(model)


@pytest.mark.parametrize("name", WINDOWS)
def test_a_step_has_the_class_and_attributes_of_torchs_module(name: str) -> None:
    step, official = WINDOWS[name]
    own: Any = built(f"{{{step.replace('NAME', 'name: it')}}}").get_submodule("it")
    assert isinstance(own, type(official))
    pairs = ["padding", "stride", "kernel_size"]
    for attribute in {*getattr(official, "__constants__", []), *pairs}:
        assert getattr(own, attribute) == getattr(official, attribute), attribute


@pytest.mark.parametrize("name", sampled(WINDOWS, ci=1))
def test_gradients_by_differences(name: str) -> None:
    model = built(f"{{{WINDOWS[name][0].replace('NAME', 'name: it')}}}")
    torch.autograd.gradcheck(model, draw(1, 63, 6).requires_grad_())


@pytest.mark.parametrize("name", [name for name, (step, _) in WINDOWS.items() if not step.startswith("pool")])
def test_costs_equal_the_operations_that_torch_counts(name: str) -> None:
    """FlopCounterMode counts two operations per multiply-accumulate, without the bias."""
    from torch.utils.flop_counter import FlopCounterMode

    step, official = WINDOWS[name]
    model = built(f"{{{step.replace('NAME', 'name: it')}}}")
    with FlopCounterMode(display=False) as counter:
        y = model(draw(1, 63, 6))
    node = next(iter(model.graph.nodes))
    assert node.op
    if "transpose" in step:  # each input is multiplied by all taps, also those that are cut off
        assert isinstance(official, nn.ConvTranspose2d)
        assert counter.get_total_flops() == 2 * 63 * official.weight.numel()
    else:
        assert counter.get_total_flops() == 2 * y.shape[1] * node.op.macs(*node.wires)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("step", ["conv2d", "conv2d: {features: 8}", "pool2d"])
def test_maps_of_tokens_stay_channels_last(step: str, batch: int) -> None:
    """torch would copy them, and return maps whose features are far apart."""
    model = seqblocks.build_text(f"seqblocks: 1\nmodel: {{input: {GRID}, steps: [{step}]}}\n")
    assert model(torch.randn(batch, 63, 6)).is_contiguous()


def test_later_steps_know_the_new_grid() -> None:
    """Positions, orders of scans and further windows after a stride, for the size in the spec and another one."""
    shifted = "{scan: {order: columns, steps: [{shift: 1}]}}"
    steps = "{conv2d: {features: 4, stride: 2}}", shifted, "{pool2d: {kernel: 3}}"
    model = built(*steps, "to_image", input="{image: {size: [8, 12], channels: 3}}")
    conv = model.get_submodule("conv2d")
    for rows, columns in ((8, 12), (14, 6), (6, 16)):
        x = draw(2, 3, rows, columns)
        maps = nn.functional.conv2d(x, conv.weight, conv.bias, 2, 1)
        by_columns = maps.transpose(2, 3).flatten(2)
        later = torch.cat([torch.zeros_like(by_columns[..., :1]), by_columns[..., :-1]], -1)
        back = later.unflatten(2, (maps.shape[3], maps.shape[2])).transpose(2, 3)
        torch.testing.assert_close(model(x), nn.functional.max_pool2d(back, 3), rtol=0, atol=1e-13)


def test_positions_have_the_rows_and_columns_of_the_new_grid() -> None:
    model = built("{pool2d: {}}", "position_embed")
    assert model.get_parameter("position_embed.weight").shape == (1, 3, 4, 6)


def test_branches_with_a_stride_are_added() -> None:
    """A residual block that halves the grid: the main branch and the shortcut get the same new grid."""
    branches = "{main: [{conv2d: {features: 8, stride: 2}}]}, {short: [{conv2d: {features: 8, kernel: 1, stride: 2}}]}"
    model = built(f"{{parallel: {{merge: sum, branches: [{branches}]}}}}", "to_image", input=IMAGE)
    parts = dict(model.named_parameters())
    for rows, columns in ((7, 9), (4, 20)):
        x = draw(2, 6, rows, columns)
        main, short = (
            nn.functional.conv2d(x, *(parts[f"parallel.{name}.conv2d.{key}"] for key in ("weight", "bias")), 2, pad)
            for name, pad in (("main", 1), ("short", 0))
        )
        torch.testing.assert_close(model(x), main + short, rtol=0, atol=1e-13)


def test_an_image_that_is_smaller_than_a_window() -> None:
    model = built("{conv2d: {features: 2, kernel: 5, padding: 0}}", input=IMAGE)
    with pytest.raises(RunError, match="conv2d: a window of 5 x 5 with a padding of 0 is larger than the 4 rows and 9"):
        model(draw(1, 6, 4, 9))


@pytest.mark.parametrize("step", ["conv2d", "conv2d: {features: 2, stride: 2}", "pool2d: {}"])
def test_windows_do_not_stream(step: str) -> None:
    with pytest.raises(RunError, match="cannot stream: it reads the whole sequence"):
        built(f"{{{step}}}" if ":" in step else step).init_state(1)


def test_a_scan_over_columns_halves_and_doubles_the_transposed_grid() -> None:
    """Overlapping windows at a stride of 2 tell the two orders apart: 5 x 3 become 3 x 2, and 3 x 5 become 2 x 3."""
    down, up = "pool2d: {kernel: 3, stride: 2, padding: 1}", "conv_transpose2d: {features: 6, kernel: 1, stride: 2}"
    scan = f"{{scan: {{order: columns, steps: [{{{down}}}, {{{up}}}]}}}}"
    model = built(scan, "to_image", input="{features: 6, grid: [5, 3]}")
    weight, bias = (model.get_parameter(f"scan.conv_transpose2d.{name}") for name in ("weight", "bias"))
    for rows, columns in ((5, 3), (3, 5), (7, 9)):
        x = draw(2, rows * columns, 6)
        halved = nn.functional.max_pool2d(maps_of(x, rows, columns).transpose(2, 3), 3, 2, 1)
        expected = nn.functional.conv_transpose2d(halved, weight, bias, 2).transpose(2, 3)
        torch.testing.assert_close(model(x, grid=(rows, columns)), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_and_exported(dtype: torch.dtype) -> None:
    model = built("{conv2d: {features: 4, stride: 2}}", "{pool2d: {}}", input=IMAGE).to(dtype)
    x = draw(2, 6, 7, 9).to(dtype)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


# --- batch normalisation


def norms(momentum: float = 0.1, affine: bool = True) -> tuple[SequenceModel, nn.BatchNorm2d]:
    official = nn.BatchNorm2d(6, eps=1e-3, momentum=momentum, affine=affine, dtype=torch.float64)
    for p in official.parameters():
        nn.init.normal_(p)
    arguments = f"eps: 1e-3, momentum: {momentum}, affine: {str(affine).lower()}"
    return copied(built(f"{{batch_norm: {{name: it, {arguments}}}}}"), official), official


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0])
def test_batch_norm_equals_torch(momentum: float, affine: bool) -> None:
    """Values, gradients and statistics of three batches, in training, evaluation and again in training mode."""
    model, official = norms(momentum, affine)
    for at, training in enumerate((True, False, True)):
        model.train(training)
        official.train(training)
        maps = (3 * draw(2, 6, 7, 9, seed=at) + 1).requires_grad_()
        x = tokens_of(maps).detach().requires_grad_()
        y, expected = model(x), official(maps)
        torch.testing.assert_close(y, tokens_of(expected), rtol=0, atol=1e-12)
        weight = draw(*y.shape)
        (mine,) = torch.autograd.grad((y * weight).sum(), x)
        (theirs,) = torch.autograd.grad((tokens_of(expected) * weight).sum(), maps)
        torch.testing.assert_close(mine, tokens_of(theirs), rtol=0, atol=1e-11)
        for name, value in official.state_dict().items():
            torch.testing.assert_close(model.state_dict()[f"it.{name}"], value, rtol=1e-12, atol=1e-12)
    assert model.get_buffer("it.num_batches_tracked") == 2


def test_batch_norm_is_torchs_module() -> None:
    model, official = norms()
    own: Any = model.get_submodule("it")
    assert isinstance(own, nn.BatchNorm2d)
    for name in official.__constants__:
        assert getattr(own, name) == getattr(official, name), name
    assert [name for name, _ in model.named_buffers()] == [f"it.{name}" for name, _ in official.named_buffers()]
    model.train()
    own.eval()  # frozen statistics in a model that is trained
    before = own.running_mean.clone()
    model(draw(2, 63, 6))
    assert torch.equal(own.running_mean, before)
    torch.optim.swa_utils.update_bn([draw(2, 63, 6, seed=at) for at in range(3)], model)
    x = torch.cat([draw(2, 63, 6, seed=at) for at in range(3)])
    torch.testing.assert_close(own.running_mean, x.mean((0, 1)))


@pytest.mark.parametrize(
    ("input", "shape"), [("{vector: 6}", (5, 6)), ("{features: 6}", (2, 9, 6)), (IMAGE, (2, 6, 7, 9))]
)
def test_batch_norm_of_vectors_sequences_and_images(input: str, shape: tuple[int, ...]) -> None:
    model, x = built("batch_norm", input=input).train(), 2 * draw(*shape) + 3
    rows = x if len(shape) < 4 else x.movedim(1, -1)
    axes = tuple(range(rows.dim() - 1))
    expected = (rows - rows.mean(axes)) / (rows.var(axes, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(model(x), expected if len(shape) < 4 else expected.movedim(-1, 1))
    with pytest.raises(RunError, match="cannot stream"):
        model.init_state(1)


@pytest.mark.parametrize("training", [False, True])
def test_statistics_in_float32_beside_weights_in_16_bits(training: bool) -> None:
    """Such are the shards of a model whose layers compute in bfloat16: buffers are not converted."""
    model = built("batch_norm", input="{features: 6}").float().train(training)
    x = draw(2, 9, 6).bfloat16()
    expected = copy.deepcopy(model)
    weights = {name: each.detach().bfloat16() for name, each in model.named_parameters()}
    y = torch.func.functional_call(model, weights, (x,))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected(x.float()).bfloat16())
    torch.testing.assert_close(model.state_dict(), expected.state_dict())


def test_a_batch_of_one_value_has_no_variance() -> None:
    model = built("batch_norm", input="{vector: 6}")
    with pytest.raises(RunError, match=r"batch_norm needs at least two values of each feature to train, not \[1, 6\]"):
        model.train()(draw(1, 6))
    assert model.eval()(draw(1, 6)).shape == (1, 6)


def test_statistics_are_saved_loaded_copied_and_reset(tmp_path: Path) -> None:
    model, _ = norms()
    model.train()(draw(2, 63, 6) + 5)
    seqblocks.save(model, tmp_path)
    x = draw(2, 63, 6)
    for other in (seqblocks.load(tmp_path), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.eval()(x), model.eval()(x))
    half = seqblocks.build_text("seqblocks: 1\nmodel: {input: {features: 6}, steps: [batch_norm]}", dtype="bfloat16")
    kinds = {name.rpartition(".")[2]: value.dtype for name, value in half.named_buffers()}
    assert kinds == {"running_mean": torch.bfloat16, "running_var": torch.bfloat16, "num_batches_tracked": torch.int64}
    model.reset_parameters()
    assert torch.equal(model.get_buffer("it.running_var"), torch.ones(6, dtype=torch.float64))
    assert model.get_buffer("it.num_batches_tracked") == 0
    assert seqblocks.summarise(model).params == 12


def test_shared_norms_have_their_own_statistics() -> None:
    model = built("{batch_norm: {name: a}}", "{batch_norm: {name: b, share: a}}").train()
    model(draw(2, 63, 6) + 5)
    a, b = (model.get_buffer(f"{name}.running_mean") for name in "ab")
    torch.testing.assert_close(b, torch.zeros_like(b), rtol=0, atol=1e-12)
    assert a.min() > 0.3
    assert [name for name, _ in model.named_parameters()] == ["a.weight", "a.bias"]


# --- resizing


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("input", [GRID, IMAGE])
@pytest.mark.parametrize(
    ("size", "options"),
    [
        ("factor: 2", {"scale_factor": 2.0}), ("factor: 0.4", {"scale_factor": 0.4}),
        ("rows: 10, columns: 4", {"size": (10, 4)}),
    ],
)  # fmt: skip
def test_resize_equals_torch(size: str, options: dict[str, Any], input: str, mode: str) -> None:
    official = nn.Upsample(**options, mode=mode, align_corners=False if mode == "bilinear" else None)
    model, maps = built(f"{{resize: {{{size}, mode: {mode}}}}}", input=input), draw(2, 6, 7, 9)
    y, expected = model(maps if "image" in input else tokens_of(maps)), official(maps)
    torch.testing.assert_close(y, tokens_of(expected), rtol=0, atol=1e-14)
    output = model.spec.output
    assert output
    assert output.grid == tuple(expected.shape[2:])
    check_shapes(model)
    own: Any = model.get_submodule("resize")
    assert isinstance(own, nn.Upsample)
    for name in official.__constants__:
        assert getattr(own, name) == getattr(official, name), name
    if input == GRID:
        torch.autograd.gradcheck(model, draw(1, 63, 6).requires_grad_())


def test_resnet18_has_the_published_number_of_parameters_and_trains() -> None:
    model = seqblocks.build(Path(__file__).parent / "resnet18.yaml").train()
    assert sum(p.numel() for p in model.parameters()) == 11_689_512
    model(draw(2, 3, 64, 96).float()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(value == 1 for name, value in model.named_buffers() if name.endswith("num_batches_tracked"))


@pytest.mark.parametrize("own", ["none", "all", "[batch_norm]", "[linear.weight]"])
def test_statistics_in_several_orders_are_saved(own: str, tmp_path: Path) -> None:
    model = seqblocks.build_text(f"""
seqblocks: 1
model:
  input: {{image: {{size: 4, channels: 3}}}}
  steps:
    - conv2d: {{features: 4}}
    - scan: {{order: [forward, columns], own: {own}, steps: [linear: 4, batch_norm]}}
""")
    model.train()(torch.randn(3, 3, 4, 4))
    seqblocks.save(model, tmp_path / "model")
    again = seqblocks.load(tmp_path / "model")
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    counts = [value for name, value in again.named_buffers() if name.endswith("num_batches_tracked")]
    assert [*map(int, counts)] == ([1, 1] if own == "all" else [2])
