"""`from_pretrained` on transformers checkpoints of hybrids of recurrences and attention."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import seqblocks
from seqblocks.checkpoint.families import spec_text
from seqblocks.checkpoint.weight_files import weights_in
from tests.sampled import sampled
from tests.torch.hub_models import DRAWN, in_float64, peer

pytest.importorskip("safetensors", reason="an optional extra; the test extra installs it")
pytestmark = pytest.mark.filterwarnings("ignore")  # a warning of transformers about kernels that are not installed
CASES = [pytest.param(family, seed, marks=[pytest.mark.long] * (seed > 0)) for family in DRAWN for seed in range(3)]

DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # buffers that the config determines


@pytest.mark.parametrize(("family", "seed"), sampled(CASES, every=4, ci=1))
def test_logits_and_weights_are_those_of_transformers(
    family: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-9)):
        model = peer(family, seed, dtype)
        place = tmp_path / str(dtype)
        model.save_pretrained(place, max_shard_size="20KB")
        ours = seqblocks.from_pretrained(place).eval()
        ids = torch.randint(0, model.config.vocab_size, (2, 16))
        with torch.no_grad():
            found = ours(ids)
            if dtype == torch.float64:
                in_float64(model, monkeypatch)
            expected = model(ids, use_cache=False).logits
        assert (found - expected).abs().max() <= tolerance * expected.abs().max()
    seqblocks.checkpoint.convert(place, "seqblocks", tmp_path / "ours")
    seqblocks.checkpoint.convert(tmp_path / "ours", DRAWN[family][2], tmp_path / "back", shard_size="20KB")
    before, after = weights_in(place), weights_in(tmp_path / "back")
    assert {name for name in before.headers if not name.endswith(DECAYS)} == after.headers.keys()
    assert all(torch.equal(before.read(name), after.read(name)) for name in after.headers)


ONE_EXPERT = {"num_experts_per_tok": 1, "norm_topk_prob": True}


@pytest.mark.parametrize(
    ("family", "entries"),
    [
        ("jamba", {"expert_layer_period": 1, "expert_layer_offset": 0, "num_experts": 3}),
        ("qwen3_next", {**ONE_EXPERT, "num_experts": 3, "mlp_only_layers": []}),
        ("qwen3_next", {**ONE_EXPERT, "num_experts": 1, "mlp_only_layers": []}),
        ("kimi_linear", {**ONE_EXPERT, "mlp_layer_types": ["sparse"] * 3}),
    ],
)
def test_experts_in_every_layer_or_one_per_token(family: str, entries: dict[str, Any], tmp_path: Path) -> None:
    """A router that is not trained is a warning; the model loads."""
    model = peer(family, 0, torch.float32, **entries)
    model.save_pretrained(tmp_path / "theirs")
    if "norm_topk_prob" in entries:
        with pytest.warns(seqblocks.SpecWarning, match="W905"):
            ours = seqblocks.from_pretrained(tmp_path / "theirs").eval()
    else:
        ours = seqblocks.from_pretrained(tmp_path / "theirs").eval()
    ids = torch.randint(0, model.config.vocab_size, (2, 16))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        assert (ours(ids) - expected).abs().max() <= 1e-5 * expected.abs().max()
    seqblocks.checkpoint.convert(tmp_path / "theirs", DRAWN[family][2], tmp_path / "back")
    before, after = weights_in(tmp_path / "theirs"), weights_in(tmp_path / "back")
    assert before.headers.keys() == after.headers.keys()


@pytest.mark.parametrize(("family", "seed"), sampled(CASES, ci=1))
def test_greedy_tokens_are_those_of_transformers(family: str, seed: int, tmp_path: Path) -> None:
    model = peer(family, seed, torch.float64)
    model.save_pretrained(tmp_path)
    ours = seqblocks.from_pretrained(tmp_path).eval()
    ids = torch.randint(0, model.config.vocab_size, (1, 5))
    with torch.no_grad():
        logits, state = ours(ids, return_state=True)
        found = [ids, logits[:, -1:].argmax(-1)]
        for _ in range(31):
            logits_t, state = ours.step(found[-1][:, 0], state)
            found.append(logits_t.argmax(-1, keepdim=True))
        tokens = torch.cat(found, 1)
        theirs = model(tokens, use_cache=False).logits.argmax(-1)  # each token is greedy after the previous ones
    assert torch.equal(tokens[:, 5:], theirs[:, 4:-1])


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_norms_inside_attention_have_another_epsilon(family: str, tmp_path: Path) -> None:
    """transformers gives these two norms of low rank the default, 1e-6, whatever `rms_norm_eps` is."""
    model = peer(family, 0, torch.float32, rms_norm_eps=0.5)
    model.save_pretrained(tmp_path)
    ids = torch.randint(0, model.config.vocab_size, (2, 16))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        assert (seqblocks.from_pretrained(tmp_path).eval()(ids) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("family", "tied"), [("qwen3_5", False), ("qwen3_5", True), ("gemma3", True)])
def test_the_language_model_of_a_model_that_reads_images(family: str, tied: bool, tmp_path: Path) -> None:
    library = pytest.importorskip("transformers", reason="needs the extra `hub`")
    name, drawn, _ = DRAWN[f"{family}_text"]
    text = drawn(random.Random(0)) | {"tie_word_embeddings": not tied if family == "qwen3_5" else tied}
    text |= {"final_logit_softcapping": None} if family == "gemma3" else {}
    of_qwen = {"depth": 1, "num_heads": 2, "patch_size": 4, "out_hidden_size": text["hidden_size"],
               "num_position_embeddings": 4}  # fmt: skip
    of_gemma = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
    vision = {"hidden_size": 16, "intermediate_size": 16, **(of_qwen if family == "qwen3_5" else of_gemma)}
    config = getattr(library, f"{name}Config")(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    model = getattr(library, f"{name}ForConditionalGeneration")(config).eval()
    model.save_pretrained(tmp_path)
    with pytest.raises(seqblocks.RunError, match=r"contain tensors that the spec does not map: .*vis"):
        seqblocks.from_pretrained(tmp_path)
    with pytest.warns(seqblocks.PartialWarning, match=r"not read: .*vis"):
        ours = seqblocks.from_pretrained(tmp_path, partial=True).eval()
    ids = torch.randint(0, text["vocab_size"], (2, 16))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        assert (ours(ids) - expected).abs().max() <= 1e-5 * expected.abs().max()
    for odd, message in (({"text_config": 3}, "text_config is not a map"), ({"odd": 1}, "does not read .*: odd")):
        with pytest.raises(seqblocks.UsageError, match=message):
            spec_text({**config.to_dict(), **odd})


def test_transformers_reads_a_folder_without_buffers_that_the_config_determines(tmp_path: Path) -> None:
    model = peer("minimax", 0, torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    seqblocks.checkpoint.convert(tmp_path / "theirs", "seqblocks", tmp_path / "ours")
    seqblocks.checkpoint.convert(tmp_path / "ours", "official", tmp_path / "back")
    again = type(model).from_pretrained(tmp_path / "back", config=model.config).eval()
    again.config._experts_implementation = model.config._experts_implementation
    ids = torch.randint(0, model.config.vocab_size, (2, 16))
    with torch.no_grad():
        assert torch.equal(again(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_buffers_of_older_releases_are_not_weights(tmp_path: Path) -> None:
    """Files of Pythia and Llama 2 contain rotary frequencies, those of Pythia also causal masks."""
    peer("gpt_neox", 0, torch.float32).save_pretrained(tmp_path / "plain")
    ours = seqblocks.from_pretrained(tmp_path / "plain")
    weights = weights_in(tmp_path / "plain")
    tensors = {name: weights.read(name) for name in weights.headers}
    attention = "gpt_neox.layers.0.attention."
    older = tensors | {
        f"{attention}rotary_emb.inv_freq": torch.ones(2),
        f"{attention}bias": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril(),
        f"{attention}masked_bias": torch.tensor(-1e9),
    }
    again = seqblocks.build_text(ours.spec.source.text)
    seqblocks.checkpoint.load_official(again, older)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))
    for odd in (f"{attention}bias", f"{attention}inv_freq"):
        with pytest.raises(seqblocks.RunError, match=odd):
            seqblocks.checkpoint.load_official(again, tensors | {odd: torch.ones(8)})
