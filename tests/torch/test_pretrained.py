"""`from_pretrained`: folders of other packages, their config.json, and transformers models where it is installed."""

from __future__ import annotations

import json
import random
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.analysis import check
from seqblocks.checkpoint import families, folder, weight_files
from seqblocks.checkpoint.convert import convert
from seqblocks.checkpoint.weight_files import weights_in

safetensors = pytest.importorskip("safetensors.torch", reason="an optional extra; the test extra installs it")


def transformers() -> Any:
    return pytest.importorskip("transformers", reason="needs the extra `hub`")


FAMILIES = ["mamba", "mamba2", "falcon_mamba", "xlstm", "xlstm_fused"]


def drawn_config(family: str, seed: int) -> dict[str, Any]:
    """Return a small random configuration of transformers."""
    chance = random.Random(seed)
    if family.startswith("xlstm"):
        heads = chance.choice((1, 2, 3))
        size = heads * 8 * chance.choice((1, 2))
        return {
            "vocab_size": chance.randint(20, 50), "hidden_size": size, "embedding_dim": size, "num_heads": heads,
            "num_hidden_layers": chance.randint(1, 3), "num_blocks": None, "use_bias": chance.random() < 0.5,
            "qk_dim_factor": chance.choice((0.5, 1.0)), "v_dim_factor": 1.0, "eps": chance.choice((1e-6, 1e-5)),
            "ffn_proj_factor": chance.choice((2.0, 2.667)), "ffn_round_up_to_multiple_of": chance.choice((8, 64)),
            "gate_soft_cap": chance.choice((5.0, 15.0)), "output_logit_soft_cap": chance.choice((10.0, 30.0)),
            "norm_eps": chance.choice((1e-6, 1e-5)), "chunk_size": 16,
            "weight_mode": "fused" if family == "xlstm_fused" else "single",
        }  # fmt: skip
    if family == "mamba2":
        size, expand, groups = chance.choice((16, 32)), chance.choice((1, 2)), chance.choice((1, 2))
        return {
            "vocab_size": chance.randint(20, 50), "hidden_size": size, "num_hidden_layers": chance.randint(1, 3),
            "expand": expand, "head_dim": 8, "num_heads": expand * size // 8, "n_groups": groups,
            "state_size": chance.choice((4, 8)), "conv_kernel": chance.randint(2, 4), "chunk_size": 8,
            "use_bias": chance.random() < 0.5, "use_conv_bias": chance.random() < 0.5,
            "tie_word_embeddings": chance.random() < 0.5, "layer_norm_epsilon": chance.choice((1e-5, 1e-6)),
        }  # fmt: skip
    return {
        "vocab_size": chance.randint(20, 50), "hidden_size": chance.choice((12, 20, 36)),
        "num_hidden_layers": chance.randint(1, 3), "state_size": chance.choice((4, 8)), "expand": chance.choice((1, 2)),
        "conv_kernel": chance.randint(2, 4), "use_bias": chance.random() < 0.5, "use_conv_bias": chance.random() < 0.5,
        "tie_word_embeddings": chance.random() < 0.5, "layer_norm_epsilon": chance.choice((1e-5, 1e-6)),
        **({"mixer_rms_eps": 1e-3} if family == "falcon_mamba" else {}),
    }  # fmt: skip


def peer(family: str, seed: int, dtype: torch.dtype, **more: Any) -> Any:
    """Return a transformers model, with noise on every parameter."""
    library = transformers()
    name = {"mamba": "Mamba", "mamba2": "Mamba2", "falcon_mamba": "FalconMamba"}.get(family, "xLSTM")
    config = getattr(library, f"{name}Config")(**{**drawn_config(family, seed), **more})
    torch.manual_seed(seed)
    cls = getattr(library, f"{name}ForCausalLM")
    if family == "xlstm_fused":  # its initialisation fails for this mode
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cls.__mro__[1], "_init_weights", lambda self, module: None)
            model = cls(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    else:
        model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype).eval()


class InFloat64:
    """Replace torch in a module that computes parts in float32 for any dtype, for a comparison to 1e-9."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def in_float64(model: Any, patch: pytest.MonkeyPatch) -> None:
    module = __import__("sys").modules[type(model).__module__]
    patch.setattr(module, "torch", InFloat64())
    patch.setattr(Tensor, "float", Tensor.double)


@pytest.mark.filterwarnings("ignore")  # a warning of transformers about kernels that are not installed
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_have_the_same_logits(
    family: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = {"mode": "train"} if "xlstm" in family else {}  # the other model stores its state in float32
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-9)):
        model = peer(family, seed, dtype, **mode)
        model.save_pretrained(tmp_path / str(dtype), max_shard_size="20KB")
        ours = seqblocks.from_pretrained(tmp_path / str(dtype)).eval()
        assert {p.dtype for p in ours.parameters()} == {dtype}
        ids = torch.randint(0, model.config.vocab_size, (2, 16))
        with torch.no_grad():
            found = ours(ids)
            if dtype == torch.float64:
                in_float64(model, monkeypatch)
            expected = model(ids, use_cache=False).logits
        assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = peer(family, 1, torch.float64)
    model.save_pretrained(tmp_path)
    ours = seqblocks.from_pretrained(tmp_path).eval()
    ids = torch.randint(0, model.config.vocab_size, (1, 5))
    with torch.no_grad():
        theirs = ids
        for _ in range(32):
            theirs = torch.cat([theirs, model(theirs, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        logits, state = ours(ids, return_state=True)
        found = [ids, logits[:, -1:].argmax(-1)]
        for _ in range(31):
            logits_t, state = ours.step(found[-1][:, 0], state)
            found.append(logits_t.argmax(-1, keepdim=True))
    assert torch.equal(torch.cat(found, 1), theirs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_transformers_survive_a_round_trip_bit_for_bit(family: str, seed: int, tmp_path: Path) -> None:
    model = peer(family, seed, torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    seqblocks.checkpoint.convert(tmp_path / "theirs", "seqblocks", tmp_path / "ours")
    layout = {"falcon_mamba": "official", "xlstm_fused": "fused"}.get(family, "hub")
    seqblocks.checkpoint.convert(tmp_path / "ours", layout, tmp_path / "back", shard_size="20KB")
    before, after = weights_in(tmp_path / "theirs"), weights_in(tmp_path / "back")
    assert before.headers.keys() == after.headers.keys()
    assert all(torch.equal(before.read(name), after.read(name)) for name in before.headers)
    if family == "xlstm_fused":
        return  # the class can only be built on the meta device
    again, report = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["save", "load and save", "save_pretrained"])
def test_a_model_goes_back_to_transformers_after_training(way: str, tmp_path: Path) -> None:
    """Its config.json is kept, with the dtype of the new weights; without one, transformers builds its default model.
    """
    theirs = peer("mamba", 0, torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = seqblocks.from_pretrained(tmp_path / "theirs", dtype=torch.float32).eval()
    ids = torch.randint(0, theirs.config.vocab_size, (1, 9))
    ours(ids).square().mean().backward()
    torch.optim.SGD(ours.parameters(), 0.1).step()
    if way == "save_pretrained":
        from seqblocks.hf import wrap

        wrap(ours).save_pretrained(tmp_path / "ours")
    else:
        seqblocks.save(ours, tmp_path / "ours")
    if way == "load and save":
        seqblocks.save(seqblocks.load(tmp_path / "ours"), tmp_path / "ours")
    convert(tmp_path / "ours", "hub", tmp_path / "back")
    again, report = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert [key for key, names in report.items() if names] == []
    assert again.dtype == torch.float32
    before, after = (json.loads((tmp_path / place / "config.json").read_text()) for place in ("theirs", "back"))
    assert after == {**before, "dtype": "float32"}
    with torch.no_grad():
        expected = ours(ids)
        assert (again.eval()(ids).logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_head_in_the_file_that_differs_from_the_embedding_is_not_tied(tmp_path: Path) -> None:
    """transformers never ties xLSTM's head, whatever its config says."""
    model = peer("xlstm", 0, torch.float32, mode="train", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "theirs")
    ids = torch.randint(0, model.config.vocab_size, (1, 16))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        ours = seqblocks.from_pretrained(tmp_path / "theirs").eval()(ids)
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
    seqblocks.checkpoint.convert(tmp_path / "theirs", "seqblocks", tmp_path / "ours")
    restored = seqblocks.from_pretrained(tmp_path / "ours")
    assert torch.equal(restored.unembed.weight, model.lm_head.weight)


# --- without transformers -------------------------------------------------------------------------------------------

SPEC = """
seqblocks: 1
model:
  input: {tokens: 11}
  steps:
    - embed: {features: 4}
    - linear: {features: 4, name: body}
    - unembed: {tie: {weight: embed.weight}}
checkpoint: {embed: wte, unembed: head, body.weight: {transpose: body.kernel}, body.bias: body.bias}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "spec.yaml").write_text(SPEC)
    return tmp_path / "spec.yaml"


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"wte.weight": (11, 4), "body.kernel": (4, 4), "body.bias": (4,), "head.bias": (11,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write(place: Path, kind: str, found: dict[str, Tensor]) -> Path:
    place.mkdir(exist_ok=True)
    names = list(found)
    parts = [names] if "shards" not in kind else [names[:2], names[2:]]
    stem, ending = ("pytorch_model", "bin") if "torch" in kind else ("model", "safetensors")
    files = [f"{stem}{f'-{at}-of-2' if len(parts) > 1 else ''}.{ending}" for at in range(1, len(parts) + 1)]
    for file, part in zip(files, parts, strict=True):
        some = {name: found[name] for name in part}
        torch.save(some, place / file) if ending == "bin" else safetensors.save_file(some, place / file)
    if len(parts) > 1:
        table = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (place / f"{stem}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return place / files[0] if kind == "file" else place


@pytest.mark.parametrize("kind", ["safetensors", "safetensors shards", "torch", "torch shards", "file"])
def test_weights_are_read(tmp_path: Path, spec: Path, kind: str) -> None:
    place = write(tmp_path / "w", kind, tensors())
    model = seqblocks.from_pretrained(place, spec)
    assert torch.equal(model.body.weight, tensors()["body.kernel"].T)
    assert model.unembed.weight is model.embed.weight
    for dtype in ("bf16", torch.float64):
        assert len({p.dtype for p in seqblocks.from_pretrained(place, spec, dtype=dtype).parameters()}) == 1


def test_dtypes_are_those_of_the_file(tmp_path: Path, spec: Path) -> None:
    mixed = {**tensors(torch.bfloat16), "body.kernel": tensors()["body.kernel"]}
    model = seqblocks.from_pretrained(write(tmp_path / "w", "safetensors", mixed), spec)
    assert {name: p.dtype for name, p in model.named_parameters()} == {
        "embed.weight": torch.bfloat16, "body.weight": torch.float32, "body.bias": torch.bfloat16,
        "unembed.bias": torch.bfloat16,
    }  # fmt: skip


def test_weights_that_a_trainer_has_wrapped(tmp_path: Path, spec: Path) -> None:
    for at, wrapped in enumerate(({"state_dict": tensors()}, {"epoch": 3, "model": tensors(), "optimizer": {}})):
        torch.save(wrapped, tmp_path / f"{at}.pt")
        model = seqblocks.from_pretrained(tmp_path / f"{at}.pt", spec)
        assert torch.equal(model.embed.weight, tensors()["wte.weight"])


def test_pickled_code_is_not_run(tmp_path: Path, spec: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"wte.weight": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(seqblocks.UsageError, match=r"contains pickled objects other than tensors, which could run"):
        seqblocks.from_pretrained(tmp_path / "evil.pt", spec)
    assert not (tmp_path / "ran").exists()


def test_omitted_tensors_are_reported(tmp_path: Path, spec: Path) -> None:
    other = {**tensors(), "head.bias": torch.ones(3), "extra": torch.ones(2)}
    place = write(tmp_path / "w", "safetensors", other)
    message = r"unembed\.bias is \[3\], but \[11\] in the.*\n.*the spec does not map: extra"
    with pytest.raises(seqblocks.RunError, match=message):
        seqblocks.from_pretrained(place, spec)
    message = r"was loaded in part\nunembed\.bias stays at its initial values: .*\nnot read: extra"
    with pytest.warns(seqblocks.PartialWarning, match=message):
        model = seqblocks.from_pretrained(place, spec, partial=True, seed=5)
    assert torch.equal(model.unembed.bias, seqblocks.build(spec, seed=5).unembed.bias)
    assert torch.equal(model.embed.weight, tensors()["wte.weight"])
    assert seqblocks.from_pretrained(write(tmp_path / "v", "file", tensors()), spec, partial=True), "without warning"


def test_two_tensors_for_a_tied_parameter_must_be_equal(tmp_path: Path, spec: Path) -> None:
    twice = {**tensors(), "head.weight": tensors()["wte.weight"].clone()}
    assert seqblocks.from_pretrained(write(tmp_path / "w", "safetensors", twice), spec)
    twice["head.weight"] += 1
    with pytest.raises(seqblocks.RunError, match=r"unembed\.weight is tied to embed\.weight, but the official weights"):
        seqblocks.from_pretrained(write(tmp_path / "w", "safetensors", twice), spec)


def test_a_folder_of_ours_needs_no_spec(tmp_path: Path, spec: Path) -> None:
    model = seqblocks.build(spec)
    seqblocks.save(model, tmp_path / "m")
    assert torch.equal(seqblocks.from_pretrained(tmp_path / "m").embed.weight, model.embed.weight)


SWAPPED = """
seqblocks: 1
model:
  input: {features: 4}
  steps: [{linear: {features: 4, name: first}}, tanh, {linear: {features: 4, name: second}}]
checkpoint: {first: second, second: first}
"""


def test_a_config_beside_the_weights_is_kept_whatever_spec_reads_them(tmp_path: Path, spec: Path) -> None:
    place = write(tmp_path / "w", "safetensors", tensors())
    for text in ('{"n_embd": 4}', "[1]", "{}"):
        (place / "config.json").write_text(text)
        seqblocks.save(seqblocks.from_pretrained(place, spec), tmp_path / "m")
        kept = json.loads((tmp_path / "m" / "config.json").read_text()).get("converted_from")
        assert kept == ({"n_embd": 4} if "n_embd" in text else None)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    for damaged in (json.dumps({**config, "converted_from": 3}), "{"):  # `load` needs nothing of it
        (tmp_path / "m" / "config.json").write_text(damaged)
        seqblocks.load(tmp_path / "m")


@pytest.mark.parametrize("place", ["m", "m/model.safetensors"])
@pytest.mark.parametrize("with_spec", [False, True])
def test_a_checkpoint_map_does_not_apply_to_weights_of_ours(tmp_path: Path, place: str, with_spec: bool) -> None:
    (tmp_path / "swapped.yaml").write_text(SWAPPED)
    model = seqblocks.build(tmp_path / "swapped.yaml")
    seqblocks.save(model, tmp_path / "m")
    again = seqblocks.from_pretrained(tmp_path / place, tmp_path / "swapped.yaml" if with_spec else None)
    assert torch.equal(again.first.weight, model.first.weight)


@pytest.mark.parametrize("with_spec", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_official_weights_next_to_a_config_of_ours_are_translated(
    tmp_path: Path, spec: Path, with_spec: bool, partial: bool
) -> None:
    model = seqblocks.build(spec, seed=1)
    seqblocks.save(model, tmp_path / "m")
    convert(tmp_path / "m", "official", tmp_path / "official")
    names = safetensors.load_file(tmp_path / "official" / "model.safetensors").keys()
    assert names != model.state_dict().keys()
    shutil.copy(tmp_path / "m" / "config.json", tmp_path / "official")
    again = seqblocks.from_pretrained(tmp_path / "official", spec if with_spec else None, partial=partial)
    assert torch.equal(again.body.weight, model.body.weight)
    convert(tmp_path / "official", "seqblocks", tmp_path / "back")
    assert torch.equal(seqblocks.load(tmp_path / "back").body.weight, model.body.weight)


def test_names_of_the_spec_are_one_of_the_layouts(tmp_path: Path, spec: Path) -> None:
    model = seqblocks.build(spec)
    torch.save(model.state_dict(), tmp_path / "own.pt")
    assert torch.equal(seqblocks.from_pretrained(tmp_path / "own.pt", spec).body.weight, model.body.weight)
    torch.save({"bias" if key == "body.bias" else key: x for key, x in model.state_dict().items()}, tmp_path / "own.pt")
    with pytest.raises(seqblocks.RunError, match=r"^the weights have no body\.bias\. Did you mean bias\?$"):
        seqblocks.from_pretrained(tmp_path / "own.pt", spec)


def test_weights_of_ours_can_be_loaded_in_part(tmp_path: Path, spec: Path) -> None:
    model = seqblocks.build(spec)
    seqblocks.save(model, tmp_path / "m")
    (tmp_path / "m" / "seqblocks.json").unlink()  # transformers' save_pretrained does not write it without the head
    found = safetensors.load_file(tmp_path / "m" / "model.safetensors")
    found.pop("body.bias")
    safetensors.save_file(found, tmp_path / "m" / "model.safetensors")
    with pytest.raises(seqblocks.RunError, match=r"1 is missing \(body\.bias\)"):
        seqblocks.from_pretrained(tmp_path / "m")
    with pytest.warns(seqblocks.errors.PartialWarning, match=r"body\.bias stays at its initial values"):
        again = seqblocks.from_pretrained(tmp_path / "m", partial=True)
    assert torch.equal(again.body.weight, model.body.weight)


def test_a_model_that_was_read_can_be_saved(tmp_path: Path) -> None:
    config = {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 11}
    text = families.spec_text(config)
    model = seqblocks.build_text(text)
    found = {name: tensor for name, tensor in named(model).items() if name != "lm_head.weight"}
    place = write(tmp_path / "w", "safetensors", found)
    (place / "config.json").write_text(json.dumps(config))
    again = seqblocks.from_pretrained(place)
    seqblocks.save(again, tmp_path / "m")
    assert torch.equal(seqblocks.load(tmp_path / "m")(torch.tensor([[1, 2]])), model(torch.tensor([[1, 2]])))


def named(model: Any) -> dict[str, Tensor]:
    return {seqblocks.checkpoint.official_name(model.spec, name, "hub"): t for name, t in model.state_dict().items()}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "w has no weights: there is no model.safetensors or model.safetensors.index.json or pytorch"),
        ({"model.safetensors": b""}, "model.safetensors is not a file of weights, or it is truncated"),
        ({"pytorch_model.bin": b"x" * 100}, "contains pickled objects|is not a file of weights"),
        ({"model.safetensors.index.json": b"{"}, "index.json cannot be read: it is not valid JSON"),
    ],
)
def test_invalid_files(tmp_path: Path, spec: Path, content: Any, message: str) -> None:
    (tmp_path / "w").mkdir()
    for name, data in (content or {}).items():
        (tmp_path / "w" / name).write_bytes(data)
    with pytest.raises(seqblocks.UsageError, match=message):
        seqblocks.from_pretrained(tmp_path / "w", spec)
    with pytest.raises(seqblocks.UsageError):
        seqblocks.from_pretrained(tmp_path / "w")


def read_or_refused(place: Path, spec: Path) -> str:
    """Return the message of the error, or an empty string if the model is unchanged."""
    try:
        model = seqblocks.from_pretrained(place, spec)
    except (seqblocks.UsageError, seqblocks.RunError) as error:
        return str(error)
    assert torch.equal(model.body.bias, tensors()["body.bias"])
    return ""


@pytest.mark.parametrize("kind", ["safetensors", "safetensors shards", "torch", "torch shards"])
def test_damaged_files_are_one_clear_error(tmp_path: Path, spec: Path, kind: str) -> None:
    place = write(tmp_path / "w", kind, tensors())
    assert read_or_refused(place, spec) == ""
    for file in sorted(place.iterdir()):
        whole = file.read_bytes()
        for length in range(0, len(whole), max(1, len(whole) // 20)):
            file.write_bytes(whole[:length])
            assert read_or_refused(place, spec), f"{file.name}, {length} of {len(whole)} bytes"
        file.unlink()
        assert read_or_refused(place, spec)
        file.write_bytes(whole)
    if "shards" in kind:
        first, second = sorted(place.glob("*[0-9].*"))[:2]
        one, two = first.read_bytes(), second.read_bytes()
        first.write_bytes(two)
        second.write_bytes(one)
        assert "does not describe its files" in read_or_refused(place, spec)


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"body.bias": torch.ones(4, dtype=torch.int64)}, "body.bias of the official weights is of torch.int64"),
        ({"body.bias": torch.ones(4).to(torch.float8_e4m3fn)}, "is of torch.float8_e4m3fn"),
        ({"body.bias": torch.ones(4).cfloat()}, "the weights for body.bias are complex"),
        ({"body.kernel": torch.ones(5, 4)}, "the official body.kernel must be [4, 4], and is [5, 4]"),
        ({"more": torch.ones(1)}, "the official weights contain tensors that the spec does not map: more"),
    ],
)
def test_tensors_that_do_not_fit_are_one_clear_error(
    tmp_path: Path, spec: Path, kind: str, change: dict[str, Tensor], message: str
) -> None:
    assert message in read_or_refused(write(tmp_path / "w", kind, tensors() | change), spec)


def test_without_a_spec_and_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(seqblocks.UsageError, match=r"has no config\.json that describes the model\."):
        seqblocks.from_pretrained(write(tmp_path / "w", "safetensors", tensors()))


def test_the_name_of_a_release_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(seqblocks.UsageError, match=r"first: hf download RWKV/v6-1\.6B --local-dir DIR$"):
        seqblocks.from_pretrained("RWKV/v6-1.6B")
    for path in ("runs/last.pt", "model", "a/b/c"):
        with pytest.raises(seqblocks.UsageError, match=f"^there is no file {path}$"):
            seqblocks.from_pretrained(path)


def test_only_one_tensor_is_read_at_a_time(tmp_path: Path, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write(tmp_path / "w", "safetensors shards", tensors())
    alive: list[Any] = []

    def counted(path: Path) -> weight_files.Weights:
        found = weights_in(path)

        def read(name: str) -> Tensor:
            assert not [each for each in alive if each() is not None]
            tensor = found.read(name).clone()
            alive.append(weakref.ref(tensor))
            return tensor

        return found._replace(read=read)

    from seqblocks.checkpoint import pretrained

    monkeypatch.setattr(pretrained, "weights_in", counted)
    seqblocks.from_pretrained(place, spec)
    assert len(alive) == 4


def test_the_folder_of_a_bundled_model(tmp_path: Path) -> None:
    """The spec is given by name, and its own map reads the weights."""
    changes = {"dim": 16, "depth": 2, "vocabulary": 11}
    model = seqblocks.build("mamba_130m", set=changes)
    found = {name: tensor for name, tensor in named(model).items() if name != "lm_head.weight"}
    again = seqblocks.from_pretrained(write(tmp_path / "w", "safetensors", found), "mamba_130m", set=changes)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
    spec = check.load_model("mamba_130m", changes)
    assert seqblocks.from_pretrained(tmp_path / "w", spec).spec is spec
    assert folder.WHOLE == "model.safetensors"
