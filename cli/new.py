"""`seqblocks new`: write a commented spec to start from, or a copy of a bundled one."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from seqblocks._version import __version__
from seqblocks.cli import output
from seqblocks.errors import UsageError, quote, visible
from seqblocks.language.spec_files import bundled
from seqblocks.language.writing import write_text
from seqblocks.suggestions import did_you_mean

TEMPLATE = """# {name}: a small language model to start from. `seqblocks check {file}` checks it as you edit.
seqblocks: 1                    # version of the language
about: A byte-level language model, three layers of a gated memory and one of attention

use: [xlstm, transformer]       # bundled blocks; `seqblocks list` shows them all, `seqblocks ops NAME` describes one

let:                            # options: change them here, or with --set dim=256
  dim: 128
  heads: 4
  rounds: 1
  vocabulary: 256               # bytes; for a tokenizer, its number of tokens

model:
  input: {{tokens: vocabulary}}   # features and images are other kinds of input
  steps:
    - embed: {{features: dim, init: {{weight: "normal(0, 0.02)"}}}}
    - repeat:
        name: layers            # parameters are named layers.0.…, layers.1.…
        pattern: m*3 a          # what each layer is; the words are defined below
        times: rounds
        m:
          - mlstm_block: {{dim: dim, heads: heads}}
        a:
          - attention_layer: {{dim: dim, heads: heads, kv_heads: 1, window: 64}}
          - swiglu_layer: {{dim: dim}}
    - rms_norm: {{name: norm}}
    - unembed: {{bias: false, tie: embed}}

# expect:                       # fail when an edit changes what must stay
#   params: {{at_most: 1M}}
"""
NEXT = (
    ("check FILE", "find mistakes as you edit it"),
    ("build FILE", "shapes, parameters and cost of each step"),
    ("serve FILE", "edit it in a page, with its picture"),
    ("try FILE --text book.txt", "let it learn a text for three minutes"),
)
DROPPED = ("expect", "checkpoint")  # of a bundled spec: they hold for its sizes and names alone


def run(options: argparse.Namespace) -> int:
    """Write NAME.yaml. Raises UsageError if the file exists or there is no such bundled spec."""
    path = Path(options.name if options.name.endswith((".yaml", ".yml")) else f"{options.name}.yaml")
    if path.exists() or path.is_symlink():
        raise UsageError(f"{visible(str(path))} exists; choose another name, or remove it first")
    file = visible(shlex.quote(path.name))
    text = _like(options.like, path.stem) if options.like else TEMPLATE.format(name=visible(path.stem), file=file)
    write_text(path, text)
    name = visible(str(path))
    if options.format == "json":
        output.dump({"version": __version__, "ok": True, "file": str(path), "like": options.like})
    elif not options.quiet:
        given, page = (visible(shlex.quote(each)) for each in (str(path), f"{path.stem}.html"))
        first, last = f"{name} is written. Next:", f"  seqblocks draw {given} --html {page}"
        width = max(len(f"seqblocks {each}") for each, _ in NEXT) + len(given) - len("FILE")
        lines = (f"  {f'seqblocks {each}'.replace('FILE', given):<{width}}   {what}" for each, what in NEXT)
        output.write("\n".join([first, *lines, last]))
    return 0


def _like(model: str, name: str) -> str:
    """Return the text of a bundled model under another name, without what holds for its sizes alone."""
    path = bundled().get(model)
    if path is None or path.parent.name != "models":
        models = [each for each, place in bundled().items() if place.parent.name == "models"]
        hint = did_you_mean(model, models) or "`seqblocks list` shows them"
        raise UsageError(f"there is no bundled model {quote(model)}: {hint}")
    sections = re.split(r"(?m)^(?=[a-z])", path.read_text(encoding="utf-8"))
    kept = [section for section in sections if section.partition(":")[0] not in DROPPED]
    return f"# {visible(name)}: begun as a copy of {model}\n{''.join(kept).rstrip()}\n"
