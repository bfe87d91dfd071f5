"""Saving, restoring, and reading official layouts."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqblocks
from seqblocks.analysis import check
from seqblocks.checkpoint import load, load_official, official_name, save
from seqblocks.checkpoint.record import RECORD, record_checksum
from seqblocks.language import spec
from seqblocks.language.spec_files import bundled

pytest.importorskip("safetensors", reason="an optional extra; the test extra installs it")

TEXT = """
seqblocks: 1
model:
  input: {tokens: 7}
  steps:
    - embed: {features: 4}
    - own: {width: 6}
    - unembed: {tie: {weight: embed.weight}}
blocks:
  own:
    args: {width: int}
    steps:
      - residual: {steps: [{linear: {features: width}}, {linear: {name: down, features: 4}}]}
"""


def test_a_saved_model_is_restored(tmp_path: Path) -> None:
    model = seqblocks.build_text(TEXT, seed=5, set={"model.own.width": 10}, dtype=torch.float64)
    path = tmp_path / "model"
    save(model, path)
    again = load(path)
    x = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)
    assert again.unembed.weight is again.embed.weight
    assert load(path, dtype=torch.float32)(x).dtype == torch.float32
    assert list(tmp_path.iterdir()) == [path], "no partial files should be left"


def test_overrides_without_parameters_are_possible_on_restore(tmp_path: Path) -> None:
    text = """
seqblocks: 1
let: {rate: 0.0, dim: 4, spare: 1}
model:
  input: {features: dim}
  steps: [{residual: {drop_path: rate, steps: [{linear: {features: dim}}]}}]
"""
    path = tmp_path / "model"
    with pytest.warns(seqblocks.OverrideWarning, match="spare=2"):
        model = seqblocks.build_text(text, set={"let.dim": 6, "let.rate": 0.1, "spare": 2})
    save(model, path)
    again = load(path, set={"rate": 0.25})  # `spare` was already reported
    assert again.graph.nodes[0].arguments.drop_path == 0.25
    x = torch.randn(2, 3, 6)
    assert torch.equal(again.eval()(x), model.eval()(x))
    save(again, path)
    assert load(path).graph.nodes[0].arguments.drop_path == 0.25, "it should be saved too"
    with pytest.raises(seqblocks.RunError, match=r"residual.linear.weight is \[6, 6\], but \[8, 8\] in the model"):
        load(path, set={"dim": 8})
    with pytest.raises(seqblocks.SpecError, match="there is no 'dmi'"):
        load(path, set={"dmi": 8})
    with pytest.raises(seqblocks.UsageError, match="overrides must be a mapping"):
        load(path, set=["dim"])  # type: ignore[arg-type]
    with pytest.warns(seqblocks.OverrideWarning, match="spare=3"):
        load(path, set={"spare": 3})


def test_a_saved_model_carries_the_files_it_uses(tmp_path: Path) -> None:
    folder = tmp_path / "specs"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "a.yaml").write_text("seqblocks: 1\nuse: [./b.yaml, vil]\nblocks: {a: {steps: [b]}}\n")
    (folder / "lib" / "b.yaml").write_text("seqblocks: 1\nblocks: {b: {steps: [{linear: {features: 3}}]}}\n")
    (folder / "top.yaml").write_text("seqblocks: 1\nuse: [lib/a.yaml]\nmodel: {input: {features: 2}, steps: [a]}\n")
    model = seqblocks.build(folder / "top.yaml")
    save(model, tmp_path / "m")
    for file in folder.rglob("*.yaml"):
        file.unlink()
    x = torch.randn(1, 3, 2)
    torch.testing.assert_close(load(tmp_path / "m")(x), model(x))


def test_a_saved_spec_reads_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "seqblocks: 1\nTOKEN=hunter2\nblocks: {a: {steps: [silu]}}\n"
    (tmp_path / "secret.yaml").write_text(secret)
    monkeypatch.chdir(tmp_path)
    save(seqblocks.build_text(TEXT), tmp_path / "m")
    data = json.loads((tmp_path / "m" / RECORD).read_text())
    for name in ("secret.yaml", str(tmp_path / "secret.yaml"), "../" * 20 + "etc/passwd"):
        text = TEXT.replace("seqblocks: 1\n", f"seqblocks: 1\nuse: ['{name}']\n")
        data["spec"] = zlib.crc32(text.encode())
        (tmp_path / "m" / "spec.yaml").write_text(text)
        (tmp_path / "m" / RECORD).write_text(json.dumps({**data, "checksum": record_checksum(data)}))
        with pytest.raises(seqblocks.SpecError, match="among the files provided with the spec") as caught:
            load(tmp_path / "m")
        assert "hunter2" not in str(caught.value)
        assert "root:" not in str(caught.value)


def test_a_saved_model_does_not_change_with_the_bundled_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = seqblocks.build_text(MAMBA.replace("STEPS", STEPS))
    save(model, tmp_path / "m")
    (tmp_path / "mamba.yaml").write_text("seqblocks: 1\nblocks: {another: {steps: [silu]}}\n")
    for others in ({**bundled(), "mamba": tmp_path / "mamba.yaml"}, {}):
        monkeypatch.setattr(spec, "bundled", lambda others=others: others)
        x = torch.tensor([[1, 2, 3]])
        assert torch.equal(load(tmp_path / "m")(x), model(x))


def test_each_parameter_keeps_its_dtype(tmp_path: Path) -> None:
    model, path = seqblocks.build_text(TEXT), tmp_path / "m"
    model.own.residual.down.half()
    save(model, path)
    kinds = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in load(path).state_dict().items()} == kinds
    assert len(set(kinds.values())) == 2
    assert {p.dtype for p in load(path, dtype="bf16").parameters()} == {torch.bfloat16}


def test_ties_that_are_broken_are_not_saved(tmp_path: Path) -> None:
    whole = seqblocks.build_text(TEXT, seed=1)
    model = seqblocks.build_text(TEXT)
    model.unembed.weight = torch.nn.Parameter(model.embed.weight.detach().clone())  # two parameters from here on
    model.load_state_dict(whole.state_dict())
    assert model.unembed.weight is not model.embed.weight
    save(model, tmp_path / "m")  # which still have the same values
    assert torch.equal(load(tmp_path / "m").unembed.weight, whole.embed.weight)
    before = {file.name: file.read_bytes() for file in (tmp_path / "m").iterdir()}
    with torch.no_grad():
        model.unembed.weight[0, 0] += 1
    with pytest.raises(seqblocks.RunError, match=r"ties unembed\.weight to embed\.weight, .* call model\.tie\(\)"):
        save(model, tmp_path / "m")
    assert {file.name: file.read_bytes() for file in (tmp_path / "m").iterdir()} == before
    model.tie()
    save(model, tmp_path / "m")


@pytest.mark.parametrize("changed", ["embed", "unembed"])
@pytest.mark.parametrize("pruned", [False, True])
def test_ties_of_changed_weights_say_what_to_do(changed: str, pruned: bool) -> None:
    from torch.nn.utils import parametrize, prune

    model = seqblocks.build_text(TEXT)
    step = model.get_submodule(changed)
    if pruned:
        prune.l1_unstructured(step, "weight", amount=0.5)
    else:
        parametrize.register_parametrization(step, "weight", nn.Tanh())
    with pytest.raises(seqblocks.RunError, match=r"unembed.weight cannot be tied to embed.weight: .*\. First merge or"):
        model.tie()


def _parametrized(model: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(model.own.residual.down)


def _sharded(model: nn.Module) -> None:
    class Sharded(Tensor):
        pass

    model.own.residual.down.weight = nn.Parameter(model.own.residual.down.weight.detach().as_subclass(Sharded))


def _other_shape(model: nn.Module) -> None:
    model.own.residual.down.weight = nn.Parameter(torch.ones(4, 5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_parametrized, r"no longer matches its spec: 1 is missing \(own\.residual\.down\.weight\); 2 are unexpected"),
        (_sharded, r"own\.residual\.down\.weight is a Sharded.*: gather the weights"),
        (_other_shape, r"its spec: own\.residual\.down\.weight is \[4, 5\], but \[4, 6\] in the spec"),
        (lambda model: model.to("meta"), r"embed\.weight is on the meta device, which holds no data"),
    ],
)
def test_models_that_could_not_be_restored_are_not_saved(change: Any, message: str, tmp_path: Path) -> None:
    model = seqblocks.build_text(TEXT)
    change(model)
    with pytest.raises(seqblocks.RunError, match=message):
        save(model, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_foreign_files_are_refused_with_a_message(tmp_path: Path) -> None:
    with pytest.raises(seqblocks.UsageError, match="absent does not exist; load needs a folder written by save"):
        load(tmp_path / "absent")
    with pytest.raises(seqblocks.UsageError, match="'gpu9' is not a device"):
        load(tmp_path / "absent", device="gpu9")
    seqblocks.save(seqblocks.build_text(MAPPED), tmp_path / "good")
    for dtype in (torch.ones(2), "", 3):
        for read in (load, seqblocks.from_pretrained):
            with pytest.raises(seqblocks.UsageError, match="is not a supported dtype"):
                read(tmp_path / "good", dtype=dtype)
    strange = tmp_path / "strange"
    strange.write_bytes(b"not a model")
    with pytest.raises(seqblocks.UsageError, match="strange is not a folder; load needs a folder written by save"):
        load(strange)


MAPPED = """
seqblocks: 1
blocks:
  qkv:
    args: {dim: int}
    steps:
      - linear: {features: dim, bias: false, as: q}
      - linear: {from: q, features: 2 * dim, bias: false, as: kv}
      - linear: {from: kv, features: dim, bias: false, name: out}
    checkpoint:
      q.weight: {split: fused.weight, parts: 2, part: 1}
      kv.weight: {concat: [key.weight, value.weight], axis: 0}
      out.weight: {transpose: final}
model:
  input: {features: 4}
  steps:
    - repeat: {name: layers, times: 4, steps: [{qkv: {dim: 4}}]}
checkpoint:
  layers.{layer}.qkv: "pairs.{layer // 2}.{layer % 2}"
"""


def official(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    out = {}
    for layer in range(4):
        prefix = f"pairs.{layer // 2}.{layer % 2}."
        out |= {
            prefix + "fused.weight": draw(8, 4),
            prefix + "key.weight": draw(4, 4),
            prefix + "value.weight": draw(4, 4),
            prefix + "final": draw(8, 4),
        }
    return out


def test_official_layouts_are_read_through_the_map() -> None:
    model = seqblocks.build_text(MAPPED)
    tensors = official()
    load_official(model, tensors)
    layer = model.layers.get_submodule("3").qkv
    torch.testing.assert_close(layer.q.weight, tensors["pairs.1.1.fused.weight"][4:])
    joined = torch.cat([tensors["pairs.1.1.key.weight"], tensors["pairs.1.1.value.weight"]])
    torch.testing.assert_close(layer.kv.weight, joined)
    torch.testing.assert_close(layer.out.weight, tensors["pairs.1.1.final"].T)
    assert official_name(model.spec, "layers.2.qkv.out.weight") == {"transpose": "pairs.1.0.final"}


NESTED = """
seqblocks: 1
blocks:
  unit:
    steps: [linear: {features: 4, bias: false, name: first}, linear: {features: 4, bias: false, name: out}]
    checkpoint: {first: inside, out.weight: {split: fused, parts: 2, part: 1}}
  plain:
    steps: [unit]
  around:
    steps: [residual: {name: r, steps: [rms_norm: {name: norm}, unit: {name: c}]}]
    checkpoint: {r: ""}
model:
  input: {features: 4}
  steps:
    - unit
    - residual: {steps: [around: {name: a}]}
    - scan: {order: [forward, reverse], own: all, merge: sum, steps: [unit: {name: s}]}
    - parallel: {merge: sum, branches: [left: [plain: {name: p}], right: [{unit: {name: p}}, {linear: {features: 4}}]]}
    - repeat: {name: layers, times: 2, steps: [around: {name: a}]}
"""


@pytest.mark.parametrize(
    ("name", "table", "official"),
    [
        ("unit.first.weight", "", "unit.inside.weight"),
        ("residual.a.r.norm.weight", "", "residual.a.norm.weight"),
        ("residual.a.r.c.first.weight", "", "residual.a.c.inside.weight"),
        ("residual.a.r.c.out.weight", "", {"split": "residual.a.c.fused", "parts": 2, "part": 1}),
        ("scan.fwd.s.first.weight", "", "scan.fwd.s.inside.weight"),
        ("scan.rev.s.first.weight", "scan.rev: back", "back.s.inside.weight"),
        ("parallel.left.p.unit.first.weight", "", "parallel.left.p.unit.inside.weight"),
        ("parallel.left.p.unit.first.weight", "parallel.left: one", "one.p.unit.inside.weight"),
        ("parallel.right.p.first.weight", "parallel: two", "two.right.p.inside.weight"),
        ("parallel.right.linear.weight", "parallel: two", "two.right.linear.weight"),
        ("layers.1.a.r.c.first.weight", '"layers.{i}.a": "l.{i}"', "l.1.c.inside.weight"),
        ("layers.1.a.r.c.first.weight", '"layers.{i}": "l.{i}"', "l.1.a.c.inside.weight"),
        # A key that matches inside a block applies to its matches,
        ("layers.1.a.r.c.first.weight", '"layers.{i}.a.r": "l.{i}"', "l.1.c.inside.weight"),
        ("layers.1.a.r.c.first.weight", '"layers.{i}.a.r.c.first": "l.{i}"', "l.1.weight"),
        # and to nothing else.
        ("layers.1.a.r.c.first.weight", '"layers.{i}.a.r.c.out": "l.{i}"', "layers.1.a.c.inside.weight"),
        ("layers.0.a.r.c.out.weight", '"layers.{i}.a.r.c.first": "l.{i}"',
         {"split": "layers.0.a.c.fused", "parts": 2, "part": 1}),
    ],
)  # fmt: skip
def test_a_nested_map_applies_wherever_its_block_is(name: str, table: str, official: Any) -> None:
    model = seqblocks.build_text(f"{NESTED}checkpoint: {{{table}}}")
    assert name in model.state_dict()
    assert official_name(model.spec, name) == official


def test_a_map_may_name_alternatives() -> None:
    text = """
seqblocks: 1
blocks:
  pair:
    steps: [linear: {features: 4, bias: false, name: one}, linear: {features: 4, bias: false, name: two}]
    checkpoint:
      one: [w1, first]
      two.weight: [w2.weight, {slice: fused, start: 4}]
model: {input: {features: 4}, steps: [pair]}
checkpoint: {pair: [old, new.pair]}
"""
    model = seqblocks.build_text(text)
    one, two = torch.randn(4, 4), torch.randn(4, 4)
    files = [
        {"old.w1.weight": one, "old.w2.weight": two},
        {"new.pair.first.weight": one, "new.pair.fused": torch.cat([one, two])},
        {"old.first.weight": one, "new.pair.w2.weight": two},
    ]
    for tensors in files:
        model.reset_parameters()
        load_official(model, tensors)
        assert torch.equal(model.pair.one.weight, one)
        assert torch.equal(model.pair.two.weight, two)
    assert official_name(model.spec, "pair.one.weight") == "old.w1.weight", "the first alternative"
    message = r"no old\.w2\.weight or old\.fused or new\.pair\.w2\.weight or new\.pair\.fused, needed for pair\.two\."
    with pytest.raises(seqblocks.RunError, match=message):
        load_official(model, {"old.w1.weight": one})
    with pytest.raises(seqblocks.RunError, match=r"that the spec does not map: new\.pair\.first\.weight"):
        load_official(model, {**files[0], "new.pair.first.weight": one})


MAMBA = "seqblocks: 1\nuse: [mamba]\nmodel: {input: {tokens: 9}, steps: [STEPS]}\n"
STEPS = "embed: {features: 8}, repeat: {name: layers, times: 2, steps: [mamba_block: {dim: 8}]}"


def mamba_weights() -> dict[str | None, Tensor]:
    model = seqblocks.build_text(MAMBA.replace("STEPS", STEPS))
    return {official_name(model.spec, name): tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # The hint is the right layer under another prefix, not another layer under the same one.
        ({"layers.1.mamba_block.mixer.D": "model.layers.1.mixer.D"},
         r"no layers\.1\.mamba_block\.mixer\.D, needed for .*\. Did you mean model\.layers\.1\.mixer\.D\?$"),
        # Nothing of that layer is left, and no other layer is suggested.
        ({"layers.1.mamba_block.mixer.D": None}, r"needed for \S+ssm\.D\.$"),
        ({"embed.weight": "backbone.embeddings.weight"},
         r"Did you mean backbone\.embeddings\.weight\? In `checkpoint:`, write `embed: backbone\.embeddings`$"),
        ({"embed.weight": "wte"}, r"Did you mean wte\? In `checkpoint:`, write `embed\.weight: wte`$"),
        ({name: None for name in mamba_weights() if name and ".1." in name},
         r"^(the official weights have no layers\.1\.mamba_block\.\S+, needed for layers\.1\.\S+\.\n?){10}$"),
    ],
)  # fmt: skip
def test_hints_for_missing_tensors(change: dict[str, str | None], message: str) -> None:
    model = seqblocks.build_text(MAMBA.replace("STEPS", STEPS))
    weights = {change.get(name, name): tensor for name, tensor in mamba_weights().items()}
    weights.pop(None, None)
    with pytest.raises(seqblocks.RunError, match=message):
        load_official(model, weights)
    load_official(model, mamba_weights())


def test_positions_of_another_grid_name_their_setting() -> None:
    steps = "patch_embed: {patch: 4, STRIDE features: 8}, position_embed"
    text = f"seqblocks: 1\nmodel: {{input: {{image: {{size: 16}}}}, steps: [{steps}]}}"
    coarse = seqblocks.build_text(text.replace("STRIDE ", ""))
    fine = seqblocks.build_text(text.replace("STRIDE", "stride: 2,"))
    message = r"weight is \[1, 4, 4, 8\], but \[1, 7, 7, 8\] in the model \(position_embed, <text>:2:\d+\)"
    with pytest.raises(seqblocks.RunError, match=message + r"\. Use `position_embed: \{rows: 4, columns: 4\}` to read"):
        load_official(fine, coarse.state_dict())
    fits = seqblocks.build_text(
        text.replace("STRIDE", "stride: 2,").replace("position_embed]", "position_embed: {rows: 4, columns: 4}]")
    )
    load_official(fits, coarse.state_dict())


def test_tied_tensors_may_be_present_once_or_twice() -> None:
    steps = "[embed: {features: 4}, unembed: {bias: false, tie: embed}]"
    text = f"seqblocks: 1\nmodel: {{input: {{tokens: 7}}, steps: {steps}}}\ncheckpoint: {{embed: wte, unembed: head}}"
    model, table = seqblocks.build_text(text), torch.randn(7, 4)
    head = {"head.weight": table.clone()}
    for tensors in ({"wte.weight": table}, head, {"wte.weight": table, **head}):
        load_official(model.to_empty(device="cpu"), tensors)  # which separates tied parameters
        assert torch.equal(model.unembed.weight, table)
    with pytest.raises(seqblocks.RunError, match=r"unembed\.weight is tied to embed\.weight, but the official"):
        load_official(model, {"wte.weight": table, "head.weight": table + 1})
    with pytest.raises(seqblocks.RunError, match=r"have no wte\.weight, needed for embed\.weight"):
        load_official(model, {})
    made = seqblocks.build_text(text.replace("unembed: head", "unembed.weight: {transpose: uT}"))
    for tensors in ({"uT": table.T}, {"wte.weight": table, "uT": table.T}):
        load_official(made.to_empty(device="cpu"), tensors)
        assert torch.equal(made.unembed.weight, table)
    with pytest.raises(seqblocks.RunError, match=r"unembed\.weight is tied to embed\.weight, but the official"):
        load_official(made, {"wte.weight": table, "uT": table.T + 1})


def test_wrapped_steps_are_filled_and_saved(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    whole, model = seqblocks.build_text(TEXT, seed=1), seqblocks.build_text(TEXT)
    model.unembed = checkpoint_wrapper(model.unembed)
    load_official(model, whole.state_dict())
    save(model, tmp_path / "m")
    for name, tensor in load(tmp_path / "m").state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name])
    assert [name for name, _ in model.unembed.named_parameters()] == ["weight", "bias"], "the tie should not be saved"


def test_mamba_releases_hold_their_tied_head_too() -> None:
    assert official_name(check.load_model("mamba_130m"), "unembed.weight") == "lm_head.weight"


def test_a_part_that_does_not_fit_is_reported() -> None:
    text = "seqblocks: 1\nmodel: {input: {features: 2}, steps: [linear: {features: 2, bias: false}]}\ncheckpoint: "
    for recipe, words in {
        "{real: v}": "be complex",
        "{slice: v, start: 3}": "have 2 from 3",
        "{split: v, parts: 3, part: 0}": r"be \[6, 2\] or \[3, 2, 2\] or \[12\]",
        "{transpose: v}": r"be \[2, 2\]",
        "{reshape: v}": "hold 2 x 2 elements",
    }.items():
        message = rf"for linear\.weight the official v must {words}, and is \[4, 2\] of torch\.float32"
        with pytest.raises(seqblocks.RunError, match=message):
            load_official(seqblocks.build_text(f"{text}{{linear.weight: {recipe}}}"), {"v": torch.ones(4, 2)})


@pytest.mark.parametrize(
    ("recipe", "of", "right", "wrong"),
    [
        ("split: w, parts: 3, part: 1", lambda w: w[8:16], (24, 8), (8, 24)),
        ("split: w, parts: 3, part: 1", lambda w: w[1], (3, 8, 8), (8, 3, 8)),
        ("split: w, parts: 3, part: 1", lambda w: w[64:128].view(8, 8), (192,), (1, 192)),
        ("split: w, parts: 3, part: 1, axis: 1", lambda w: w[:, 8:16], (8, 24), (24, 8)),
        ("split: w, parts: 3, part: 1, axis: 2", lambda w: w[..., 1], (8, 8, 3), (3, 8, 8)),
        ("transpose: w", lambda w: w.T, (8, 8), (4, 16)),
    ],
)
def test_a_recipe_does_not_reshape(recipe: str, of: Any, right: Any, wrong: Any) -> None:
    text = "seqblocks: 1\nmodel: {input: {features: 8}, steps: [linear: {features: 8, bias: false}]}\ncheckpoint: "
    model = seqblocks.build_text(f"{text}{{linear.weight: {{{recipe}}}}}")
    w = torch.arange(float(math.prod(right))).view(right)
    load_official(model, {"w": w})
    assert torch.equal(model.linear.weight, of(w))
    with pytest.raises(seqblocks.RunError, match=r"for linear\.weight the official w must be "):
        load_official(model, {"w": w.reshape(wrong)})


def test_missing_and_spare_tensors_are_named() -> None:
    model = seqblocks.build_text(MAPPED)
    tensors = official()
    spare = tensors.pop("pairs.0.0.final")
    with pytest.raises(seqblocks.RunError, match=r"no pairs\.0\.0\.final, needed for layers\.0\.qkv\.out\.weight"):
        load_official(model, tensors)
    with pytest.raises(seqblocks.RunError, match=r"contain tensors that the spec does not map: other"):
        load_official(model, {**tensors, "pairs.0.0.final": spare, "other": spare})


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("{concat: [o, p]}", r"head.weight \[8, 6\] cannot be the concat of \[6, 8\], \[7\]: "),
        ("{slice: p, axis: 1}", r"cannot be the slice of \[7\]: "),
        ("{transpose: p}", r"cannot be the transpose of \[7\]: "),
        ("q", "q of the official weights is not a tensor, but list"),
    ],
)
def test_errors_that_depend_on_the_tensors(recipe: str, message: str) -> None:
    steps = "[{linear: {features: 8, bias: false, name: head}}]"
    model = seqblocks.build_text(
        f"seqblocks: 1\nmodel: {{input: {{features: 6}}, steps: {steps}}}\ncheckpoint: {{head.weight: {recipe}}}"
    )
    with pytest.raises(seqblocks.RunError, match=message):
        load_official(model, {"o": torch.ones(6, 8), "p": torch.ones(7), "q": [1.0]})


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(4, 5), r"layers\.3\.qkv\.out\.weight is \[5, 4\], but \[4, 8\] in the model"),
        (torch.ones(8, 4, dtype=torch.complex64), r"for layers\.3\.qkv\.out\.weight are complex.*\{real: …\}"),
        (torch.ones(8, 4, device="meta"), r"pairs\.1\.1\.final of the official weights is on the meta device"),
    ],
)
def test_a_load_that_fails_changes_nothing(tensor: Tensor, message: str) -> None:
    text = MAPPED.replace("out.weight: {transpose: final}", "out.weight: final")
    model, tensors = seqblocks.build_text(text), official()
    tensors = {name: t.T if name.endswith("final") else t for name, t in tensors.items()}
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(seqblocks.RunError, match=message):
        load_official(model, {**tensors, "pairs.1.1.final": tensor.T})
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    load_official(model, tensors)
    assert not torch.equal(model.layers[3].qkv.out.weight, before["layers.3.qkv.out.weight"])


def test_wrapped_weights_are_reported() -> None:
    model, tensors = seqblocks.build_text(MAPPED), official()
    for key in ("state_dict", "model"):
        with pytest.raises(seqblocks.UsageError, match=rf"are nested: use load_official\(model, tensors\['{key}'\]\)"):
            load_official(model, {"epoch": 3, "optimizer": {"lr": 0.1}, key: tensors})
    wrapped: dict[Any, Tensor] = {f"module.{name}": tensor for name, tensor in tensors.items()}
    with pytest.raises(seqblocks.RunError, match=r"begin with 'module\.': remove it with name\.removeprefix"):
        load_official(model, wrapped)
    with pytest.raises(seqblocks.RunError) as error:
        load_official(model, {3: torch.ones(1), "more": torch.ones(1), **wrapped})
    assert "remove it" not in str(error.value), "the hint would not help"


def test_only_a_model_that_can_be_filled_is_loaded() -> None:
    with pytest.raises(seqblocks.RunError, match="is on the meta device, which holds no data"):
        load_official(seqblocks.build_text(MAPPED, device="meta"), official())
    with pytest.raises(seqblocks.UsageError, match=r"needs a model from seqblocks\.build, not Linear"):
        load_official(nn.Linear(2, 2), official())  # type: ignore[arg-type]
    model = seqblocks.build_text(MAPPED)
    model.more = nn.Linear(2, 2)
    load_official(model, official())  # tensors that are not in the spec are ignored
    model.layers[3].qkv.q.weight = nn.Parameter(torch.ones(4, 1))
    with pytest.raises(seqblocks.RunError, match=r"layers\.3\.qkv\.q\.weight is \[4, 1\], but \[4, 4\] in the spec"):
        load_official(model, official())
    nn.utils.parametrizations.weight_norm(model.layers[1].qkv.q)
    with pytest.raises(seqblocks.RunError, match=r"matches its spec: 1 is missing \(layers\.1\.qkv\.q\.weight\)\."):
        load_official(model, official())


def test_the_order_of_keys_does_not_matter() -> None:
    steps = "[{repeat: {name: layers, times: 3, steps: [linear: {features: 4}, rms_norm, head_norm: {heads: 2}]}}]"
    keys = ['"layers.{layer}.linear": "l.{layer}"', "layers.0.linear: first", "layers.1: second", "layers: all"]
    for order in (keys, keys[::-1]):
        text = f"seqblocks: 1\nmodel: {{input: {{features: 4}}, steps: {steps}}}\ncheckpoint: {{{', '.join(order)}}}"
        model = seqblocks.build_text(text).spec
        assert official_name(model, "layers.0.linear.weight") == "first.weight"
        assert official_name(model, "layers.1.linear.weight") == "l.1.weight"
        assert official_name(model, "layers.1.rms_norm.weight") == "second.rms_norm.weight"
        assert official_name(model, "layers.2.rms_norm.weight") == "all.2.rms_norm.weight"


def test_an_index_may_have_no_name() -> None:
    model = seqblocks.build_text(MAPPED.replace("layer // 2", "2 // layer"))
    with pytest.raises(seqblocks.RunError, match=r"cannot translate layers\.0\.qkv\.q\.weight: '2 // layer' divides"):
        load_official(model, official())


def test_weights_for_other_layers_are_reported_by_number_and_name(tmp_path: Path) -> None:
    steps = "[{repeat: {times: n, steps: [linear: {features: 4}]}}]"
    text = f"seqblocks: 1\nlet: {{n: 2}}\nmodel: {{input: {{features: 4}}, steps: {steps}}}"
    save(seqblocks.build_text(text), tmp_path / "model")
    with pytest.raises(seqblocks.RunError, match=r"this model: 2 are unexpected \(repeat\.1\.linear\.weight, "):
        load(tmp_path / "model", set={"n": 1})
    with pytest.raises(seqblocks.RunError, match=r"this model: 2 are missing \(repeat\.2\.linear\.weight, "):
        load(tmp_path / "model", set={"n": 3})


def test_a_tensor_of_two_steps_that_the_spec_does_not_tie_is_refused(tmp_path: Path) -> None:
    """A saved folder would turn it into two tensors."""
    text = "seqblocks: 1\nmodel: {input: {features: 8}, steps: [{linear: 8}, {linear: {features: 8, name: other}}]}"
    model = seqblocks.build_text(text)
    model.other.weight = model.linear.weight
    with pytest.raises(seqblocks.RunError, match=r"other\.weight and linear\.weight are one tensor, but the spec"):
        seqblocks.save(model, tmp_path / "saved")
    assert not [*tmp_path.iterdir()]


def test_views_of_one_tensor_are_saved_as_two(tmp_path: Path) -> None:
    text = "seqblocks: 1\nmodel: {input: {features: 8}, steps: [{linear: 8}, {linear: {features: 8, name: other}}]}"
    model = seqblocks.build_text(text)
    model.other.weight.data = model.linear.weight.data.t()
    seqblocks.save(model, tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    assert torch.equal(loaded.other.weight, model.linear.weight.t())
