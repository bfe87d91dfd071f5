"""Weights in other layouts: names and shapes of every bundled map, and the same bits after a round trip."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import seqblocks
from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.analysis.checkpoint_maps.translation import layouts
from seqblocks.checkpoint import convert
from seqblocks.checkpoint.convert import official_weights
from seqblocks.checkpoint.official import translated
from seqblocks.checkpoint.weight_files import Weights, weights_in
from seqblocks.cli.main import main
from seqblocks.graph import ModelSpec
from seqblocks.language.spec_files import bundled
from seqblocks.recipes import Concat, Cut, Rearrange, Recipe, Reshape, Slice, Split, Stack, Transpose
from tests.sampled import sampled

safetensors = pytest.importorskip("safetensors.torch", reason="an optional extra; the test extra installs it")

MODELS = [name for name, path in bundled().items() if path.parent.name == "models"]
HUB = Path(__file__).parent.parent / "golden" / "hub" / "official_names.txt"


def official() -> Any:
    import importlib.util

    path = Path(__file__).with_name("test_official.py")
    found = importlib.util.spec_from_file_location("of_official_names", path)
    module = importlib.util.module_from_spec(found)  # type: ignore[arg-type]
    found.loader.exec_module(module)  # type: ignore[union-attr]
    return module


OFFICIAL = official()
PUBLISHED: dict[str, dict[str, tuple[int, ...]]] = OFFICIAL.SHAPES


def for_parameters(spec: ModelSpec, make: Any) -> dict[str, Tensor]:
    """Return the result of `make` for the shape of each parameter."""
    return {item.name: make(item.parameter.shape) for item in graph.parameters(spec.graph) if not item.tied}


def weights(tensors: dict[str, Tensor]) -> Weights:
    return Weights(tensors, tensors.__getitem__)


def read(some: Weights) -> dict[str, Tensor]:
    return {name: some.read(name) for name in some.headers}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Assert equal names, shapes, dtypes and bits."""
    same = a.keys() == b.keys() and all(a[name].dtype == b[name].dtype for name in a)
    return same and all(torch.equal(a[name], b[name]) for name in a)


def small(name: str) -> ModelSpec:
    """Return a bundled model, as small as its values allow."""
    wishes: dict[str, Any] = {"depth": 4, "vocabulary": 11, "classes": 5, "rounds": 1, "experts": 8}
    widths = [{"dim": 64, "head": 8, "key": 16}, {"dim": 64, "heads": 4}, {"dim": 32}, {}]
    for some in [{**wishes, **width} for width in widths] + widths:
        given = dict(some)
        text = bundled()[name].read_text()
        given = {key: value for key, value in given.items() if f"\n  {key}: " in text.split("model:")[0]}
        try:
            return check.load_model(name, given)
        except seqblocks.SpecError:
            continue
    raise AssertionError(f"{name} has no small size")


@pytest.mark.slow
@pytest.mark.parametrize("name", OFFICIAL.marked(MODELS, pytest.mark.long))  # narrower, all sizes are nearly the same
def test_every_bundled_map_is_written_and_read_bit_for_bit(name: str) -> None:
    spec = small(name)
    generator = torch.Generator().manual_seed(0)
    ours = for_parameters(spec, lambda shape: torch.randn(shape, generator=generator).to(torch.bfloat16))
    assert sum(tensor.numel() for tensor in ours.values()) < 130_000_000
    first: dict[str, Tensor] = {}
    for layout in layouts(spec):
        official = read(official_weights(spec, weights(ours), layout))
        back, left_out = translated(spec, weights(official))
        assert not any(left_out)
        assert equal(read(back), ours)
        again = read(official_weights(spec, back, layout))
        assert equal(again, official)
        first = first or official
        there, _ = translated(spec, weights(again))
        assert equal(read(official_weights(spec, there, layouts(spec)[0])), first)


@pytest.mark.parametrize("case", sampled(OFFICIAL.marked(PUBLISHED), every=6))
def test_names_and_shapes_are_those_of_the_releases(case: str) -> None:
    """All names of all bundled maps are tested at full size. A tied head is not written."""
    spec = check.load_model(case.split()[0])
    ours = for_parameters(spec, lambda shape: torch.empty(shape, device="meta"))
    expected = dict(PUBLISHED[case])
    if any(item.tied for item in graph.parameters(spec.graph)):
        expected.pop("lm_head.weight", None)
    found = [official_weights(spec, Weights(ours, ours.__getitem__, True), layout) for layout in layouts(spec)]
    shapes = [{name: tuple(header.shape) for name, header in each.headers.items()} for each in found]
    assert expected in shapes


def test_the_fused_projections_of_xlstm() -> None:
    """The layout is that of `weight_mode: fused` in transformers."""
    spec = check.load_model("xlstm_7b")
    ours = for_parameters(spec, lambda shape: torch.empty(shape, device="meta"))
    headers = official_weights(spec, Weights(ours, ours.__getitem__, True), "fused").headers
    assert {name[18:]: list(headers[name].shape) for name in headers if name.startswith("backbone.blocks.3.")} == {
        "norm_mlstm.weight": [4096], "norm_ffn.weight": [4096], "mlstm_layer.qkv_opreact.weight": [12288, 4096],
        "mlstm_layer.ifgate_preact.weight": [16, 4096], "mlstm_layer.ifgate_preact.bias": [16],
        "mlstm_layer.multihead_norm.weight": [4096], "mlstm_layer.out_proj.weight": [4096, 4096],
        "ffn.proj_up_gate_z.weight": [21888, 4096], "ffn.proj_down.weight": [4096, 10944],
    }  # fmt: skip


# --- recipes --------------------------------------------------------------------------------------------------------

sizes = st.integers(1, 4)


@st.composite
def recipes(draw: Any) -> tuple[Recipe, tuple[int, ...]]:
    """Draw a recipe that uses all of its official tensors, and the shape of our parameter."""
    shape = tuple(draw(st.lists(sizes, min_size=1, max_size=3)))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    kind = draw(st.sampled_from(["concat", "cut", "stack", "split", "transpose", "reshape", "rearrange", "slice"]))
    if kind in ("concat", "cut"):
        cut = draw(st.lists(sizes, min_size=1, max_size=3))
        shape = tuple(sum(cut) if at == axis % len(shape) else size for at, size in enumerate(shape))
        names, whole = tuple("abc"[: len(cut)]), tuple(cut)
        return Concat(names, axis, whole) if kind == "concat" else Cut(names, whole, 0, axis), shape
    if kind == "stack":
        return Stack(tuple("abcd"[: shape[axis]]), axis), shape
    if kind == "split":
        recipe = Split("a", 1, 0, axis % len(shape))
        return Split("a", 1, 0, recipe.axis, draw(st.sampled_from(recipe._shapes(shape)))), shape
    if kind == "transpose":
        shape = (*shape, draw(sizes))
        return Transpose("a", draw(st.sampled_from([None, Transpose("a")._swapped(shape, 2)]))), shape
    if kind == "reshape":
        return Reshape("a", draw(st.sampled_from([(math.prod(shape),), (1, *shape), shape[::-1]]))), shape
    if kind == "rearrange":
        names = "xyz"[: len(shape)]
        order = draw(st.permutations(names))
        return Rearrange("a", f"({' '.join(order)}) -> {' '.join(names)}", dict(zip(names, shape, strict=True))), shape
    groups = draw(sizes)
    shape = tuple(size * groups if at == axis % len(shape) else size for at, size in enumerate(shape))
    return Slice("a", 0, axis, groups), shape


@given(recipes())
def test_a_recipe_reads_what_it_writes(case: tuple[Recipe, tuple[int, ...]]) -> None:
    recipe, shape = case
    assert recipe.misfit("w", shape) is None
    ours = torch.arange(math.prod(shape)).view(shape)
    outs = [torch.full(extent.shape, -1) for extent in recipe.extents("w", shape)]
    for at, out in enumerate(outs):
        recipe.put("w", ours, at, out)
        assert (out >= 0).all()
    assert torch.equal(recipe.make("w", shape, *outs), ours)


@given(st.lists(sizes, min_size=1, max_size=3), st.lists(sizes, min_size=1, max_size=4), st.integers(0, 1))
def test_cuts_of_joined_tensors_read_what_they_write(ours: list[int], theirs: list[int], axis: int) -> None:
    """Tensors have any sizes and are cut at other places than they are joined."""
    theirs.append(max(sum(ours) - sum(theirs), 1))
    ours.append(sum(theirs) - sum(ours) or 1)
    theirs[-1] += sum(ours) - sum(theirs)
    starts = [sum(ours[:at]) for at in range(len(ours))]
    names = tuple("abcde"[: len(theirs)])
    shapes = [(size, 2)[:: 1 - 2 * axis] for size in ours]
    recipes = [Cut(names, tuple(theirs), start, axis) for start in starts]
    parts = [torch.randn(shape) for shape in shapes]
    outs = [torch.full(extent.shape, torch.nan) for extent in recipes[0].extents("w", shapes[0])]
    for recipe, part in zip(recipes, parts, strict=True):
        assert recipe.misfit("w", tuple(part.shape)) is None
        for at, out in enumerate(outs):
            recipe.put("w", part, at, out)
    assert torch.equal(torch.cat(outs, axis), torch.cat(parts, axis))
    for recipe, part in zip(recipes, parts, strict=True):
        assert torch.equal(recipe.make("w", tuple(part.shape), *outs), part)


def test_a_part_is_read_without_the_others() -> None:
    """A tensor of 2 TB, of which each number is the same one in memory."""
    whole = torch.ones(1).expand(2**11, 2**14, 2**14)
    sizes = {"expert": 2**11, "half": 2}
    recipe = Rearrange("w", "expert column (row half) -> (expert half) row column", sizes, 2 * 5 + 1)
    assert recipe.make("ours", (2**13, 2**14), whole).shape == (2**13, 2**14)


@given(st.integers(1, 3), st.integers(1, 3), sizes, sizes, st.permutations("abrc"), st.booleans())
def test_parts_by_index_read_what_they_write(
    first: int, second: int, rows: int, columns: int, order: list[str], joined: bool
) -> None:
    """One official tensor contains all parts, in any order of its axes."""
    left = f"({' '.join(order)})" if joined else " ".join(order)
    given = {"a": first, "b": second, "r": rows, "c": columns}
    recipes = [Rearrange("w", f"{left} -> (a b) r c", given, at) for at in range(first * second)]
    parts = [torch.randn(rows, columns) for _ in recipes]
    (extent,) = recipes[0].extents("w", (rows, columns))
    out = torch.full(extent.shape, torch.nan)
    for recipe, part in zip(recipes, parts, strict=True):
        assert recipe.misfit("w", (rows, columns)) is None
        recipe.put("w", part, 0, out)
    expected = torch.stack(parts).view(first, second, rows, columns).permute(*map("abrc".index, order))
    assert torch.equal(out, expected.reshape(out.shape))
    for recipe, part in zip(recipes, parts, strict=True):
        assert torch.equal(recipe.make("w", (rows, columns), out), part)


PARTS = """
seqblocks: 1
model:
  input: {features: 6}
  steps:
    - linear: {features: 4, bias: false, as: a}
    - linear: {from: input, features: 4, bias: false, as: b}
    - linear: {from: [a, b], features: 6, bias: false, name: c}
checkpoint: MAP
"""

NUMBERED = "rearrange: w, pattern: 'p c r -> p r c', p: 2, index"


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("{a.weight: {slice: w}, b.weight: {slice: w, start: 4}}", None),
        ("{a.weight: {slice: w, groups: 2}, b.weight: {slice: w, start: 2, groups: 2}}", None),
        ("{a.weight: {split: w, parts: 2, part: 1}, b.weight: {split: w, parts: 2, part: 0}}", None),
        ("{a.weight: {real: w}, b.weight: {imag: w}}", None),
        (f"{{a.weight: {{{NUMBERED}: 1}}, b.weight: {{{NUMBERED}: 0}}}}", None),
        (f"{{a.weight: {{{NUMBERED}: 1}}, b.weight: {{{NUMBERED}: 1}}}}", "they leave a gap at 0"),
        ("{a.weight: {slice: w}, b.weight: {slice: w, start: 5}}",
         r"w cannot be written from a\.weight, b\.weight: they leave a gap at 4"),
        ("{a.weight: {slice: w}, b.weight: {slice: w, start: 3}}", ": they overlap at 3"),
        ("{a.weight: {slice: w}, b.weight: {slice: w, start: 4, axis: 1}}", ": they divide it differently"),
        ("{a.weight: {slice: w, start: 2}}", ": they leave a gap at 0"),
        ("{a.weight: w, b.weight: {slice: w}}", ": one of them is the whole tensor"),
        ("{a.weight: {split: w, parts: 3, part: 0}, b.weight: {split: w, parts: 3, part: 1}}", "they end at 2 of 3"),
        ("{a.weight: {real: w}}", "they end at 1 of 2"),
        ("{a.weight: {reshape: w}}",
         r"a\.weight cannot be written: it is a reshape of w, whose shape is unknown: add `shape: \[\.\.\.\]`"),
        ("{a.weight: {concat: [u, v, w]}}", r"written: \[4, 6\] is not 3 equal parts: add `sizes: \[\.\.\.\]"),
    ],
)  # fmt: skip
def test_parts_make_up_a_tensor_or_are_reported(table: str, reason: str | None) -> None:
    model = seqblocks.build_text(PARTS.replace("MAP", table))
    ours = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if reason is None:
        official = read(official_weights(model.spec, weights(ours), "official"))
        assert equal(read(translated(model.spec, weights(official))[0]), ours)
        return
    with pytest.raises(seqblocks.RunError, match=reason):
        official_weights(model.spec, weights(ours), "official")


def test_parts_of_one_tensor_are_of_one_dtype() -> None:
    model = seqblocks.build_text(PARTS.replace("MAP", "{a.weight: {slice: w}, b.weight: {slice: w, start: 4}}"))
    ours = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    ours["a.weight"] = ours["a.weight"].half()
    with pytest.raises(seqblocks.RunError, match=r"w combines a\.weight, b\.weight, whose dtypes differ: torch\.f"):
        official_weights(model.spec, weights(ours), "official")


# --- folders --------------------------------------------------------------------------------------------------------

CHANGES = {"dim": 16, "depth": 2, "vocabulary": 11}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    seqblocks.save(seqblocks.build("mamba_130m", set=CHANGES, dtype="bf16"), tmp_path / "m")
    return tmp_path / "m"


def test_folders_there_and_back(saved: Path, tmp_path: Path) -> None:
    ours = read(weights_in(saved))
    convert(saved, "hub", tmp_path / "hub", shard_size="1KB")
    assert (tmp_path / "hub" / "model.safetensors.index.json").exists()
    convert(tmp_path / "hub", "official", tmp_path / "official", spec="mamba_130m", set=CHANGES)
    names = set(weights_in(tmp_path / "official").headers)
    assert {"backbone.embedding.weight", "backbone.layers.1.mixer.A_log"} <= names
    assert "backbone.embeddings.weight" in weights_in(tmp_path / "hub").headers
    convert(tmp_path / "official", "hub", tmp_path / "again", spec="mamba_130m", set=CHANGES)
    assert equal(read(weights_in(tmp_path / "again")), read(weights_in(tmp_path / "hub")))
    convert(tmp_path / "official", "seqblocks", tmp_path / "ours", spec="mamba_130m", set=CHANGES)
    assert equal(read(weights_in(tmp_path / "ours")), ours)
    again, before = seqblocks.load(tmp_path / "ours"), seqblocks.load(saved)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(again(ids), before(ids))


def test_the_config_is_copied(saved: Path, tmp_path: Path) -> None:
    convert(saved, "hub", tmp_path / "hub")
    config = {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 11}
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "hub", "official", tmp_path / "official")
    model = seqblocks.from_pretrained(tmp_path / "official")
    assert torch.equal(model(torch.tensor([[1, 2]])), seqblocks.load(saved)(torch.tensor([[1, 2]])))


@pytest.mark.parametrize(
    ("to", "out", "more", "message"),
    [
        ("hbu", "new", {}, "there is no layout 'hbu'; use seqblocks, official, hub"),
        ("hub", "m", {}, "m is not empty; use a new folder"),
        ("hub", "new/model.safetensors", {}, "a folder is written, but .* is the name of a file. Use .*new/model$"),
        ("hub", "m/spec.yaml/new", {}, "cannot be written: Not a directory"),
        ("hub", "new", {"spec": "mamba_130m"}, "m contains its own spec: do not pass another one"),
        ("hub", "new", {"shard_size": "much"}, "the shard size must be a number of bytes"),
    ],
)
def test_invalid_arguments(saved: Path, to: str, out: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(seqblocks.UsageError, match=message):
        convert(saved, to, saved.parent / out, **more)
    assert [each.name for each in saved.parent.iterdir()] == ["m"]


def test_a_damaged_folder_leaves_nothing(saved: Path) -> None:
    file = saved / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 8
    file.write_bytes(data)
    with pytest.raises(seqblocks.UsageError, match="has changed since it was written"):
        convert(saved, "hub", saved.parent / "new")
    assert [each.name for each in saved.parent.iterdir()] == ["m"]


def test_the_command(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["convert", str(saved), "--to", "hub", "--out", str(tmp_path / "hub")]
    assert main(words) == 0
    done = capsys.readouterr()
    assert "22 tensors as hub, " in done.out
    assert "note: there is no config.json, because none came with the weights" in done.err
    assert main(words) == 2
    assert "is not empty" in capsys.readouterr().err
    more = ["--spec", "mamba_130m", *(f"--set={name}={value}" for name, value in CHANGES.items()), "--format", "json"]
    words = ["convert", str(tmp_path / "hub"), "--to", "official", "--out", str(tmp_path / "official"), *more]
    assert main(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["tensors"], len(data["notes"])) == (22, 1)
    assert main(["convert", str(tmp_path / "hub"), "--to", "official", "--out", str(tmp_path / "x")]) == 2
    assert "config.json that describes the model" in capsys.readouterr().err
