"""The tokenizer of a GGUF file, from the tokenizer.json of transformers.

llama.cpp computes how text is split before the merges of byte-pair encoding by a regular expression that has a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
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
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]  # its tokens for bytes
# Parts of a post-processor whose special tokens the package gguf reads, or that add none.
AFTERWARDS = ("ByteLevel", "TemplateProcessing", "RobertaProcessing")


class Vocabulary(NamedTuple):
    """The tokens of a tokenizer, as GGUF files store them.

    model: gpt2, whose tokens are bytes, or llama, which is sentencepiece's byte-pair encoding. pre: the name of how
    text is split. kinds: numbers of `gguf.TokenType`. scores: for llama, in which order tokens are merged. prefix: for
    llama, whether a space is added before a text. special: the special tokens and the chat template, of `gguf`.
    """

    model: str
    pre: str
    tokens: list[str]
    kinds: list[int]
    scores: list[float]
    prefix: bool
    special: Any = None


def read_vocabulary(library: Any, folder: Path, size: int) -> Vocabulary:
    """Return the tokenizer in a folder, for a model with `size` tokens; unused ones are added at the end.

    Raises RunError with the reason if llama.cpp has no such tokenizer, and UsageError if there is none in the folder.
    """
    if not (folder / FILE).is_file():
        raise UsageError(f"{folder} has no {FILE}")
    found = read_json(folder / FILE)
    try:
        vocabulary = _read(library, found, size)
        _check_added_tokens(found)
    except RunError as error:
        raise RunError(f"llama.cpp cannot run the tokenizer in {folder}, so no GGUF file is written: {error}") from None
    except (KeyError, TypeError, AttributeError, ValueError):
        raise UsageError(f"{folder / FILE} is not a tokenizer of transformers") from None
    return vocabulary._replace(special=_special(library, folder, vocabulary))


def _check_added_tokens(found: Any) -> None:
    """Raise RunError if special tokens are added to a text in a way that the package gguf does not read."""
    after = found.get("post_processor")
    for stage in (after.get("processors") or [after]) if after else ():
        if stage["type"] not in AFTERWARDS:
            raise RunError(f"tokens are added to its text by {stage['type']}")


def _special(library: Any, folder: Path, found: Vocabulary) -> Any:
    """Return the special tokens and the chat template in a folder. Raises UsageError if a file cannot be read."""

    class Special(library.SpecialVocab):
        def _set_special_token(self, typ: str, tid: Any) -> None:
            if isinstance(tid, int) and tid >= 0:  # a config.json may have -1 for none, which is an error there
                super()._set_special_token(typ, tid)

    try:
        made = Special(folder, load_merges=found.model == "gpt2", n_vocab=len(found.tokens))
    except (ValueError, TypeError, AttributeError, LookupError, OSError) as error:
        files = f"{FILE}, tokenizer_config.json, config.json or a chat template"
        raise UsageError(f"the special tokens in {folder} ({files}) cannot be read: {error}") from None
    for kind in ("bos", "eos"):  # llama.cpp adds a first token to a text by default, for some kinds of tokenizers
        made.add_special_token.setdefault(kind, False)
    return made


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
    given = {text: at for at, text in tokens.items() if text}
    for at, text in tokens.items():
        if text and given[text] != at:
            raise RunError(f"tokens {at} and {given[text]} are both {text!r}")
        if not text.isprintable() and text != text.encode("utf-8", "ignore").decode():
            raise RunError(f"token {at} is no text in Unicode: {text!r}")
    texts = [text or next(_unused_names(at, given)) for at, text in tokens.items()]  # the names must differ
    if model.get("byte_fallback"):
        return _sentencepiece(kind, found, texts, list(kinds.values()))
    if not model["merges"]:
        raise RunError("it has no merges")
    return Vocabulary("gpt2", _split(found), texts, list(kinds.values()), [], False)


def _unused_names(at: int, given: Mapping[str, int]) -> Iterator[str]:
    """Yield names of an unused token that no other one has."""
    names = (f"[PAD{at}{'_' * more}]" for more in range(len(given) + 1))
    return (name for name in names if name not in given)


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
    known = {*texts}
    if missing := next((text for text in BYTES if text not in known), None):
        raise RunError(f"it has no token {missing}")
    normal = {text for text, each in zip(texts, kinds, strict=True) if each == int(kind.NORMAL)}
    _check_merges(found["model"]["merges"], normal)
    scores = [-float(ranks.get(text, len(ranks))) for text in texts]
    return Vocabulary("llama", "default", texts, kinds, scores, _adds_a_space(found))


def _check_merges(merges: list[Any], tokens: set[str]) -> None:
    """Raise RunError if two tokens stay apart whose texts together are a token: sentencepiece merges all of these."""
    pairs = (x.partition(" ")[::2] if isinstance(x, str) else tuple(x) for x in merges)
    ranks = {pair: at for at, pair in reversed([*enumerate(pairs)])}
    for text in tokens:
        cuts = ((text[:at], text[at:]) for at in range(1, len(text)))
        if all(pair in ranks for pair in cuts if tokens.issuperset(pair)):
            continue
        parts = _merged(text, ranks)
        if len(parts) == 2 and tokens.issuperset(parts):
            raise RunError(f"it does not merge {parts[0]!r} and {parts[1]!r} to {text!r}, as sentencepiece would")


def _merged(text: str, ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Return the tokens of a text: the pair with the lowest rank is merged first."""
    parts = [*text]
    while True:
        pairs = [*pairwise(parts)]
        if not ranks.keys() & pairs:
            return parts
        at = pairs.index(min(ranks.keys() & pairs, key=ranks.__getitem__))
        parts[at : at + 2] = ["".join(pairs[at])]


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


def add_vocabulary(writer: Any, found: Vocabulary) -> None:
    """Add a tokenizer to a file, with special tokens and the chat template."""
    writer.add_tokenizer_model(found.model)
    writer.add_tokenizer_pre(found.pre)
    writer.add_token_list(found.tokens)
    writer.add_token_types(found.kinds)
    if found.scores:
        writer.add_token_scores(found.scores)
        writer.add_add_space_prefix(found.prefix)
    try:
        found.special.add_to_gguf(writer, quiet=True)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise UsageError(f"the chat template beside the {FILE} cannot be stored: {error}") from None
