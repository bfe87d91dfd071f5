"""Axes by patterns: values equal einops on plain tensors; checked shapes, streams, lookahead and errors."""

import re
from itertools import product

import pytest
import torch
from einops import EinopsError, rearrange, reduce
from einops.parsing import ParsedExpression
from torch import Tensor

from seqblocks.analysis.check import load_text
from seqblocks.analysis.passes.lookahead import find
from seqblocks.errors import Fault, RunError
from seqblocks.model.builder import build_model, build_text
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.ops.axes import parse
from seqblocks.testing import check_law
from tests.draws import draw

IMAGE = "image: {size: [4, 6], channels: 3}"
GRID = "features: 8, grid: [4, 6]"


def built(entering: str, *steps: str) -> SequenceModel:
    lines = "".join(f"    - {step}\n" for step in steps)
    _, graph = load_text(f"seqblocks: 1\nmodel:\n  input: {{{entering}}}\n  steps:\n{lines}")
    assert graph
    return build_model(graph, device="cpu", dtype=torch.float64, seed=0)


def checked(model: SequenceModel) -> list[object]:
    output = model.spec.output
    assert output
    return list(output.axes[1:])


def agrees(model: SequenceModel, x: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-15)
    assert checked(model) == list(expected.shape[1:])


@pytest.mark.parametrize(
    ("entering", "shape", "pattern", "sizes"),
    [
        ("features: 6, length: 8", (8, 6), "seq (heads d) -> seq (d heads)", {"heads": 3}),
        ("features: 6, length: 8", (8, 6), "(seq n) features -> seq (n features)", {"n": 4}),
        ("features: 6, length: 8", (8, 6), "(n seq) features -> seq (n features)", {"n": 4}),
        ("features: 6, length: 8", (8, 6), "seq (n features) -> (seq n) features", {"n": 2}),
        ("features: 6, length: 8", (8, 6), "seq features -> features seq", {}),
        ("features: 6, length: 8", (8, 6), "seq features -> (seq features)", {}),
        (IMAGE, (3, 4, 6), "channels rows columns -> (rows columns) channels", {}),
        (IMAGE, (3, 4, 6), "channels (rows p) columns -> (channels p) rows columns", {"p": 2}),
        (IMAGE, (3, 4, 6), "channels rows columns -> (channels rows columns)", {}),
        (GRID, (24, 8), "seq (heads d) -> seq (d heads)", {"heads": 2}),
    ],
)
def test_rearrange(entering: str, shape: tuple[int, ...], pattern: str, sizes: dict[str, int]) -> None:
    written = "".join(f", {name}: {size}" for name, size in sizes.items())
    model = built(entering, f'rearrange: {{pattern: "{pattern}"{written}}}')
    x, (left, right) = draw(2, *shape), pattern.split("->")
    agrees(model, x, rearrange(x, f"batch {left} -> batch {right}", **sizes))


def test_patches_are_merged_and_shuffled_back() -> None:
    merge = 'rearrange: {pattern: "(rows p) (columns q) features -> rows columns (p q features)", p: 2, q: 3}'
    model = built(GRID, merge)
    x = draw(2, 24, 8)
    pattern = "batch (rows p columns q) features -> batch (rows columns) (p q features)"
    agrees(model, x, rearrange(x, pattern, p=2, q=3, rows=2))
    assert model.spec.output
    assert model.spec.output.grid == (2, 2)
    pattern = "rows columns (p q features) -> (rows p) (columns q) features"
    back = f'rearrange: {{pattern: "{pattern}", p: 2, q: 3, name: back}}'
    agrees(built(GRID, merge, back, "conv2d: {kernel: 1, init: {weight: ones, bias: zeros}}"), x, x)


def test_patches_become_an_image_again_and_images_of_other_sizes_do_too() -> None:
    cut = 'rearrange: {pattern: "channels (rows p) (columns q) -> rows columns (channels p q)", p: 2, q: 2}'
    pattern = "rows columns (channels p q) -> channels (rows p) (columns q)"
    uncut = f'rearrange: {{pattern: "{pattern}", p: 2, q: 2, name: uncut}}'
    model = built(IMAGE, cut, uncut)
    for rows, columns in ((4, 6), (8, 2)):
        x = draw(2, 3, rows, columns)
        torch.testing.assert_close(model(x), x, rtol=0, atol=0)
    with pytest.raises(RunError, match="input \\[2, 3, 5, 6\\] does not match"):
        model(draw(2, 3, 5, 6))


@pytest.mark.parametrize("by", ["mean", "sum", "max", "min"])
def test_reduce(by: str) -> None:
    x = draw(2, 8, 6)
    step = f'reduce: {{pattern: "(seq n) (heads d) -> seq d", n: 2, heads: 3, by: {by}}}'
    model = built("features: 6, length: 8", step)
    agrees(model, x, reduce(x, "b (s n) (h d) -> b s d", by, n=2, h=3))
    image = draw(2, 3, 4, 6)
    agrees(
        built(IMAGE, f'reduce: {{pattern: "channels rows columns -> channels", by: {by}}}'),
        image, reduce(image, "b c h w -> b c", by),
    )  # fmt: skip


def test_the_standard_deviation() -> None:
    x = draw(2, 8, 6)
    step = 'reduce: {pattern: "(seq n) features -> seq features", n: 4, by: std, eps: 0.01}'
    agrees(built("features: 6, length: 8", step), x, (x.unflatten(1, (2, 4)).var(2, correction=0) + 0.01).sqrt())
    whole = built("features: 6", 'reduce: {pattern: "seq features -> features", by: std}')
    still = torch.ones(2, 8, 6, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(whole(still), torch.full((2, 6), 1e-5**0.5, dtype=torch.float64))
    whole(still).sum().backward()
    assert still.grad is not None
    assert still.grad.isfinite().all()  # the root has an infinite slope at 0


def test_an_open_sequence_is_reduced_to_a_vector() -> None:
    model = built("features: 6", 'reduce: {pattern: "seq features -> features"}')
    for length in (1, 5):
        x = draw(2, length, 6)
        torch.testing.assert_close(model(x), x.mean(1))
    with pytest.raises(RunError, match="the sequence is empty"):
        model(draw(2, 0, 6))


@pytest.mark.parametrize("by", ["mean", "sum", "max", "min", "std"])
@pytest.mark.parametrize(
    ("pattern", "features"), [("seq (n width) -> seq width", 3), ("(seq n) features -> seq features", 6)]
)
def test_a_part_without_tokens_is_empty(pattern: str, features: int, by: str) -> None:
    model = built("features: 6", f'reduce: {{pattern: "{pattern}", n: 2, by: {by}}}')
    assert model(draw(2, 0, 6)).shape == (2, 0, features)


STACK = 'rearrange: {pattern: "(seq n) features -> seq (n features)", n: 3}'


@pytest.mark.parametrize(
    ("steps", "frame", "lookahead"),
    [
        (['rearrange: {pattern: "seq (heads d) -> seq (d heads)", heads: 2}', "causal_conv"], 1, 0),
        ([STACK, "causal_conv"], 3, 2),
        ([STACK, "causal_conv", 'rearrange: {pattern: "seq (n f) -> (seq n) f", n: 3, name: back}'], 3, 2),
        (['reduce: {pattern: "(seq n) f -> seq f", n: 2, by: max}', "causal_conv"], 2, 1),
    ],
)
def test_windows_stream(steps: list[str], frame: int, lookahead: int) -> None:
    model = built("features: 6", *steps)
    ahead = find(model.spec)
    assert ahead
    assert (model.frame_size, ahead.tokens) == (frame, lookahead)
    check_law(model, seq=7)


def test_permuted_tokens_have_no_resets_and_no_stream() -> None:
    model = built("features: 6", STACK)
    with pytest.raises(RunError, match=r"rearrange .* would mix the sequences .*: it reorders tokens"):
        model(draw(2, 6, 6), resets=torch.zeros(2, 6, dtype=torch.bool))
    with pytest.raises(RunError, match="does not match"):
        model(draw(2, 7, 6))
    mixed = built("features: 6, length: 4", 'rearrange: {pattern: "seq features -> features seq"}')
    with pytest.raises(RunError, match="it reads the whole input"):
        mixed.init_state(1)


@pytest.mark.parametrize("name", ["tensor", "reduction", "class", "axis_n"])
def test_an_axis_may_have_any_name(name: str) -> None:
    x = draw(2, 8, 6)
    for verb in ("rearrange", "reduce"):
        kept = f"seq ({name} f)" if verb == "rearrange" else "seq f"
        model = built("features: 6, length: 8", f'{verb}: {{pattern: "(seq {name}) f -> {kept}", {name}: 4}}')
        expected = rearrange(x, "b (s n) f -> b s (n f)", n=4) if verb == "rearrange" else x.reshape(2, 2, 4, 6).mean(2)
        agrees(model, x, expected)


def test_a_mixer_of_tokens_by_transposition() -> None:
    transpose = 'rearrange: {pattern: "seq features -> features seq", name: NAME}'
    steps = [transpose.replace("NAME", "there"), "linear: {features: 4}", transpose.replace("NAME", "back")]
    model = built("features: 6, length: 4", *steps)
    x, weight, bias = draw(2, 4, 6), model.get_parameter("linear.weight"), model.get_parameter("linear.bias")
    agrees(model, x, torch.einsum("bsf,ts->btf", x, weight) + bias[:, None])


def test_compiled_and_exported() -> None:
    model = built("features: 6", STACK, "linear: {features: 6}", 'reduce: {pattern: "seq (n f) -> seq f", n: 2}')
    x = draw(2, 9, 6)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


def test_a_grid_that_does_not_fit_the_input() -> None:
    model = built("features: 2, grid: [2, 3]", 'reduce: {pattern: "rows columns f -> rows f"}')
    torch.testing.assert_close(model(draw(1, 8, 2), grid=(4, 2)), draw(1, 8, 2).unflatten(1, (4, 2)).mean(2))
    with pytest.raises(RunError, match=r"grid=\(5, 5\) does not fit the 6 tokens"):
        model(draw(1, 6, 2), grid=(5, 5))
    x = draw(1, 8, 2)
    torch.testing.assert_close(model(x, grid=[4, 2]), model(x, grid=(4, 2)))
    for wrong in (3, "ab", (6,), (1, 2, 3), (-1, -6), (1.0, 6.0), (None, 6), torch.tensor([1, 6])):
        with pytest.raises(RunError, match="grid is a pair of whole numbers, rows and columns, not"):
            model(draw(1, 6, 2), grid=wrong)


def test_as_many_tokens_in_another_grid() -> None:
    turn = 'rearrange: {pattern: "rows columns f -> columns rows f"}'
    grid, x = "features: 1, grid: [2, 3]", draw(1, 6, 1)
    rows = built(grid, turn, 'reduce: {from: input, pattern: "rows columns f -> rows f"}')
    agrees(rows, x, x.unflatten(1, (2, 3)).mean(2))
    columns = built(grid, turn, "scan: {from: input, order: columns, steps: [{shift: 1}]}")
    turned = rearrange(x, "b (r c) f -> b (c r) f", r=2)
    shifted = torch.cat([torch.zeros_like(x[:, :1]), turned[:, :-1]], 1)
    agrees(columns, x, rearrange(shifted, "b (c r) f -> b (r c) f", r=2))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_call_with_another_grid_of_as_many_tokens(wrapped: bool) -> None:
    """The grid of the call has as many tokens as the grid of a later step, and the spec cannot tell them apart."""
    turn, rows = 'rearrange: {pattern: "rows columns f -> columns rows f"}', "rows columns f -> rows f"
    steps = [turn, f'reduce: {{from: input, pattern: "{rows}", as: a}}']
    if wrapped:
        steps = ["identity: {as: x}", f"residual: [{{{turn}}}]", f'reduce: {{from: x, pattern: "{rows}"}}']
    model, x = built("features: 2, grid: [4, 4]", *steps), draw(1, 16, 2)
    torch.testing.assert_close(model(x, grid=(2, 8)), x.unflatten(1, (2, 8)).mean(2))


@pytest.mark.parametrize("order", ["forward", "reverse", "[rows, reverse]"])
def test_a_scan_whose_steps_turn_the_grid(order: str) -> None:
    turn = '{rearrange: {pattern: "rows columns f -> columns rows f"}}'
    steps = f"scan: {{order: {order}, merge: mean, steps: [{turn}]}}", 'reduce: {pattern: "rows columns f -> rows f"}'
    model, x = built("features: 1, grid: [2, 3]", *steps), draw(1, 6, 1)
    agrees(model, x, x.unflatten(1, (2, 3)).mean(1))


def test_a_scan_over_columns_reads_an_image_cut_in_its_steps() -> None:
    """Two grids in the scan: the tokens that it reorders are 3 x 2, and those that its steps cut are 2 x 3."""
    text = """
    seqblocks: 1
    model:
      inputs: {x: {features: 2, grid: [2, 3]}, picture: {image: {size: [2, 3], channels: 2}}}
      steps:
        - scan:
            from: x
            order: columns
            steps:
              - patch_embed: {from: picture, patch: 1, features: 2, as: cut}
              - conv2d: {from: x, kernel: 3, name: of_tokens}
              - add: {with: cut, as: both}
              - conv2d: {from: cut, kernel: 3, name: of_image}
              - add: {with: both}
    """
    model = build_text(text, device="cpu", dtype=torch.float64, seed=0)
    x, picture = draw(1, 6, 2), draw(1, 2, 2, 3)
    weights = model.state_dict()

    def conv(image: Tensor, name: str) -> Tensor:
        weight, bias = weights[f"scan.{name}.weight"], weights[f"scan.{name}.bias"]
        groups = image.shape[1] // weight.shape[1]
        return torch.nn.functional.conv2d(image, weight, bias, padding=weight.shape[-1] // 2, groups=groups)

    cut = conv(picture, "cut")
    turned = rearrange(x, "b (r c) f -> b f c r", r=2)
    inside = rearrange(cut + conv(cut, "of_image"), "b f r c -> b (r c) f") + rearrange(
        conv(turned, "of_tokens"), "b f c r -> b (c r) f"
    )
    torch.testing.assert_close(model(x=x, picture=picture), rearrange(inside, "b (c r) f -> b (r c) f", r=2))


def test_images_of_other_sizes_with_as_many_tokens() -> None:
    text = """
    seqblocks: 1
    model:
      inputs: {x: {image: {size: 4, channels: 1}}, other: {image: {size: 4, channels: 1}}}
      steps:
        - patch_embed: {from: x, patch: 1, features: 2, as: a}
        - patch_embed: {from: other, patch: 1, features: 2, as: b}
        - reduce: {from: a, pattern: "rows columns f -> rows f", as: of_x}
        - reduce: {from: b, pattern: "rows columns f -> rows f", as: of_other}
      outputs: [of_x, of_other]
    """
    _, graph = load_text(text)
    assert graph
    model = build_model(graph, device="cpu", dtype=torch.float64)
    x, other = draw(1, 1, 2, 8), draw(1, 1, 8, 2)
    found = model(x=x, other=other)
    for name, image in (("a", x), ("b", other)):
        step = model.get_submodule(name)
        tokens = torch.nn.functional.conv2d(image, step.weight, step.bias)
        expected = rearrange(tokens, "b f r c -> b r c f").mean(2)
        torch.testing.assert_close(found["of_x" if name == "a" else "of_other"], expected)


@pytest.mark.parametrize(
    ("entering", "pattern", "sizes", "found"),
    [
        ("features: 6, length: 8", "seq d -> d seq", (5, 6), "makes 5 features of [2, 5, 6], not 8"),
        ("features: 6, length: 8", "seq d -> (d seq)", (9, 6), "makes 54 features of [2, 9, 6], not 48"),
        ("image: {size: 8, channels: 3}", "channels rows columns -> rows (columns channels)", (3, 8, 4), "makes 12"),
    ],
)  # fmt: skip
def test_features_made_of_tokens_need_as_many_tokens(
    entering: str, pattern: str, sizes: tuple[int, ...], found: str
) -> None:
    model = built(entering, f"rearrange: '{pattern}'", "linear: 4")
    with pytest.raises(RunError, match=f"^rearrange {re.escape(found)}.*must be"):
        model(draw(2, *sizes))
    frames = built("features: 6, length: 8", "rearrange: {pattern: '(seq n) d -> seq (d n)', n: 2}", "linear: 4")
    assert frames(draw(2, 12, 6)).shape == (2, 6, 4)  # the width of a frame does not depend on the length


def test_a_context_of_a_wrong_number_of_tokens_is_named() -> None:
    text = """
    seqblocks: 1
    model:
      inputs: {x: {features: 8}, scene: {features: 6, grid: [3, 4]}}
      steps:
        - conv2d: {from: scene, as: seen}
        - linear: {features: 8, as: memory}
        - linear: {from: x, features: 8, as: q}
        - cross_attention: {q: q, k: memory, v: memory, heads: 2}
    """
    _, graph = load_text(text)
    assert graph
    model = build_model(graph, device="cpu", dtype=torch.float64)
    message = "the input scene has 10 tokens, and its grid is 3 x 4: pass 12 tokens"
    with pytest.raises(RunError, match=message):
        model(x=draw(1, 5, 8), scene=draw(1, 10, 6))
    with pytest.raises(RunError, match=message):
        model.init_state(1, scene=draw(1, 10, 6))


def test_the_grid_of_an_input_that_does_not_stream() -> None:
    text = """
    seqblocks: 1
    model:
      inputs: {x: {features: 2, grid: [2, 3]}, other: {features: 2, grid: [3, 2]}}
      steps:
        - reduce: {from: other, pattern: "rows columns f -> f columns", as: b}
        - reduce: {from: x, pattern: "rows columns f -> f columns", as: a}
      outputs: [b, a]
    """
    _, graph = load_text(text)
    assert graph
    x, other = draw(1, 6, 2), draw(1, 6, 2) + 1
    found = build_model(graph, device="cpu", dtype=torch.float64)(x=x, other=other)
    torch.testing.assert_close(found["a"], reduce(x, "b (r c) f -> b f c", "mean", r=2))
    torch.testing.assert_close(found["b"], reduce(other, "b (r c) f -> b f c", "mean", r=3))


def test_a_pattern_may_be_a_value_of_let() -> None:
    text = """
seqblocks: 1
let: {merged: "(seq n) f -> seq (n f)"}
model:
  input: {features: 4}
  steps: [{rearrange: {pattern: merged, n: 2}}]
"""
    x = torch.randn(2, 6, 4)
    assert torch.equal(build_text(text)(x), rearrange(x, "b (s n) f -> b s (n f)", n=2))
    other = build_text(text, set={"merged": "(seq n) f -> seq (f n)"})
    assert torch.equal(other(x), rearrange(x, "b (s n) f -> b s (f n)", n=2))


@pytest.mark.filterwarnings("ignore:It is discouraged")
def test_patterns_are_read_as_einops_reads_them() -> None:
    short = product(("a", "b", "_", "1", "(", ")", " "), repeat=4)
    for side in map("".join, (*short, "a as b", "axis b", "a_1 (b c)", "((a))", "a (b\tc)")):
        try:
            theirs = ParsedExpression(side.strip())
        except EinopsError:
            theirs = None
        if theirs is None or theirs.has_non_unitary_anonymous_axes:
            with pytest.raises(Fault):
                parse(f"{side} -> a")
        else:
            assert parse(f"{side} -> a").left == tuple(map(tuple, theirs.composition))
