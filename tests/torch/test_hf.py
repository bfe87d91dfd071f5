"""seqblocks.hf: specs as transformers models. Loading, saving, calling; test_hf_generate.py tests `generate`."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageClassification

import seqblocks
import seqblocks.hf as hf
from seqblocks.distributed import shard
from seqblocks.errors import RunError, UsageError
from seqblocks.hf import library
from seqblocks.hf.masks import resets_of
from seqblocks.runtime.shards import TensorShards

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

TIED = """
seqblocks: 1
use: [mamba]
let: {dim: 8, vocabulary: 16, depth: 2}
model:
  input: {tokens: vocabulary}
  steps:
    - embed: {features: dim}
    - repeat: {name: layers, times: depth, steps: [mamba_block: {dim: dim, layers: layers, state: 4}]}
    - rms_norm: {name: norm}
    - unembed: {bias: false, tie: embed}
"""
DIGITS = {"dim": 16, "depth": 2}


def built(text: str = TIED, **options: Any) -> Any:
    return seqblocks.build_text(text, dtype=options.pop("dtype", "float64"), seed=3, **options).eval()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    seqblocks.save(built(), tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture(scope="module")
def digits() -> Any:
    return seqblocks.build("vil_digits", set=DIGITS, dtype="float64", seed=1).eval()


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(5))


# --- one format, two readers -----------------------------------------------------------------------------------------


def test_auto_classes_read_saved_folders(saved: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert type(model) is hf.SeqblocksForCausalLM
    assert not model.training
    assert model.dtype == torch.float64
    assert model.config.vocab_size == 16
    for use_cache in (False, True):
        logits = model(ids(2, 7), use_cache=use_cache).logits
        torch.testing.assert_close(logits, built()(ids(2, 7)), rtol=1e-12, atol=1e-12)
    assert model.model.unembed.weight is model.model.embed.weight


@pytest.mark.parametrize("size", ["5GB", "1KB"])
def test_both_read_folders_of_save_pretrained(saved: Path, tmp_path: Path, size: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    with torch.no_grad():
        model.model.norm.weight.add_(0.5)
    model.save_pretrained(tmp_path / "n", max_shard_size=size)
    assert (tmp_path / "n" / "model.safetensors.index.json").exists() == (size == "1KB")
    for again in (seqblocks.load(tmp_path / "n"), AutoModelForCausalLM.from_pretrained(tmp_path / "n").model):
        assert again.spec.source == model.model.spec.source
        for name, value in model.model.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), name
    seqblocks.save(seqblocks.load(tmp_path / "n"), tmp_path / "o")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "o")(ids(1, 5)).logits, model(ids(1, 5)).logits)


def test_parameters_in_full_precision_stay_so(tmp_path: Path) -> None:
    seqblocks.save(built(dtype="bf16"), tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    kinds = {name: p.dtype for name, p in model.model.named_parameters()}
    assert kinds == {name: p.dtype for name, p in built(dtype="bf16").named_parameters()}
    assert {torch.bfloat16, torch.float32} == set(kinds.values())
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        model.model.layers[0].mamba_block.residual.mixer.ssm.D.add_(2**-20)  # not representable in bfloat16
    model.save_pretrained(tmp_path / "n")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "n")
    assert all(torch.equal(p, again.state_dict()[name]) for name, p in model.state_dict().items())
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "n", dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}


def test_overrides_and_files_are_in_the_config(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        "seqblocks: 1\nblocks:\n  pair: {args: {dim: int}, steps: [linear: {features: dim}, silu]}\n"
    )
    text = TIED.replace("use: [mamba]", "use: [mamba, ./own.yaml]")
    text = text.replace("- rms_norm", "- pair: {dim: dim}\n    - rms_norm")
    (tmp_path / "spec.yaml").write_text(text)
    model = seqblocks.build(tmp_path / "spec.yaml", set={"dim": 12}, seed=2)
    seqblocks.save(model, tmp_path / "m")
    for name in ("own.yaml", "spec.yaml"):
        (tmp_path / name).unlink()
    (tmp_path / "m" / "spec.yaml").unlink()  # config.json is all that is needed
    (tmp_path / "m" / "seqblocks.json").unlink()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    torch.testing.assert_close(again(ids(1, 4)).logits, model(ids(1, 4)))
    assert torch.equal(seqblocks.from_pretrained(tmp_path / "m").norm.weight, model.norm.weight)
    config = AutoConfig.from_pretrained(tmp_path / "m")
    assert config.overrides == {"dim": "12"}
    assert AutoModelForCausalLM.from_config(config).model.embed.weight.shape == (16, 12)


def test_a_converted_folder_keeps_the_config_of_others(tmp_path: Path) -> None:
    from seqblocks.checkpoint import convert

    settings = {"dim": 16, "depth": 2, "vocabulary": 16}
    seqblocks.save(seqblocks.build("mamba_130m", set=settings), tmp_path / "m")
    convert(tmp_path / "m", "hub", tmp_path / "hub")
    assert not (tmp_path / "hub" / "config.json").exists(), "our config should not contain those names"
    config = {"hidden_size": 16, "model_type": "mamba", "num_hidden_layers": 2, "vocab_size": 16}
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    convert(tmp_path / "hub", "seqblocks", tmp_path / "ours")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", "hub", tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "hub" / name).read_bytes()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert type(theirs).__name__ == "MambaForCausalLM"
    torch.testing.assert_close(theirs(ids(1, 6)).logits, model(ids(1, 6)).logits, rtol=1e-5, atol=1e-5)


def test_nothing_of_an_earlier_save_is_read(tmp_path: Path) -> None:
    model = hf.wrap(built())
    for size in ("5GB", "1KB", "5GB"):
        with torch.no_grad():
            model.model.norm.weight.add_(1)
        model.save_pretrained(tmp_path / "n", max_shard_size=size)
        for again in (seqblocks.load(tmp_path / "n"), AutoModelForCausalLM.from_pretrained(tmp_path / "n").model):
            assert torch.equal(again.norm.weight, model.model.norm.weight)


def test_what_was_saved_with_earlier_weights_is_removed(tmp_path: Path) -> None:
    seqblocks.save(built(), tmp_path / "n", extra={"step": 7})
    hf.wrap(built()).save_pretrained(tmp_path / "n")
    assert seqblocks.checkpoint.load_extra(tmp_path / "n") == {}


def test_weights_of_a_variant_leave_the_others(saved: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    model.save_pretrained(saved, variant="other")
    again = AutoModelForCausalLM.from_pretrained(saved, variant="other")
    assert torch.equal(again.model.norm.weight, model.model.norm.weight)
    assert torch.equal(seqblocks.load(saved).norm.weight + 1, model.model.norm.weight)


# --- faults of files -------------------------------------------------------------------------------------------------


def change_tensors(place: Path, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    file = place / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.mamba_block.residual.mixer.ssm.A_log"), r"1 is missing \(layers.1.*A_log\)"),
        (lambda t: t.update(other=torch.zeros(2)), r"1 is unexpected \(other\)"),
        (lambda t: t.update({"embed.weight": torch.zeros(15, 8)}), r"embed.weight is \[15, 8\], but \[16, 8\] in the"),
        (lambda t: t.update({"norm.weight": torch.zeros(8, dtype=torch.int64)}), "norm.weight is of torch.int64"),
    ],
)
def test_weights_that_do_not_fit(saved: Path, change: Any, message: str) -> None:
    change_tensors(saved, change)
    with pytest.raises((RunError, UsageError), match=message):
        AutoModelForCausalLM.from_pretrained(saved)


def test_damaged_files(saved: Path, tmp_path: Path) -> None:
    file = saved / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-20])
    with pytest.raises(UsageError, match=r"model.safetensors"):
        AutoModelForCausalLM.from_pretrained(saved)
    file.unlink()
    with pytest.raises(UsageError, match=r"model.safetensors"):
        AutoModelForCausalLM.from_pretrained(saved)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(saved)).save_pretrained(saved, max_shard_size="1KB")
    next(saved.glob("model-00002*")).unlink()
    with pytest.raises(UsageError, match="model-00002-of-"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_files_of_torch(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    torch.save(built().state_dict(), saved / "pytorch_model.bin")
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert torch.equal(model.model.norm.weight, built().norm.weight)
    torch.save({"embed.weight": Path("code")}, saved / "pytorch_model.bin")
    with pytest.raises(UsageError, match="contains pickled objects other than tensors, which could run code"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_missing_weights_of_a_dictionary_are_an_error(saved: Path) -> None:
    """Without local weight files, transformers reports which weights it would draw."""
    config = AutoConfig.from_pretrained(saved)
    weights = {f"model.{name}": value for name, value in built().state_dict().items()}
    model = hf.SeqblocksForCausalLM.from_pretrained(None, config=config, state_dict=dict(weights))
    assert torch.equal(model.model.norm.weight, built().norm.weight)
    del weights["model.norm.weight"]
    with pytest.raises(RunError, match=r"1 is missing \(model.norm.weight\)"):
        hf.SeqblocksForCausalLM.from_pretrained(None, config=config, state_dict=weights)


def test_another_vocabulary_is_drawn_where_that_is_allowed(saved: Path) -> None:
    with pytest.raises(RunError, match=r"embed.weight is \[16, 8\], but \[20, 8\] in the"):
        AutoModelForCausalLM.from_pretrained(saved, set={"vocabulary": 20})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(saved, set={"vocabulary": 20}, ignore_mismatched_sizes=True)
    assert model.config.vocab_size == 20
    assert model.model.unembed.weight is model.model.embed.weight
    assert 0.1 < float(model.model.embed.weight.detach().std()) < 1, "initialised as in the spec"
    assert torch.equal(model.model.norm.weight, built().norm.weight)


def test_damaged_configs(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    for change, message in [
        ({"spec": None}, "the config has no spec"),
        ({"spec": "seqblocks: 1\n"}, "defines nothing"),
        ({"spec": 3}, "`spec` of the config must be a string, not 3"),
        ({"files": []}, ""),
        ({"files": ["a"]}, "`files` of the config must be a mapping from names to texts"),
        ({"overrides": {"dim": 3}}, r"the weights do not fit this model: .* is \[16, 8\], but \[16, 3\] in the model"),
        ({"overrides": {"dmi": "3"}}, "there is no 'dmi' in the spec"),
    ]:
        (saved / "config.json").write_text(json.dumps(config | change))
        if not message:  # bundled files are then those of the current version
            AutoModelForCausalLM.from_pretrained(saved)
            continue
        with pytest.raises(seqblocks.SeqblocksError, match=message):
            AutoModelForCausalLM.from_pretrained(saved)


def test_a_broken_tie_is_not_saved(saved: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    model.model.unembed.weight = torch.nn.Parameter(torch.zeros(16, 8, dtype=torch.float64))
    with pytest.raises(RunError, match=r"the spec ties model.unembed.weight to model.embed.weight"):
        model.save_pretrained(tmp_path / "n")


def test_a_full_disk_raises_the_error_of_the_system(saved: Path, limited_files: Any) -> None:
    model, size = AutoModelForCausalLM.from_pretrained(saved), (saved / "model.safetensors").stat().st_size
    with pytest.raises(OSError, match=f"File too large: '{saved.parent / 'n'}'"), limited_files(size - 1):
        model.save_pretrained(saved.parent / "n")


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("seqblocks.hf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(seqblocks.UnavailableError, match=r"pip install 'seqblocks\[hub\]'"):
        importlib.import_module("seqblocks.hf")


def test_a_later_version_of_transformers_is_an_error_that_says_what_is_untested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for version in ("5.0.0", "5.23.0", "5.24.1", transformers.__version__):
        library.check_version(version)
    for version in ("5.25.0.dev0", "6.0"):
        with pytest.raises(seqblocks.UnavailableError, match=f"up to 5.24, and {version} is installed"):
            library.check_version(version)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "7.1.0")
    with pytest.raises(seqblocks.UnavailableError, match=r"Untested: .*`generate`.*'transformers<5\.25'"):
        importlib.reload(library)
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    after = f"<{library.LATEST[0]}.{library.LATEST[1] + 1}"
    assert f"transformers>=5.0,{after}" in project, "pip should not install what is refused"


# --- which classes fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("input: {features: 4}\n  steps: [linear: 4]", "it reads .*, but a language model reads token ids"),
        ("input: {tokens: 9}\n  steps: [embed: 4]", r"its output is .*4\], but a language model returns \[batch, "),
        ("input: {tokens: 9}\n  steps: [embed: 4, scan: {order: reverse, steps: [causal_conv: {kernel: 2}]}, unembed]",
         "its output depends on later tokens"),
        ("input: {tokens: 9}\n  steps: [embed: 4, {downsample: {factor: 2}}, {upsample: {factor: 2}}, unembed]",
         "it changes the rate of its tokens, but a language model makes one for each"),
        ("input: {image: {size: 8}}\n  steps: [{patch_embed: {patch: 4, features: 4}}, pool, {classifier: 3}]",
         "it reads .*, but a language model reads token ids"),
    ],
)  # fmt: skip
def test_specs_that_are_no_language_models(steps: str, message: str) -> None:
    config = hf.SeqblocksConfig(spec=f"seqblocks: 1\nmodel:\n  {steps}\n")
    with pytest.raises(UsageError, match=f"is not a causal language model: {message}"):
        AutoModelForCausalLM.from_config(config)
    assert AutoModel.from_config(config).model.spec.output


@pytest.mark.parametrize("name", ["cache", "labels", "output_hidden_states", "cu_seq_lens_q", "input_ids"])
def test_inputs_with_names_of_arguments(name: str) -> None:
    """Such an input would never reach the spec."""
    text = f"""
seqblocks: 1
model:
  inputs: {{ids: {{tokens: 9}}, {name}: {{vector: 4}}}}
  steps: [{{embed: 4}}, {{add: {name}}}, unembed]
"""
    model = built(text)
    assert model(ids=torch.ones(1, 2, dtype=torch.long), **{name: torch.ones(1, 4, dtype=model.own_dtype())}).shape
    with pytest.raises(UsageError, match=f"cannot be named {name} in transformers: .* Rename it in the spec"):
        hf.wrap(model)
    with pytest.raises(UsageError, match=f"cannot be named {name} in transformers"):
        AutoModelForCausalLM.from_config(hf.SeqblocksConfig(spec=text))
    hf.wrap(built(text.replace(name, "pixel_values")))  # the name of the input of another class


def test_errors_of_the_other_classes(digits: Any) -> None:
    with pytest.raises(UsageError, match=r"does not classify images: it reads .* but an image classifier reads one"):
        AutoModelForImageClassification.from_config(hf.SeqblocksConfig(spec=TIED))
    text = "seqblocks: 1\nmodel:\n  input: {image: {size: 8}}\n  steps: [{patch_embed: {patch: 4, features: 4}}]\n"
    with pytest.raises(UsageError, match=r"its output is .*, but a classifier returns"):
        AutoModelForImageClassification.from_config(hf.SeqblocksConfig(spec=text))
    with pytest.raises(UsageError, match=r"has 7 labels, and vil_digits has 10 classes: .* set=\{'classes': 7\}"):
        AutoModelForImageClassification.from_config(hf.SeqblocksConfig.of("vil_digits", num_labels=7))
    with pytest.raises(UsageError, match=r"the config has no spec: use SeqblocksConfig.of"):
        AutoModelForCausalLM.from_config(hf.SeqblocksConfig())
    with pytest.raises(UsageError, match=r"a model from seqblocks\.build, not Linear"):
        hf.wrap(torch.nn.Linear(1, 1))
    pooled = TIED.replace("    - unembed: {bias: false, tie: embed}", "    - pool\n    - classifier: 3")
    with pytest.raises(UsageError, match=r"no class of transformers fits .*\. For language: .*\. For images: "):
        hf.wrap(built(pooled))


def test_images(digits: Any, tmp_path: Path) -> None:
    seqblocks.save(digits, tmp_path / "m")
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "m")
    assert (model.config.num_labels, model.config.id2label[9]) == (10, "LABEL_9")
    x, labels = torch.randn(3, 1, 8, 8), torch.tensor([1, 9, 4])
    with torch.no_grad():
        out = model(x, labels=labels)  # float32 images of a float64 model
        assert torch.equal(out.logits, digits(x.double()))
        torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, labels))
        features = AutoModel.from_pretrained(tmp_path / "m")
        pooled = features(pixel_values=x).pooler_output
        torch.testing.assert_close(pooled @ digits.head.weight.T + digits.head.bias, out.logits)
    with pytest.raises(RunError, match="reads images"):
        model(x[:, :, 0])
    with pytest.raises(RunError, match="needs its input, pixel_values"):
        model()
    with pytest.raises(RunError, match="takes no attention_mask"):
        model(x, attention_mask=torch.ones(3, 4))
    smaller = AutoModelForImageClassification.from_pretrained(
        tmp_path / "m", set={"classes": 4}, ignore_mismatched_sizes=True
    )
    assert (smaller.config.num_labels, smaller(x).logits.shape) == (4, (3, 4))


def test_features(saved: Path, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(saved)
    whole = built()
    out = model(input_ids=ids(2, 5), use_cache=True)
    torch.testing.assert_close(out.last_hidden_state @ whole.embed.weight.T, whole(ids(2, 5)))
    further = model(ids(2, 1), past_key_values=out.past_key_values).last_hidden_state
    torch.testing.assert_close(further, model(torch.cat([ids(2, 5), ids(2, 1)], 1)).last_hidden_state[:, -1:])
    model.save_pretrained(tmp_path / "n")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "n")(ids(1, 3)).logits, whole(ids(1, 3)))


def test_features_leave_an_untied_head_in_the_file(tmp_path: Path) -> None:
    seqblocks.save(built(TIED.replace(", tie: embed", "")), tmp_path / "m")
    model = AutoModel.from_pretrained(tmp_path / "m")
    assert not any("unembed" in name for name in model.state_dict())
    model.save_pretrained(tmp_path / "n")
    assert AutoModel.from_pretrained(tmp_path / "n")(ids(1, 3)).last_hidden_state.shape == (1, 3, 8)
    with pytest.raises(RunError, match=r"1 is missing \(unembed.weight\)"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "n")
    with pytest.raises(UsageError, match=r"was not written by seqblocks.save"):
        seqblocks.load(tmp_path / "n")


def test_features_of_sequences_and_both_directions() -> None:
    text = """
seqblocks: 1
use: [xlstm]
model:
  input: {features: 8}
  steps:
    - scan: {order: [forward, reverse], own: all, merge: sum, steps: [mlstm_block: {dim: 8, heads: 2}]}
"""
    model = hf.wrap(built(text))
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0]])  # padding on both sides: the model is bidirectional
    y = model(inputs_embeds=x, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(y[0, :4], model(inputs_embeds=x[:1, :4]).last_hidden_state[0])
    torch.testing.assert_close(y[1, 2:5], model(inputs_embeds=x[1:, 2:5]).last_hidden_state[0])
    with pytest.raises(RunError, match="cannot stream"):
        model(inputs_embeds=x, use_cache=True)


def test_a_part_of_a_split_model_is_not_wrapped() -> None:
    model = built()
    model.tensor_shards = TensorShards(None, 0, 2, {}, model.spec)
    with pytest.raises(UsageError, match=r"one rank's part of the weights: save it, then wrap"):
        hf.wrap(model)


def test_a_sharded_model_runs_and_its_weights_are_saved_when_they_are_gathered(tmp_path: Path) -> None:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        whole = seqblocks.build("mamba_small", set={"dim": 16, "depth": 2}, seed=0).eval()
        model = hf.wrap(shard(seqblocks.build("mamba_small", set={"dim": 16, "depth": 2}, seed=0).eval()))
        x = ids(1, 6)
        torch.testing.assert_close(model(input_ids=x).logits, whole(x))
        with pytest.raises(RunError, match=r"sharded over ranks.*full_state_dict=True.*seqblocks\.save"):
            model.save_pretrained(tmp_path / "refused")
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        model.save_pretrained(tmp_path / "gathered", state_dict=weights)
        seqblocks.save(model.model, tmp_path / "saved")
    finally:
        distributed.destroy_process_group()
    for folder in ("gathered", "saved"):
        assert torch.equal(seqblocks.load(tmp_path / folder)(x), whole(x))


@pytest.mark.parametrize("order", ["forward", "[forward, reverse]"])
def test_padding_on_the_right_is_not_pooled(order: str) -> None:
    text = f"""
seqblocks: 1
use: [mingru]
model:
  input: {{tokens: 16}}
  steps:
    - embed: 8
    - scan: {{order: {order}, merge: sum, steps: [mingru_mixer: {{dim: 8}}]}}
    - pool: {{mode: last}}
"""
    model, x = hf.wrap(built(text)), ids(1, 6)
    y = model(x, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1]])).pooler_output
    torch.testing.assert_close(y, model(x[:, 2:]).pooler_output)
    with pytest.raises(RunError, match="padding after the last token, which would change the state or the output"):
        model(x, attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0]]))


def test_a_compiled_model_that_reads_both_ways_separates_padding_too(monkeypatch: pytest.MonkeyPatch) -> None:
    x, mask = ids(1, 5), torch.tensor([[0, 1, 1, 0, 0]])
    expected = resets_of(x, mask, None, 0, causal=False, continues=False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(resets_of(x, mask, None, 0, causal=False, continues=False), expected)


def test_features_between_layers(saved: Path, digits: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    x = ids(2, 6)
    with torch.no_grad():
        states = model(x, output_hidden_states=True, logits_to_keep=1).hidden_states
        assert [tuple(each.shape) for each in states] == [(2, 6, 8)] * 3
        torch.testing.assert_close(states[0], model.model.embed.weight[x])
        normed = torch.nn.functional.rms_norm(states[2], (8,), model.model.norm.weight, model.model.norm.op.eps)
        torch.testing.assert_close(normed @ model.model.unembed.weight.T, model(x).logits)
        cache = model(x[:, :5], use_cache=True).past_key_values
        last = model(x[:, 5:], past_key_values=cache, output_hidden_states=True).hidden_states
        for one, whole in zip(last, states, strict=True):
            torch.testing.assert_close(one, whole[:, 5:])
        out = model.generate(
            x, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_hidden_states=True
        )
        assert [len(each) for each in out.hidden_states] == [3, 3, 3]
        assert out.hidden_states[2][2].shape == (2, 1, 8)
        assert model(x).hidden_states is None
        classifier = hf.wrap(digits)
        images = classifier(torch.randn(2, 1, 8, 8), output_hidden_states=True).hidden_states
        assert [tuple(each.shape) for each in images] == [(2, 16, 16)] * 3
        assert AutoModel.from_pretrained(saved)(x, output_hidden_states=True).hidden_states[1].shape == (2, 6, 8)
    flat = hf.SeqblocksConfig(spec="seqblocks: 1\nmodel:\n  input: {tokens: 9}\n  steps: [embed: 4, unembed]\n")
    with pytest.raises(RunError, match="has no `repeat`, so it has no hidden states"):
        AutoModelForCausalLM.from_config(flat)(ids(1, 2) % 9, output_hidden_states=True)


def test_named_outputs(tmp_path: Path) -> None:
    """The language model returns the logits of several outputs, and AutoModel returns all outputs by name."""
    text = TIED.replace("{name: norm}", "{name: norm, as: torso}").replace(
        "    - unembed: {", "    - linear: {features: 1, as: value}\n    - unembed: {from: torso, as: logits, "
    )
    seqblocks.save(built(text + "  outputs: [value, logits]\n"), tmp_path / "m")
    model, both = AutoModelForCausalLM.from_pretrained(tmp_path / "m"), AutoModel.from_pretrained(tmp_path / "m")
    x = ids(2, 5)
    out = both(x, use_cache=True)
    assert (out.value.shape, out["logits"].shape) == ((2, 5, 1), (2, 5, 16))
    torch.testing.assert_close(model(x).logits, out.logits)
    with torch.no_grad():
        one = both(x[:, :1], past_key_values=out.past_key_values)
    torch.testing.assert_close(one.value, both(torch.cat([x, x[:, :1]], 1)).value[:, 5:])
    assert model.generate(x, max_new_tokens=2, do_sample=False, num_beams=2).shape == (2, 7)
    with pytest.raises(RunError, match="needs its input, input_ids"):
        both(inputs_embeds=torch.zeros(1, 2, 8))


# --- parts, copies ---------------------------------------------------------------------------------------------------


def test_embeddings() -> None:
    model = hf.wrap(built())
    assert model.get_input_embeddings() is model.model.embed
    assert model.get_output_embeddings() is model.model.unembed
    assert model.resize_token_embeddings() is model.resize_token_embeddings(16) is model.model.embed
    with pytest.raises(RunError, match="the spec sets a vocabulary of 16 tokens, which cannot be resized to 20"):
        model.resize_token_embeddings(20)
    with pytest.raises(RunError, match=r"embed.weight must have the shape \[16, 8\] of the spec, not \[20, 8\]"):
        model.set_input_embeddings(torch.nn.Embedding(20, 8))
    before = model(ids(1, 4)).logits
    other = torch.nn.Embedding(16, 8, dtype=torch.float64)
    model.set_input_embeddings(other)
    model.tie_weights()
    assert model.model.unembed.weight is other.weight
    assert not torch.equal(model(ids(1, 4)).logits, before)


def test_gradients_of_inputs_for_adapters() -> None:
    model = hf.wrap(built())
    model.requires_grad_(False)
    model.enable_input_require_grads()
    assert model(ids(1, 4)).logits.requires_grad
    model.disable_input_require_grads()
    assert not model(ids(1, 4)).logits.requires_grad


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(how: Any) -> None:
    model = hf.wrap(built(), eos_token_id=7)
    model.generate(ids(1, 3), max_new_tokens=2, do_sample=False)
    again = how(model)
    assert again.model.unembed.weight is again.model.embed.weight
    assert again.model.embed.weight is not model.model.embed.weight
    assert torch.equal(again(ids(2, 4)).logits, model(ids(2, 4)).logits)
    again.load_state_dict({name: value + 1 for name, value in built().state_dict().items() if "unembed" not in name})
    assert torch.equal(again.model.norm.weight, model.model.norm.weight + 1)
    assert again.config.eos_token_id == 7


@pytest.mark.long
def test_the_whole_forward_pass_is_one_graph() -> None:
    model = hf.wrap(built())
    x, mask = ids(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    with torch.no_grad():
        y = compiled(x, attention_mask=mask).logits
        torch.testing.assert_close(y[0, 2:], model(x[:1, 2:]).logits[0])
        torch.testing.assert_close(compiled(x, labels=x).loss, model(x, labels=x).loss)


def test_random_weights_follow_the_seed_of_torch() -> None:
    config = hf.SeqblocksConfig.of("mamba_small", set={"dim": 8, "depth": 1})
    made = []
    for seed in (0, 0, 1):
        transformers.set_seed(seed)
        made.append(AutoModelForCausalLM.from_config(config).model.embed.weight)
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_layers_are_computed_again() -> None:
    model = hf.wrap(built()).train()
    x = ids(2, 6)
    model(x, labels=x).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    names = list(model.state_dict())
    for options in ({}, {"every_n_layers": 2}, {"activation_checkpointing_kwargs": {"use_reentrant": True}}):
        model.activation_checkpointing_enable(**options)
        if options.get("activation_checkpointing_kwargs"):
            model.enable_input_require_grads()
        assert model.is_gradient_checkpointing
        assert list(model.state_dict()) == names
        calls: list[None] = []
        handle = model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(None))  # noqa: B023
        model.zero_grad()
        model(x, labels=x).loss.backward()
        handle.remove()
        assert len(calls) == 2
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, expected[name])
        model.activation_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    flat = hf.SeqblocksConfig(spec="seqblocks: 1\nmodel:\n  input: {tokens: 9}\n  steps: [embed: 4, unembed]\n")
    with pytest.raises(RunError, match="has no `repeat`"):
        AutoModelForCausalLM.from_config(flat).activation_checkpointing_enable()
