"""Tokenizers in GGUF files: what llama.cpp reads of a tokenizer.json, and the reasons why others are refused.

benchmarks/gguf_logits.py compares tokens with llama.cpp itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import seqblocks
from benchmarks.gguf_tokenizers import byte_level, sentencepiece
from seqblocks.checkpoint import to_gguf
from seqblocks.cli.main import main
from seqblocks.errors import RunError, UsageError

gguf = pytest.importorskip("gguf", reason="an optional extra; the test extra installs it")
tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `hub`")
SIZE = 448


@pytest.fixture
def model(tmp_path: Path) -> Path:
    seqblocks.save(seqblocks.build("mamba_130m", set={"dim": 32, "depth": 1, "vocabulary": SIZE}), tmp_path / "model")
    return tmp_path / "model"


def metadata_of(file: Path) -> dict[str, Any]:
    """Return what a file says of its tokenizer."""
    fields = gguf.GGUFReader(file).fields
    start = "tokenizer."
    return {key.removeprefix(start): each.contents() for key, each in fields.items() if key.startswith(start)}


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "qwen2", "smaug-bpe", "llama-bpe"])
def test_byte_level_tokenizers(model: Path, tmp_path: Path, name: str) -> None:
    saved = byte_level(tmp_path / "tokens", name)
    to_gguf(model, tmp_path / "x.gguf", tokenizer=tmp_path / "tokens")
    found = metadata_of(tmp_path / "x.gguf")
    assert (found["ggml.model"], found["ggml.pre"]) == ("gpt2", name)
    tokens, kinds = found["ggml.tokens"], found["ggml.token_type"]
    assert len(tokens) == len(kinds) == len(set(tokens)) == SIZE
    for text, at in saved.get_vocab().items():
        assert tokens[at] == text
    special, own = saved.token_to_id("<|end|>"), saved.token_to_id("<own>")
    assert (kinds[special], kinds[own], kinds[5]) == (3, 4, 1)  # control, user-defined, normal
    assert set(kinds[saved.get_vocab_size() :]) == {5}  # unused
    merges = json.loads((tmp_path / "tokens" / "tokenizer.json").read_text())["model"]["merges"]
    assert found["ggml.merges"] == [" ".join(pair) for pair in merges]
    assert found["ggml.eos_token_id"] == special
    assert found["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize("prefix", [True, False])
def test_tokenizers_of_sentencepiece(model: Path, tmp_path: Path, prefix: bool) -> None:
    saved = sentencepiece(tmp_path / "tokens", prefix)
    to_gguf(model, tmp_path / "x.gguf", tokenizer=tmp_path / "tokens")
    found = metadata_of(tmp_path / "x.gguf")
    assert (found["ggml.model"], found["ggml.add_space_prefix"]) == ("llama", prefix)
    tokens, kinds, scores = (found[f"ggml.{name}"] for name in ("tokens", "token_type", "scores"))
    assert len(tokens) == len(scores) == SIZE
    assert kinds[saved.token_to_id("<unk>")] == 2
    assert kinds[saved.token_to_id("<0x0A>")] == 6
    merged = ["".join(pair) for pair in json.loads(saved.to_str())["model"]["merges"]]
    ranks = [-scores[saved.token_to_id(text)] for text in dict.fromkeys(merged)]
    assert ranks == list(range(len(ranks)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": {"type": "Unigram"}}, "it is a Unigram model"),
        ({"normalizer": {"type": "Lowercase"}}, "its text is normalized by Lowercase"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "how it splits text: Whitespace"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "how it splits text: ByteLevel"),
        ({"model": {"end_of_word_suffix": "</w>"}}, "its end_of_word_suffix is '</w>'"),
        ({"added_tokens": [{"id": 900, "content": "<far>", "special": True}]}, "'<far>' is token 900, but"),
    ],
)
def test_other_tokenizers_are_refused(model: Path, tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    byte_level(tmp_path / "tokens", "gpt-2")
    file = tmp_path / "tokens" / "tokenizer.json"
    found = json.loads(file.read_text())
    for key, value in change.items():
        found[key] = {**found[key], **value} if key == "model" else value
    file.write_text(json.dumps(found))
    with pytest.raises(RunError, match=reason):
        to_gguf(model, tmp_path / "x.gguf", tokenizer=tmp_path / "tokens")
    assert not (tmp_path / "x.gguf").exists()


def test_merges_in_another_order_are_refused(model: Path, tmp_path: Path) -> None:
    sentencepiece(tmp_path / "tokens", True)
    file = tmp_path / "tokens" / "tokenizer.json"
    found = json.loads(file.read_text())
    merges = found["model"]["merges"]
    found["model"]["merges"] = [merges[0], merges[1], merges[0]]
    file.write_text(json.dumps(found))
    with pytest.raises(RunError, match="not in the order of the scores"):
        to_gguf(model, tmp_path / "x.gguf", tokenizer=tmp_path / "tokens")


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the tokenizer.json in a folder."""
    found = json.loads((folder / "tokenizer.json").read_text())
    change(found)
    (folder / "tokenizer.json").write_text(json.dumps(found))


def test_merges_that_sentencepiece_would_add_are_refused(model: Path, tmp_path: Path) -> None:
    """a b is merged first here, and then nothing; sentencepiece merges all tokens whose texts together are a token."""
    sentencepiece(tmp_path / "tokens", True)

    def change(found: dict[str, Any]) -> None:
        vocabulary = found["model"]["vocab"]
        for text in ("þ", "ð", "æ", "þð", "ðæ", "þðæ"):
            vocabulary[text] = len(vocabulary)
        found["model"]["merges"] += [["þ", "ð"], ["ð", "æ"], ["þ", "ðæ"]]

    changed(tmp_path / "tokens", change)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokens" / "tokenizer.json"))
    assert tokenizer.encode("þðæ").tokens == ["▁", "þð", "æ"]
    with pytest.raises(RunError, match="does not merge 'þð' and 'æ' to 'þðæ', as sentencepiece would"):
        to_gguf(model, tmp_path / "x.gguf", tokenizer=tmp_path / "tokens")
    changed(tmp_path / "tokens", lambda found: found["model"]["merges"].append(["þð", "æ"]))
    to_gguf(model, tmp_path / "x.gguf", tokenizer=tmp_path / "tokens")


@pytest.mark.parametrize("kind", ["llama-bpe", "sentencepiece"])
@pytest.mark.parametrize("adds", [False, True])
def test_a_first_token_is_added_only_if_the_tokenizer_does(
    model: Path, tmp_path: Path, kind: str, adds: bool
) -> None:
    """By default, llama.cpp adds one in these kinds of tokenizers."""
    folder = tmp_path / "tokens"
    _ = sentencepiece(folder, True) if kind == "sentencepiece" else byte_level(folder, kind)
    if adds:
        begin = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}
        sequence = {"Sequence": {"id": "A", "type_id": 0}}
        ids = {"<|end|>": {"id": "<|end|>", "ids": [1], "tokens": ["<|end|>"]}}
        after = {"type": "TemplateProcessing", "single": [begin, sequence], "pair": [], "special_tokens": ids}
        changed(folder, lambda found: found.update(post_processor=after))
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|end|>"}))
    to_gguf(model, tmp_path / "x.gguf", tokenizer=folder)
    assert metadata_of(tmp_path / "x.gguf")["ggml.add_bos_token"] is adds


ODD: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda found: found["model"]["vocab"].update({"\ud800": 447}), "token 447 is no text in Unicode"),
    (lambda found: found["model"].update(merges=[]), "it has no merges"),
    (lambda found: found["added_tokens"].append({"id": 447, "content": "<own>", "special": False}), "are both '<own>'"),
    (lambda found: found.update(post_processor={"type": "BertProcessing"}), "added to its text by BertProcessing"),
]


@pytest.mark.parametrize(("change", "reason"), ODD)
def test_odd_tokenizers(
    model: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    byte_level(tmp_path / "tokens", "gpt-2")
    changed(tmp_path / "tokens", change)
    with pytest.raises(RunError, match=reason):
        to_gguf(model, tmp_path / "x.gguf", tokenizer=tmp_path / "tokens")


def test_all_bytes_must_be_tokens(model: Path, tmp_path: Path) -> None:
    sentencepiece(tmp_path / "tokens", True)
    changed(tmp_path / "tokens", lambda found: found["model"]["vocab"].pop("<0x41>"))
    with pytest.raises(RunError, match="it has no token <0x41>"):
        to_gguf(model, tmp_path / "x.gguf", tokenizer=tmp_path / "tokens")


def test_unused_tokens_have_names_of_their_own(model: Path, tmp_path: Path) -> None:
    byte_level(tmp_path / "tokens", "gpt-2")
    changed(tmp_path / "tokens", lambda found: found["model"]["vocab"].update({"[PAD447]": 440}))
    to_gguf(model, tmp_path / "x.gguf", tokenizer=tmp_path / "tokens")
    tokens = metadata_of(tmp_path / "x.gguf")["ggml.tokens"]
    assert tokens[440] == "[PAD447]"
    assert len(set(tokens)) == SIZE


def test_a_negative_special_token_is_none(model: Path, tmp_path: Path) -> None:
    byte_level(tmp_path / "tokens", "gpt-2")
    (tmp_path / "tokens" / "config.json").write_text('{"pad_token_id": -1, "bos_token_id": 3}')
    to_gguf(model, tmp_path / "x.gguf", tokenizer=tmp_path / "tokens")
    found = metadata_of(tmp_path / "x.gguf")
    assert "ggml.padding_token_id" not in found
    assert found["ggml.bos_token_id"] == 3


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
def test_a_broken_file_beside_the_tokenizer(model: Path, tmp_path: Path, name: str) -> None:
    byte_level(tmp_path / "tokens", "gpt-2")
    (tmp_path / "tokens" / name).write_text("{")
    with pytest.raises(UsageError, match=r"special tokens in .*config\.json.* cannot be read"):
        to_gguf(model, tmp_path / "x.gguf", tokenizer=tmp_path / "tokens")


def test_faults(model: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"has no tokenizer\.json"):
        to_gguf(model, tmp_path / "x.gguf", tokenizer=tmp_path / "empty")
    (tmp_path / "empty" / "tokenizer.json").write_text("[]")
    arguments = ["convert", str(model), "--to", "gguf", "--out", str(tmp_path / "x.gguf"), "--tokenizer"]
    assert main([*arguments, str(tmp_path / "empty")]) == 2
    assert "is not a tokenizer of transformers" in capsys.readouterr().err
    byte_level(tmp_path / "tokens", "gpt-2")
    assert main([*arguments, str(tmp_path / "tokens")]) == 0
