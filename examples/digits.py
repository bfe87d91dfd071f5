"""Train a small Vision-LSTM on handwritten digits: 1,797 images of 8 x 8 pixels that scikit-learn ships.

    pip install 'seqblocks[examples]'
    python examples/digits.py

Writes the model (digits/, weights and spec) and a plot of loss and accuracy to the folder --out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

import seqblocks


def main() -> int:
    """Train, plot, save, load again."""
    options = arguments()
    require_extras()
    torch.manual_seed(options.seed)
    train, test = data()
    try:
        model = seqblocks.build(options.spec, set=dict(options.set), seed=options.seed)
    except seqblocks.SeqblocksError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    count = sum(p.numel() for p in model.parameters())
    print(f"{options.spec}: {count:,} parameters; {len(train[0]):,} training images, {len(test[0]):,} test images")

    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "digits"
    start = time.perf_counter()
    history = fit(model, train, test, options, path)
    seconds = time.perf_counter() - start
    if not history:
        print("stopped during the first epoch; nothing is saved", file=sys.stderr)
        return 130

    plot(history, options.out / "digits.png")
    again = seqblocks.load(path)
    found, last = accuracy(again, *test), history[-1]["accuracy"]
    if found != last:
        print(f"the saved model has accuracy {found:.2%}; before saving it had {last:.2%}", file=sys.stderr)
        return 1
    epochs = "1 epoch" if len(history) == 1 else f"{len(history)} epochs"
    print(f"test accuracy {found:.2%} after {epochs} in {seconds:.0f} s, {count:,} parameters")
    print(f"model: {path} (loaded again, with the same accuracy)")
    print(f"plot: {options.out / 'digits.png'}")
    return 0


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a small Vision-LSTM on handwritten digits.")
    parser.add_argument("--spec", default="vil_digits", help="a bundled spec or a path")
    parser.add_argument(
        "--set", action="append", default=[], type=change, metavar="PATH=VALUE", help="override a value of the spec"
    )
    parser.add_argument("--epochs", type=positive, default=80)
    parser.add_argument("--batch", type=positive, default=64)
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="folder for the results")
    return parser.parse_args()


def change(text: str) -> tuple[str, Any]:
    """Return the name and the value of `depth=6`."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"'{text}' is not PATH=VALUE, such as depth=6")
    return name, seqblocks.yaml(value)


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


def require_extras() -> None:
    """Exit at once if a package that only this example needs is missing."""
    if missing := [name for name in ("sklearn", "matplotlib", "safetensors") if importlib.util.find_spec(name) is None]:
        print(f"no {' and no '.join(missing)}: pip install 'seqblocks[examples]'", file=sys.stderr)
        sys.exit(4)  # like the command line if an extra is missing


def data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (images [n, 1, 8, 8] between 0 and 1, labels [n]) for training, and a quarter of all for testing."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    index = train_test_split(range(len(labels)), test_size=0.25, random_state=0, stratify=digits.target)
    train, test = ((images[i], labels[i]) for i in index)
    return train, test


def fit(model: Any, train: Any, test: Any, options: argparse.Namespace, path: Path) -> list[dict[str, float]]:
    """Train with AdamW and a one-cycle rate; the model is saved after each epoch. Ctrl-C ends early."""
    steps = options.epochs * -(-len(train[1]) // options.batch)
    optimiser = torch.optim.AdamW(model.parameter_groups(weight_decay=0.05), lr=options.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, options.rate, total_steps=steps)
    history: list[dict[str, float]] = []
    columns = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    try:
        with Progress(*columns, disable=not sys.stdout.isatty()) as progress:
            task = progress.add_task("training", total=steps)
            for epoch in range(options.epochs):
                loss = 0.0
                for part in one_epoch(model, train, options.batch, optimiser, schedule):
                    loss += part
                    progress.advance(task)
                now = {"loss": loss, "accuracy": accuracy(model, *test)}
                seqblocks.save(model, path)  # the latest, not the best: test images must not select a model
                history.append(now)  # after saving, so that the history ends with the saved model even if interrupted
                progress.update(task, description=f"epoch {epoch + 1}: test accuracy {now['accuracy']:.2%}")
                if not sys.stdout.isatty() and (epoch + 1) % 10 == 0:
                    print(f"epoch {epoch + 1}: loss {now['loss']:.3f}, test accuracy {now['accuracy']:.2%}")
    except KeyboardInterrupt:
        print("\nstopped; the model of the last full epoch is kept")
    return history


def one_epoch(model: Any, train: Any, batch: int, optimiser: Any, schedule: Any) -> Iterator[float]:
    """Train on all images once, in random order, and yield the share of each batch in the mean loss."""
    images, labels = train
    model.train()
    for index in torch.randperm(len(labels)).split(batch):
        loss = nn.functional.cross_entropy(model(shifted(images[index])), labels[index], label_smoothing=0.1)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        yield loss.item() * len(index) / len(labels)


def shifted(images: Tensor) -> Tensor:
    """Move each image by up to one pixel, because the position of a digit does not matter."""
    padded = nn.functional.pad(images, (1, 1, 1, 1))
    moves = torch.randint(3, (len(images), 2)).tolist()
    return torch.stack([image[:, dy : dy + 8, dx : dx + 8] for image, (dy, dx) in zip(padded, moves, strict=True)])


@torch.no_grad()
def accuracy(model: Any, images: Tensor, labels: Tensor) -> float:
    """Return the fraction of images whose digit is recognised."""
    model.eval()
    return (model(images).argmax(1) == labels).double().mean().item()


def plot(history: list[dict[str, float]], path: Path) -> None:
    """Plot loss and test error over the epochs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    epochs = range(1, len(history) + 1)
    figure, left = pyplot.subplots(figsize=(7, 4), layout="constrained")
    left.plot(epochs, [h["loss"] for h in history], color="tab:blue")
    left.set(xlabel="epoch", ylabel="training loss (label smoothing 0.1)", ylim=(0, None))
    left.yaxis.label.set_color("tab:blue")
    right = left.twinx()
    errors = [100 * (1 - h["accuracy"]) for h in history]
    right.plot(epochs, errors, color="tab:red")
    right.set(ylabel="test error, %", ylim=(0, min(30, max(errors) + 1)))
    right.yaxis.label.set_color("tab:red")
    left.set_title(f"Vision-LSTM on handwritten digits: {100 - errors[-1]:.2f} % correct")
    temporary = path.with_suffix(".part.png")
    figure.savefig(temporary, dpi=150)
    os.replace(temporary, path)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
