"""What a spec is tried on: the bytes of a text, or arrays. A batch depends on its seed alone."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from seqblocks.analysis.passes import lookahead
from seqblocks.errors import UnavailableError, UsageError, visible
from seqblocks.graph import ModelSpec

BYTES = 256
HELD = 20  # one in so many bytes or rows is held out
READ = 8  # batches of held-out data that are read
TRAIN, TEST = ("x", "y"), ("x_test", "y_test")  # arrays of an .npz file
NOTHING = -100  # the target where nothing is asked, which the cross-entropy ignores
HELD_OUT_SEED = 1 << 40  # seeds of held-out batches begin here, those of training below


class Data(Protocol):
    """Batches of inputs with their loss. digest: identifies the data. unit: of the loss, for people."""

    digest: str
    unit: str

    def batch(self, seed: int, size: int, held: bool = False) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, the same for the same seed."""

    def loss(self, y: Any, target: Tensor) -> Tensor:
        """Return the mean loss of outputs."""

    def check(self, y: Any, target: Tensor) -> None:
        """Raise UsageError unless outputs of the model have the shape that the targets need."""

    def tokens(self, x: Tensor) -> int:
        """Return the number of tokens of an input."""


def generator(seed: int) -> torch.Generator:
    """Return a generator of random numbers for one batch."""
    return torch.Generator().manual_seed(seed)


class Text:
    """The bytes of a text, of which a model predicts the next one."""

    unit = "bits per byte"

    def __init__(self, content: bytes, length: int, name: str = "the text") -> None:
        if len(content) < HELD * (length + 2):
            least = HELD * (length + 2)
            raise UsageError(
                f"{name} has {len(content):,} bytes, and sequences of {length:,} need at least {least:,}: use a longer "
                "text, or a smaller --length"
            )
        self.digest = hashlib.sha256(content).hexdigest()
        ids = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        cut = len(ids) - len(ids) // HELD
        self.train, self.held, self.length = ids[:cut], ids[cut:], length

    def batch(self, seed: int, size: int, held: bool = False) -> tuple[Tensor, Tensor]:
        source = self.held if held else self.train
        starts = torch.randint(len(source) - self.length, (size, 1), generator=generator(seed))
        pieces = source[starts + torch.arange(self.length + 1)].long()
        return pieces[:, :-1], pieces[:, 1:]

    def loss(self, y: Any, target: Tensor) -> Tensor:
        return cross_entropy(y.flatten(0, 1).float(), target.flatten()) / torch.log(torch.tensor(2.0))

    def check(self, y: Any, target: Tensor) -> None:
        pass  # `text_of` has proved it

    def tokens(self, x: Tensor) -> int:
        return x.numel()


def text_of(path: Path, spec: ModelSpec, length: int) -> Text:
    """Return the bytes of a file for a language model. Raises UsageError unless they fit the spec."""
    wire, y = spec.input, spec.output
    if wire.kind != "tokens" or len(spec.inputs) > 1 or y is None or y.kind != "sequence" or y.rate != 1:
        types = f"{spec.input_text} -> {spec.output_text}"
        raise UsageError(f"--text needs a language model, from token ids to a score for each token, not {types}")
    if wire.features < BYTES or y.features < BYTES:
        raise UsageError(
            f"the spec has a vocabulary of {min(wire.features, y.features)}, and a text has {BYTES} different bytes: "
            f"override it, for instance with --set vocabulary={BYTES}"
        )
    ahead = lookahead.find(spec)
    if ahead is None or ahead.tokens:
        raise UsageError("the outputs of the model depend on later tokens, so it would copy the byte it has to predict")
    return Text(_characters(path), length, visible(str(path)))


def _characters(path: Path) -> bytes:
    """Return the bytes of a text. Raises UsageError for binary files, and for texts in another encoding."""
    content, name = _content(path), visible(str(path))
    zero = content.find(0)
    if zero >= 0:
        raise UsageError(f"{name} is not a text: byte {zero:,} is zero; arrays are given with --npz")
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"{name} is not UTF-8 text: byte {error.start:,} cannot be read"
        raise UsageError(f"{what}. Convert it, for instance with iconv -f LATIN1 -t UTF-8") from None
    return content


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{visible(str(path))} cannot be read: {error.strerror}") from None


class Rows(NamedTuple):
    """Inputs and targets with the same number of rows."""

    x: Tensor
    y: Tensor


class Arrays:
    """Rows of inputs with targets: class numbers, or numbers to approximate. Targets of NOTHING are left out."""

    def __init__(self, train: Rows, held: Rows, digest: str) -> None:
        self.train, self.held, self.digest = train, held, digest
        self.classes = not train.y.is_floating_point()
        self.unit = "nats" if self.classes else "mean square"

    def batch(self, seed: int, size: int, held: bool = False) -> tuple[Tensor, Tensor]:
        rows = self.held if held else self.train
        chosen = torch.randint(len(rows.x), (size,), generator=generator(seed))
        return rows.x[chosen], rows.y[chosen]

    def loss(self, y: Any, target: Tensor) -> Tensor:
        if self.classes:
            return cross_entropy(y.flatten(0, -2).float(), target.flatten())
        return mse_loss(y.float(), target.to(y.device).float())

    def check(self, y: Any, target: Tensor) -> None:
        needed = [*y.shape[1:-1]] if self.classes else [*y.shape[1:]]
        if [*target.shape[1:]] != needed:
            kind = "class numbers" if self.classes else "numbers"
            raise UsageError(
                f"the model's outputs {[*y.shape[1:]]} need a target of the shape {needed} for each row if targets are "
                f"{kind}, and y has {[*target.shape[1:]]}"
            )

    def tokens(self, x: Tensor) -> int:
        return x.numel() if not x.is_floating_point() else x.shape[0] * (x.shape[1] if x.dim() == 3 else 1)


def arrays_of(path: Path, spec: ModelSpec) -> Arrays:
    """Return the arrays `x` and `y` of an .npz file, and `x_test` and `y_test` if it has them."""
    import io
    import zipfile

    try:
        import numpy
    except ImportError:
        raise UnavailableError("--npz needs numpy: pip install 'seqblocks[try]'") from None
    content = _content(path)
    name = visible(str(path))
    try:
        with numpy.load(io.BytesIO(content), allow_pickle=False) as file:
            known = [*file.files]
            found = {key: _tensor(file[key]) for key in (*TRAIN, *TEST) if key in known}
    except (ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile, AttributeError):
        raise UsageError(f"{name} is not an .npz file of numbers, as numpy.savez writes it") from None
    missing = [key for key in (*TRAIN, *(TEST if {*TEST} & {*found} else ())) if key not in found]
    if missing:
        needs = "x (inputs) and y (class numbers or numbers), and both x_test and y_test or neither"
        raise UsageError(f"{name} has the arrays {', '.join(sorted(known)) or 'nothing'}; it needs {needs}")
    train = _rows(found["x"], found["y"], spec, f"x and y of {name}")
    if "x_test" in found:
        held = _rows(found["x_test"], found["y_test"], spec, f"x_test and y_test of {name}")
    else:
        cut = len(train.x) - max(1, len(train.x) // HELD)
        train, held = Rows(train.x[:cut], train.y[:cut]), Rows(train.x[cut:], train.y[cut:])
    if not len(train.x):
        raise UsageError(f"{name} needs at least two rows with a target")
    return Arrays(train, held, hashlib.sha256(content).hexdigest())


def _tensor(array: Any) -> Tensor:
    """Return an array of numpy as a tensor, in a dtype and an order of bytes that torch computes with."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind not in "biufc":
        raise ValueError
    if kind == "u" and size > 1:  # torch has such dtypes, and few operations on them
        return torch.from_numpy(array.astype("int64"))
    return torch.from_numpy(array.astype("float64" if kind == "f" and size > 8 else array.dtype.newbyteorder("=")))


def _rows(x: Tensor, y: Tensor, spec: ModelSpec, name: str) -> Rows:
    """Return inputs and targets as the model needs them, without the rows in which nothing is asked."""
    if len(spec.inputs) > 1 or spec.output is None or spec.outputs:
        raise UsageError(f"--npz needs a model with one input and one output, not {spec.input_text}")
    if x.dim() < 1 or y.dim() < 1 or len(x) != len(y):
        raise UsageError(f"{name} must have the same number of rows, not the shapes {[*x.shape]} and {[*y.shape]}")
    if not (x.numel() and y.numel()):
        raise UsageError(f"{name} are empty: their shapes are {[*x.shape]} and {[*y.shape]}")
    x, y = _input(x, spec, name), _target(y, spec, name)
    if y.is_floating_point():
        return Rows(x, y)
    is_asked = (y != NOTHING).view(len(y), -1).any(1)
    if not is_asked.any():
        raise UsageError(f"{name}: every target is {NOTHING}, so that there is nothing to learn")
    return Rows(x[is_asked], y[is_asked])


def _input(x: Tensor, spec: ModelSpec, name: str) -> Tensor:
    wire = spec.input
    if wire.kind == "tokens":
        if x.is_floating_point() or x.dim() != 2:
            raise UsageError(f"{name}: the model reads token ids, whole numbers [rows, tokens], not {_kind(x)}")
        if x.min() < 0 or x.max() >= wire.features:
            found = f"{int(x.min())} to {int(x.max())}"
            raise UsageError(f"{name}: token ids are from 0 to {wire.features - 1}, not {found}")
        return x.long()
    dims = {"vector": 2, "sequence": 3, "image": 4}[wire.kind]
    features = x.shape[1 if wire.kind == "image" else -1] if x.dim() > 1 else 0
    if x.dim() != dims or features != wire.features:
        raise UsageError(f"{name}: the model reads {spec.input_text}, not {_kind(x)}")
    if x.is_complex():
        raise UsageError(f"{name}: inputs are real numbers, not {_kind(x)}")
    if not (x := x.float()).isfinite().all():
        raise UsageError(f"{name}: an input is not finite")
    return x


def _target(y: Tensor, spec: ModelSpec, name: str) -> Tensor:
    wire = spec.output
    assert wire is not None
    if y.is_floating_point():
        if not (y := y.float()).isfinite().all():
            raise UsageError(f"{name}: a target is not finite")
        return y
    if y.dtype == torch.bool or y.is_complex():
        raise UsageError(f"{name}: targets are class numbers or numbers, not {_kind(y)}")
    y = y.long()
    wrong = y[(y >= wire.features) | ((y < 0) & (y != NOTHING))]
    if len(wrong):
        raise UsageError(f"{name}: the model has {wire.features} outputs, and a target is {int(wrong[0])}")
    return y


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {[*x.shape]}"
