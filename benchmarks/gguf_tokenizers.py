"""Small tokenizers of each kind that `convert --to gguf --tokenizer` writes for llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEXTS = [
    "Hello world, it's 12345 o'clock!  Two  spaces and\ttabs\n\nnew lines.\n",
    "def f(x):\n    return x ** 2  # I'LL square 3.14159\r\n",
    "Größe, naïve café, русский текст, 漢字かな交じり文, 👍🏽 emoji, العربية 123",
    "   leading and trailing spaces   ",
    "<own> and <|end|> are tokens",
]
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACE = "▁"


def byte_level(folder: Path, name: str, size: int = 300) -> Any:
    """Train a tokenizer whose text is split as llama.cpp's `name` does, and save it. Returns it."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    simple = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in ("gpt-2", "smollm"):
        digits = [pre_tokenizers.Digits(individual_digits=True)] if name == "smollm" else []
        made.pre_tokenizer = pre_tokenizers.Sequence([*digits, simple]) if digits else simple
    else:
        pattern = Regex(WORDS % ("" if name == "qwen2" else "{1,3}"))
        split = pre_tokenizers.Split(pattern, behavior="isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    made.add_tokens([AddedToken("<own>", normalized=False)])
    return _saved(folder, made)


def sentencepiece(folder: Path, prefix: bool, size: int = 440) -> Any:
    """Train a tokenizer with tokens for bytes, and save it. prefix: whether it adds a space before a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers

    spaces = normalizers.Replace(" ", SPACE)
    normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=size - 258, show_progress=False, max_token_length=8)
    learned.train_from_iterator(TEXTS, trainer)
    found = json.loads(learned.to_str())["model"]
    tokens = ["<unk>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256)), *found["vocab"]]
    merges = [tuple(pair) for pair in found["merges"]]
    numbers = {text: at for at, text in enumerate(tokens)}
    made = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizer
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("<|end|>", special=True)])
    return _saved(folder, made)


def _saved(folder: Path, made: Any) -> Any:
    folder.mkdir(parents=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return made
