"""A small hybrid learns English from Python's own documentation for 20 seconds, and writes some. Needs only seqblocks.

    python examples/quickstart.py [SECONDS]
"""

import sys
import time
from functools import partial

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import seqblocks
from seqblocks.training.data import READ, Text
from seqblocks.training.loop import adamw, step

try:
    from pydoc_data.topics import topics  # what `help("topics")` shows
except ImportError:  # some systems leave it out
    topics = {name: str(module.__doc__) for name, module in sys.modules.items() if module}

SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
LENGTH, BATCH, RATE, WARM_UP = 96, 8, 4e-3, 0.1  # tokens, sequences; highest rate, and the part in which it rises

SPEC = """
seqblocks: 1
about: a byte-level language model with an mLSTM, a Mamba and an attention layer
use: [xlstm, mamba, transformer]
let: {dim: 64}
model:
  input: {tokens: 256}
  steps:
    - embed: {features: dim, init: {weight: "normal(0, 0.02)"}}
    - mlstm_block: {dim: dim, heads: 2}
    - mamba_block: {dim: dim}
    - attention_layer: {dim: dim, heads: 2, window: 64}
    - swiglu_layer: {dim: dim}
    - rms_norm
    - unembed: {bias: false, tie: embed}
"""

text = Text("\n".join(topics.values()).encode(), LENGTH)
model = seqblocks.build_text(SPEC, seed=0)
torch.manual_seed(0)


def loss_of(number: int, held: bool = False) -> torch.Tensor:
    """Return the loss of a batch of pieces of the text, in bits per byte."""
    x, y = text.batch(number, BATCH, held)
    return text.loss(model(x), y)


def write(count: int = 160) -> None:
    """Stream text byte by byte: each step takes one token and the state."""
    stream = model.eval().stream(1)
    logits = [stream.step(torch.tensor([byte])) for byte in b"The "][-1]
    print("    The ", end="")
    for _ in range(count):
        token = torch.multinomial((logits / 0.7).softmax(-1), 1)[:, 0]
        print(chr(token.item()) if 32 <= token.item() < 127 else " ", end="", flush=True)
        logits = stream.step(token)
    print("\n")


count = sum(p.numel() for p in model.parameters())
print(f"\n1. A model of {count:,} parameters, untrained, writes:\n")
write()

print(f"2. It learns from {len(text.train):,} bytes for {SECONDS:g} seconds:\n")
optimizer = adamw(model.train(), RATE)
columns = [TextColumn("    {task.description}"), BarColumn(), TimeElapsedColumn()]
start, done, steps = time.perf_counter(), 0.0, 0
with Progress(*columns) as progress:
    bar = progress.add_task("", total=1.0)
    while done < 1:
        rate = RATE * min(1, (done + 0.01) / WARM_UP, 1.05 - done)
        loss = step(model, optimizer, rate, partial(loss_of, steps))
        steps, done = steps + 1, (time.perf_counter() - start) / SECONDS
        progress.update(bar, completed=done, description=f"step {steps:4}, {loss:.2f} bits per byte")
with torch.no_grad():
    held = sum(loss_of(number, held=True).item() for number in range(READ)) / READ
print(f"\n    {held:.2f} bits per byte on text that it has not seen\n")

print("3. Now it writes:\n")
write()

print("4. A spec with two mistakes is refused before torch is imported:\n")
try:
    seqblocks.load_text(SPEC.replace("heads: 2, window", "heads: 5, window").replace("rms_norm", "rms_nrom"))
except seqblocks.SpecError as error:
    print("    " + str(error).replace("\n", "\n    "))
print("\nNext: `seqblocks draw hybrid_small --html hybrid.html` shows a model, docs/language.md is about the language.")
