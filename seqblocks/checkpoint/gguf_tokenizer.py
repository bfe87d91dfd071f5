"""The tokenizer of a GGUF file, from the tokenizer.json of transformers.

llama.cpp computes how text is split before the merges of byte-pair encoding by a regular expression that has a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from seqblocks.checkpoint.weight_files import read_json
from seqblocks.errors import RunError, UsageError

FILE = "tokenizer.json"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is split, and whether words that are tokens are taken as they are -> llama.cpp's name.
SPLITS: dict[tuple[tuple[str, ...], bool], str] = {
    (("GPT-2",), False): "gpt-2",
    (("digits", "GPT-2"), False): "smollm",
    ((WORDS % "", "bytes"), False): "qwen2",
    ((WORDS % "{1,3}", "bytes"), False): "smaug-bpe",
    ((WORDS % "{1,3}", "bytes"), True): "llama-bpe",
}
SPACE = "▁"  # a space in tokens of sentencepiece


class Vocabulary(NamedTuple):
    """The tokens of a tokenizer, as GGUF files store them.

    model: gpt2, whose tokens are bytes, or llama, which is sentencepiece's byte-pair encoding. pre: the name of how
    text is split. kinds: numbers of `gguf.TokenType`. scores: for llama, in which order tokens are merged. prefix: for
    llama, whether a space is added before a text.
    """

    model: str
    pre: str
    tokens: list[str]
    kinds: list[int]
    scores: list[float]
    prefix: bool


def read_vocabulary(library: Any, folder: Path, size: int) -> Vocabulary:
    """Return the tokenizer in a folder, for a model with `size` tokens; unused ones are added at the end.

    Raises RunError with the reason if llama.cpp has no such tokenizer, and UsageError if there is none in the folder.
    """
    if not (folder / FILE).is_file():
        raise UsageError(f"{folder} has no {FILE}")
    found = read_json(folder / FILE)
    try:
        return _read(library, found, size)
    except RunError as error:
        raise RunError(f"llama.cpp cannot run the tokenizer in {folder}, so no GGUF file is written: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise UsageError(f"{folder / FILE} is not a tokenizer of transformers") from None


def _read(library: Any, found: Any, size: int) -> Vocabulary:
    model = found["model"]
    if model.get("type", "BPE") != "BPE":
        raise RunError(f"it is a {model['type']} model; only BPE is written")
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(name):
            raise RunError(f"its {name} is {model[name]!r}")
    kind = library.TokenType
    tokens, kinds = dict.fromkeys(range(size), ""), dict.fromkeys(range(size), int(kind.UNUSED))
    listed = [(at, text, kind.NORMAL) for text, at in model["vocab"].items()]
    own = {True: kind.CONTROL, False: kind.USER_DEFINED}
    added = [(each["id"], each["content"], own[each["special"]]) for each in found["added_tokens"]]
    for at, text, what in listed + added:
        if at not in tokens:
            raise RunError(f"{text!r} is token {at}, but the model has {size} tokens")
        tokens[at], kinds[at] = text, int(what)
    texts = [text or f"[PAD{at}]" for at, text in tokens.items()]  # the names must differ
    if model.get("byte_fallback"):
        return _sentencepiece(kind, found, texts, list(kinds.values()))
    return Vocabulary("gpt2", _split(found), texts, list(kinds.values()), [], False)


def _stages(found: Any) -> list[Mapping[str, Any]]:
    """Return the parts of a normalizer or pre-tokenizer."""
    if not found:
        return []
    return found.get("normalizers") or found.get("pretokenizers") or [found]


def _split(found: Any) -> str:
    """Return llama.cpp's name of how text is split."""
    if kinds := [x["type"] for x in _stages(found.get("normalizer")) if x["type"] != "NFC"]:
        raise RunError(f"its text is normalized by {kinds[0]}")
    stages = tuple(_stage(stage) for stage in _stages(found.get("pre_tokenizer")))
    name = SPLITS.get((stages, bool(found["model"].get("ignore_merges"))))
    if name is None:
        how = ", ".join(stages) or "not at all"
        raise RunError(f"seqblocks knows no name of llama.cpp for how it splits text: {how}")
    return name


def _stage(stage: Mapping[str, Any]) -> str:
    kind = stage["type"]
    if kind == "ByteLevel" and not stage.get("add_prefix_space"):
        return "GPT-2" if stage.get("use_regex", True) else "bytes"
    if kind == "Split" and stage["behavior"] == "Isolated" and not stage.get("invert"):
        return str(stage["pattern"].get("Regex"))
    return "digits" if kind == "Digits" and stage.get("individual_digits") else str(kind)


def _sentencepiece(kind: Any, found: Any, texts: list[str], kinds: list[int]) -> Vocabulary:
    """Return a vocabulary whose merges are those of sentencepiece: the tokens of the best scores first."""
    merged = [x.replace(" ", "") if isinstance(x, str) else "".join(x) for x in found["model"]["merges"]]
    ranks = {text: at for at, text in enumerate(dict.fromkeys(merged))}
    order = [ranks[text] for text in merged]
    if order != sorted(order):
        raise RunError("its merges are not in the order of the scores of tokens, as those of sentencepiece are")
    unknown = found["model"].get("unk_token")
    for at, text in enumerate(texts):
        if len(text) == 6 and text.startswith("<0x"):
            kinds[at] = int(kind.BYTE)
        elif text == unknown:
            kinds[at] = int(kind.UNKNOWN)
    scores = [-float(ranks.get(text, len(ranks))) for text in texts]
    return Vocabulary("llama", "default", texts, kinds, scores, _adds_a_space(found))


def _adds_a_space(found: Any) -> bool:
    """Return whether a space is added before a text. Raises RunError if text is changed or split otherwise."""
    adds = False
    for stage in _stages(found.get("normalizer")):
        if stage["type"] == "Prepend" and stage["prepend"] == SPACE:
            adds = True
        elif not (stage["type"] == "Replace" and (stage["pattern"].get("String"), stage["content"]) == (" ", SPACE)):
            raise RunError(f"its text is normalized by {stage['type']}")
    for stage in _stages(found.get("pre_tokenizer")):
        if stage["type"] == "Metaspace" and not stage.get("split", True):
            adds = stage.get("prepend_scheme", "always") != "never"
        elif not (stage["type"] == "Split" and stage["pattern"].get("String") == " "):
            raise RunError(f"its text is split by {stage['type']}")
    return adds


def add_vocabulary(library: Any, writer: Any, found: Vocabulary, folder: Path) -> None:
    """Add a tokenizer to a file, with special tokens and the chat template in its folder."""
    writer.add_tokenizer_model(found.model)
    writer.add_tokenizer_pre(found.pre)
    writer.add_token_list(found.tokens)
    writer.add_token_types(found.kinds)
    if found.scores:
        writer.add_token_scores(found.scores)
        writer.add_add_space_prefix(found.prefix)
    special = library.SpecialVocab(folder, load_merges=found.model == "gpt2", n_vocab=len(found.tokens))
    special.add_to_gguf(writer, quiet=True)
