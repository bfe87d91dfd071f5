"""A small hybrid learns English from Python's own documentation for 20 seconds, and writes some. Needs only seqblocks.

    python examples/quickstart.py [SECONDS]
"""

import math
import sys
import time

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import seqblocks

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

text = torch.tensor(list("\n".join(topics.values()).encode()))
held_out, text = text[: len(text) // 20], text[len(text) // 20 :]
model = seqblocks.build_text(SPEC, seed=0)
torch.manual_seed(0)


def batch(source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random pieces of a text, and the byte that follows each of theirs."""
    starts = torch.randint(len(source) - LENGTH - 1, (BATCH, 1))
    pieces = source[starts + torch.arange(LENGTH + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def loss_of(source: torch.Tensor) -> torch.Tensor:
    """Return the loss in bits per byte."""
    x, y = batch(source)
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / math.log(2)


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

print(f"2. It learns from {len(text):,} bytes for {SECONDS:g} seconds:\n")
optimizer = torch.optim.AdamW(model.train().parameter_groups(0.1), lr=RATE)
columns = [TextColumn("    {task.description}"), BarColumn(), TimeElapsedColumn()]
start, done, step = time.perf_counter(), 0.0, 0
with Progress(*columns) as progress:
    bar = progress.add_task("", total=1.0)
    while done < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (done + 0.01) / WARM_UP, 1.05 - done)
        optimizer.zero_grad()
        loss = loss_of(text)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, done = step + 1, (time.perf_counter() - start) / SECONDS
        progress.update(bar, completed=done, description=f"step {step:4}, {loss.item():.2f} bits per byte")
with torch.no_grad():
    held = sum(loss_of(held_out).item() for _ in range(8)) / 8
print(f"\n    {held:.2f} bits per byte on text that it has not seen\n")

print("3. Now it writes:\n")
write()

print("4. A spec with two mistakes is refused before torch is imported:\n")
try:
    seqblocks.load_text(SPEC.replace("heads: 2, window", "heads: 5, window").replace("rms_norm", "rms_nrom"))
except seqblocks.SpecError as error:
    print("    " + str(error).replace("\n", "\n    "))
print("\nNext: `seqblocks draw hybrid_small --html hybrid.html` shows a model, docs/language.md is about the language.")
