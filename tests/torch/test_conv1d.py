"""Convolutions with stride, groups and dilation: against a sum over taps, torch's own modules, and the state law."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import seqblocks
from seqblocks.errors import RunError
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.testing import check_law, check_lookahead
from tests.draws import draw


def built(*steps: str, dtype: torch.dtype = torch.float64, features: int = 6) -> SequenceModel:
    lines = "".join(f"    - {step}\n" for step in steps)
    text = f"seqblocks: 1\nmodel:\n  input: {{features: {features}}}\n  steps:\n{lines}"
    return seqblocks.build_text(text, dtype=dtype, device="cpu", seed=0)


def convolved(x: Tensor, weight: Tensor, bias: Tensor, stride: int, dilation: int, groups: int) -> Tensor:
    """Compute the definition for each output and tap: the last tap is at the last token of a frame."""
    batch, length, _ = x.shape
    out, taps = weight.shape[0] // groups, weight.shape[2]
    y = bias.expand(batch, length // stride, -1).clone()
    for j in range(length // stride):
        for k in range(taps):
            t = (j + 1) * stride - 1 - (taps - 1 - k) * dilation
            if 0 <= t < length:
                parts = x[:, t].chunk(groups, 1)
                made = [part @ weight[g * out : (g + 1) * out, :, k].t() for g, part in enumerate(parts)]
                y[:, j] += torch.cat(made, 1)
    return y


def transposed(x: Tensor, weight: Tensor, bias: Tensor, stride: int, groups: int) -> Tensor:
    """Compute the definition: each token adds to as many outputs as there are taps."""
    batch, length, width = x.shape
    y = bias.expand(batch, length * stride, -1).clone()
    for j in range(length):
        for k in range(weight.shape[2]):
            t = j * stride + k
            if 0 <= t < length * stride:
                parts = x[:, j].chunk(groups, 1)
                rows = weight[..., k].split(width // groups)
                y[:, t] += torch.cat([part @ row for part, row in zip(parts, rows, strict=True)], 1)
    return y


def agree(model: SequenceModel, x: Tensor, expected: Tensor) -> None:
    """Assert values and gradients to within the rounding of some hundred products of numbers of size 1."""
    y, leaves = model(x), [x, *model.parameters()]
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    weights = draw(*y.shape, seed=2)
    found = torch.autograd.grad((y * weights).sum(), leaves)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), leaves)
    torch.testing.assert_close(found, expected_gradients, rtol=1e-12, atol=1e-12)


CONVOLUTIONS = [
    (3, 1, 1, 1), (3, 1, 4, 1), (1, 1, 1, 2), (4, 4, 1, 1), (8, 4, 1, 2), (7, 3, 2, 1), (1, 4, 1, 1), (2, 4, 1, 1),
    (3, 2, 1, 2), (20, 2, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "stride", "dilation", "groups"), CONVOLUTIONS)
def test_values_and_gradients(kernel: int, stride: int, dilation: int, groups: int) -> None:
    model = built(
        f"conv1d: {{features: 4, kernel: {kernel}, stride: {stride}, dilation: {dilation}, groups: {groups}}}"
    )
    x = draw(2, 12, 6).requires_grad_()
    weight, bias = model.get_parameter("conv1d.weight"), model.get_parameter("conv1d.bias")
    assert weight.shape == (4, 6 // groups, kernel)
    agree(model, x, convolved(x, weight, bias, stride, dilation, groups))


@pytest.mark.parametrize(("kernel", "stride", "groups"), [(4, 4, 1), (8, 4, 2), (9, 2, 1), (2, 4, 1), (1, 3, 2)])
def test_transposed_values_and_gradients(kernel: int, stride: int, groups: int) -> None:
    turned = f"conv_transpose1d: {{features: 4, kernel: {kernel}, stride: {stride}, groups: {groups}}}"
    model = built(f"downsample: {{factor: {stride}}}", turned)
    x = draw(2, 3 * stride, 6).requires_grad_()
    weight, bias = model.get_parameter("conv_transpose1d.weight"), model.get_parameter("conv_transpose1d.bias")
    assert weight.shape == (6, 4 // groups, kernel)
    agree(model, x, transposed(x.unflatten(1, (3, stride)).mean(2), weight, bias, stride, groups))


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation", "padding"),
    [(3, 1, 1, 1), (3, 2, 1, 1), (31, 1, 1, 15), (7, 1, 3, 9), (8, 4, 1, 2), (10, 5, 1, 3), (4, 4, 1, 0)],
)
def test_centred_windows_match_torch(kernel: int, stride: int, dilation: int, padding: int) -> None:
    """Whisper's stem, Conformer's depthwise convolution and audio codecs, each with their own padding."""
    official = torch.nn.Conv1d(6, 4, kernel, stride, padding, dilation, dtype=torch.float64)
    model = built(
        f"conv1d: {{features: 4, kernel: {kernel}, stride: {stride}, dilation: {dilation}, causal: false, name: c}}"
    )
    model.get_submodule("c").load_state_dict(official.state_dict())
    x = draw(2, 40, 6)
    torch.testing.assert_close(model(x), official(x.mT)[..., : 40 // stride].mT, rtol=1e-12, atol=1e-12)
    check_lookahead(model, seq=40 // model.frame_size)
    if kernel - stride > 1:
        with pytest.raises(RunError, match=r"cannot stream: it reads later tokens \(causal: false\)"):
            model.init_state(1)
    else:
        check_law(model)  # the window ends with the frame


@pytest.mark.parametrize(("kernel", "stride"), [(8, 4), (4, 2), (5, 2), (3, 1), (2, 4)])
def test_centred_transposed_windows_match_torch(kernel: int, stride: int) -> None:
    padding = max(0, (kernel - stride + 1) // 2)
    official = torch.nn.ConvTranspose1d(6, 4, kernel, stride, padding, dtype=torch.float64)
    turned = f"conv_transpose1d: {{features: 4, kernel: {kernel}, stride: {stride}, causal: false, name: c}}"
    model = built(f"downsample: {{factor: {stride}, method: last}}", turned)
    model.get_submodule("c").load_state_dict(official.state_dict())
    x = draw(2, 5, 6)
    y = model(x.repeat_interleave(stride, 1))
    expected = official(x.mT).mT
    assert y.shape == (2, 5 * stride, 4)
    torch.testing.assert_close(y[:, : expected.shape[1]], expected[:, : y.shape[1]], rtol=1e-12, atol=1e-12)
    check_lookahead(model, seq=12)


def test_causal_padding_matches_official_codecs() -> None:
    """EnCodec pads by kernel - stride on the left, and trims as much on the right of a transposed convolution."""
    model = built(
        "conv1d: {features: 8, kernel: 8, stride: 4, name: down}",
        "conv_transpose1d: {features: 6, kernel: 8, stride: 4, name: up}",
    )
    down = torch.nn.Conv1d(6, 8, 8, 4, dtype=torch.float64)
    up = torch.nn.ConvTranspose1d(8, 6, 8, 4, dtype=torch.float64)
    model.get_submodule("down").load_state_dict(down.state_dict())
    model.get_submodule("up").load_state_dict(up.state_dict())
    x = draw(2, 16, 6)
    torch.testing.assert_close(model(x), up(down(pad(x.mT, (4, 0))))[..., :-4].mT, rtol=1e-12, atol=1e-12)


WIDE = "{features: 6, kernel: 6, stride: 3}"
LAWFUL = [
    ["conv1d: {features: 5, kernel: 4, dilation: 3}"],
    ["conv1d: {features: 5, kernel: 7, stride: 3}"],
    ["conv1d: {features: 5, kernel: 1, stride: 3}"],
    ["conv1d: {features: 8, kernel: 6, stride: 4}", "conv_transpose1d: {features: 6, kernel: 9, stride: 4, groups: 2}"],
    ["conv1d: {features: 8, kernel: 4, stride: 4}", "conv_transpose1d: {features: 6, kernel: 3, stride: 2}"],
    ["downsample: {factor: 2}", "conv1d: {features: 4, kernel: 5, stride: 2}", "silu", "upsample: {factor: 4}"],
    [f"residual: [{{conv1d: {WIDE}}}, {{conv_transpose1d: {WIDE}}}]"],
]  # fmt: skip


@pytest.mark.parametrize("steps", LAWFUL)
def test_state_law(steps: list[str]) -> None:
    check_law(built(*steps), seq=12)


def test_resets_cut_windows() -> None:
    model = built("conv1d: {features: 6, kernel: 3, dilation: 2}", "conv1d: {name: b, features: 6, kernel: 4}")
    check_law(model, seq=20, resets=[(0, 3), (0, 4), (1, 0), (1, 12)])
    x, resets = draw(2, 9, 6), torch.zeros(2, 9, dtype=torch.bool)
    resets[:, 4] = True
    spoilt = x.clone()
    spoilt[:, 2] = torch.nan
    torch.testing.assert_close(model(spoilt, resets=resets)[:, 4:], model(x[:, 4:]), rtol=1e-12, atol=1e-12)


def test_resets_are_refused_where_a_window_may_hold_two_sequences() -> None:
    resets = torch.zeros(2, 8, dtype=torch.bool)
    for step in ("conv1d: {features: 6, kernel: 4, stride: 2}", "conv1d: {features: 6, kernel: 3, causal: false}"):
        with pytest.raises(RunError, match="would mix the sequences"):
            built(step)(draw(2, 8, 6), resets=resets)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 8), (2, 0), (0, 0), (1, 4)])
@pytest.mark.parametrize(("steps", "coarser"), [(LAWFUL[3], 1), (LAWFUL[4], 2)])
def test_empty_and_short_batches(steps: list[str], coarser: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    model = built(*steps, dtype=dtype)
    x = torch.zeros(*shape, 6, dtype=dtype, requires_grad=True)
    y, state = model(x, return_state=True)
    assert y.shape == (shape[0], shape[1] // coarser, 6)
    assert y.dtype == dtype
    assert all(part.isfinite().all() for step in state.values() for part in step.values())


def test_bfloat16_is_close_to_float64() -> None:
    """Sums of 48 products of numbers of size 1: inputs have a relative error of 2^-9 each, and the result another 2^-9.
    """
    step = "conv1d: {features: 8, kernel: 8, stride: 4}"
    exact, rounded = built(step), built(step, dtype=torch.bfloat16)
    exact.load_state_dict(rounded.state_dict())
    x = draw(2, 16, 6).bfloat16()
    torch.testing.assert_close(rounded(x).double(), exact(x.double()), rtol=2**-8, atol=2**-7)


def test_lengths_that_hold_no_whole_frames_are_refused() -> None:
    with pytest.raises(RunError, match="conv1d by 4 needs a multiple of that many tokens, not 6"):
        built("conv1d: {features: 6, kernel: 4, stride: 4}")(draw(2, 6, 6))


def test_a_reverse_scan_turns_the_windows() -> None:
    steps = "{conv1d: {features: 4, kernel: 5, stride: 2}}, {conv_transpose1d: {features: 6, kernel: 4, stride: 2}}"
    forward, reverse = built(f"scan: [{steps}]"), built(f"scan: {{order: reverse, steps: [{steps}]}}")
    reverse.load_state_dict(forward.state_dict())
    x = draw(2, 8, 6)
    torch.testing.assert_close(reverse(x), forward(x.flip(1)).flip(1))
    check_lookahead(reverse, seq=8)


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation", "first"), [(4, 1, 1, 3), (3, 1, 2, 4), (10, 5, 1, 1), (2, 2, 1, 0)]
)
def test_a_slice_leaves_an_unpadded_convolution(kernel: int, stride: int, dilation: int, first: int) -> None:
    """The first and the last convolution of wav2vec 2.0 are among them."""
    official = torch.nn.Conv1d(6, 4, kernel, stride, 0, dilation, dtype=torch.float64)
    model = seqblocks.build_text(f"""
    seqblocks: 1
    model:
      input: {{features: 6, length: 30}}
      steps:
        - conv1d: {{features: 4, kernel: {kernel}, stride: {stride}, dilation: {dilation}, name: c}}
        - slice: {{first: {first}}}
    """, dtype="float64")
    with torch.no_grad():
        model.c.weight.copy_(official.weight)
        model.c.bias.copy_(official.bias)
    x = torch.randn(2, 30, 6, dtype=torch.float64)
    torch.testing.assert_close(model(x), official(x.mT).mT)
