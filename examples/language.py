"""Compare three small byte-level language models on one text: mLSTM, selective state space, and a hybrid.

    pip install 'seqblocks[examples]'
    python examples/language.py

The text is the documentation that comes with Python (module pydoc_data), or your own file (--text). Training reads it
as parallel streams whose state is carried from step to step. Writes the models, and a plot of the loss on held-out text
against the tokens read, to the folder --out. The best model then writes a sample, byte by byte, in constant memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.functional import cross_entropy

import seqblocks
from seqblocks.state import detach

SPECS = ("mlstm_small", "mamba_small", "hybrid_small")
History = list[tuple[int, float]]  # tokens read, bits per byte on the held-out text


def main() -> int:
    """Train each model, plot the losses, and print a sample of the best one."""
    options = arguments()
    if missing := [name for name in ("matplotlib", "safetensors") if importlib.util.find_spec(name) is None]:
        print(f"no {' and no '.join(missing)}: pip install 'seqblocks[examples]'", file=sys.stderr)
        return 4  # like the command line if an extra is missing
    try:
        models = {spec: seqblocks.build(spec, seed=options.seed) for spec in options.spec or SPECS}
        text = read(options.text)
    except (seqblocks.SeqblocksError, OSError) as error:
        print(error, file=sys.stderr)
        return error.exit_status if isinstance(error, seqblocks.SeqblocksError) else 2
    cut = len(text) * 19 // 20
    train, held_out = text[:cut], text[cut:]
    if min(len(train) // options.batch, len(held_out) // 8) < 2:
        print(f"a text of {len(text):,} bytes is too short for {options.batch} streams", file=sys.stderr)
        return 2
    print(f"{len(train):,} bytes for training, {len(held_out):,} held out, {torch.get_num_threads()} threads")
    options.out.mkdir(parents=True, exist_ok=True)
    histories = train_all(models, train, held_out, options)
    if not histories:
        print("stopped before the first evaluation; nothing is saved", file=sys.stderr)
        return 130
    plot(histories, options.out / "language.png")
    print(f"plot: {options.out / 'language.png'}")
    best = min(histories, key=lambda spec: histories[spec][-1][1])
    print_sample(best, models[best], options)
    return 0


def train_all(
    models: dict[str, Any], train: Tensor, held_out: Tensor, options: argparse.Namespace
) -> dict[str, History]:
    """Train one model after another, until Ctrl-C. Return the histories of the models that were evaluated."""
    histories: dict[str, History] = {}
    columns = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    try:
        with Progress(*columns, disable=not sys.stdout.isatty()) as progress:
            tasks = {spec: progress.add_task(spec, total=options.steps, start=False) for spec in models}
            for spec, model in models.items():
                histories[spec] = []
                start = time.perf_counter()
                progress.start_task(tasks[spec])
                fit(spec, model, train, held_out, options, histories[spec], progress, tasks[spec])
                count, seconds = sum(p.numel() for p in model.parameters()), time.perf_counter() - start
                tokens, bits = histories[spec][-1]
                progress.console.print(
                    f"{spec}: {count:,} parameters, {tokens:,} tokens in {seconds:.0f} s, {bits:.3f} bits per byte",
                    highlight=False,
                    soft_wrap=True,
                )
    except KeyboardInterrupt:
        print("\nstopped; saved models are kept")
    return {spec: history for spec, history in histories.items() if history}


def print_sample(spec: str, model: Any, options: argparse.Namespace) -> None:
    """Let a model continue the prompt, one step for each byte."""
    print(f"{spec} writes:\n{options.prompt}", end="", flush=True)
    start = time.perf_counter()
    for piece in write(model, options.prompt, options.length, options.seed):
        print(piece, end="", flush=True)
    print(f"\n({options.length} bytes, one step each, {options.length / (time.perf_counter() - start):.0f} per second)")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Compare small language models on one text.")
    parser.add_argument("--spec", action="append", metavar="SPEC", help="a spec that reads 256 tokens; may be repeated")
    parser.add_argument("--text", type=Path, help="a file to train on (default: Python's documentation)")
    parser.add_argument("--steps", type=positive, default=240, help="training steps")
    parser.add_argument("--batch", type=positive, default=16, help="parallel streams")
    parser.add_argument("--seq", type=positive, default=256, help="tokens of each stream per step")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--prompt", default="The statement ", help="text that the best model continues")
    parser.add_argument("--length", type=positive, default=400, help="bytes that it writes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/language"), help="folder for the results")
    return parser.parse_args()


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


def read(path: Path | None) -> Tensor:
    """Return the bytes of the text as token ids [n]."""
    if path is not None:
        raw = path.read_bytes()
    else:
        from pydoc_data.topics import topics

        raw = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()


def fit(
    spec: str, model: Any, train: Tensor, held_out: Tensor, options: argparse.Namespace, history: History,
    progress: Progress, task: TaskID,
) -> None:
    """Train by truncated backpropagation through time: each step continues from the last detached state."""
    optimiser = torch.optim.AdamW(model.parameter_groups(weight_decay=0.1), lr=options.rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, options.rate, total_steps=options.steps, pct_start=0.1)
    streams = train[: len(train) // options.batch * options.batch].view(options.batch, -1)
    interval = max(1, options.steps // 12)
    at, tokens, state = 0, 0, None
    for step in range(1, options.steps + 1):
        if at + 1 >= streams.shape[1]:
            at, state = 0, None
        piece = streams[:, at : at + options.seq + 1]
        model.train()
        logits, state = model(piece[:, :-1], state=state, return_state=True)
        loss = cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        state = detach(state)
        at += options.seq
        tokens += piece[:, 1:].numel()
        if step % interval == 0 or step == options.steps:
            bits = bits_per_byte(model, held_out)
            seqblocks.save(model, options.out / spec)
            history.append((tokens, bits))
            progress.update(task, description=f"{spec}: {bits:.3f} bits per byte")
        progress.advance(task)


@torch.no_grad()
def bits_per_byte(model: Any, text: Tensor) -> float:
    """Return the loss on a text, which is read as 8 streams from beginning to end."""
    model.eval()
    streams = text[: len(text) // 8 * 8].view(8, -1)
    total, state = 0.0, None
    for at in range(0, streams.shape[1] - 1, 512):
        piece = streams[:, at : at + 513]
        logits, state = model(piece[:, :-1], state=state, return_state=True)
        total += cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten(), reduction="sum").item()
    return total / math.log(2) / (streams.numel() - 8)


@torch.no_grad()
def write(model: Any, prompt: str, length: int, seed: int) -> Any:
    """Read the prompt at once, then continue byte by byte from the state. Yield text as characters become complete."""
    import codecs

    model.eval()
    generator = torch.Generator().manual_seed(seed)
    whole = codecs.getincrementaldecoder("utf-8")("replace")
    start = torch.tensor([list(prompt.encode() or b"\n")])
    logits, state = model(start, return_state=True)
    logits = logits[:, -1]
    for _ in range(length):
        token = torch.multinomial(torch.softmax(logits / 0.7, -1), 1, generator=generator)[:, 0]
        yield whole.decode(bytes(token.tolist()))
        logits, state = model.step(token, state)


def plot(histories: dict[str, History], path: Path) -> None:
    """Plot bits per byte on the held-out text against the tokens read."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for spec, history in histories.items():
        axes.plot(*zip(*history, strict=True), marker=".", label=f"{spec}: {history[-1][1]:.2f}")
    axes.set(xlabel="tokens read", ylabel="bits per byte, held-out text", title="Small language models, byte by byte")
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = path.with_suffix(".part.png")
    figure.savefig(temporary, dpi=150)
    os.replace(temporary, path)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
