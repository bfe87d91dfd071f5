"""Batch normalisation.   D features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seqblocks.errors import RunError
from seqblocks.op import FLOATS, Op, Port, argument, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.state_layout import State
from seqblocks.tape import Tape, Value
from seqblocks.types import Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


@primitive("batch_norm")
class BatchNorm(Op):
    """Normalise each feature over all tokens of the batch: (x - mean) / sqrt(var + eps) * weight + bias.

    In training mode, mean and variance are those of the batch, and running statistics are updated; in evaluation mode,
    they are these statistics. As in torch's BatchNorm, they are buffers `running_mean`, `running_var` (unbiased) and
    `num_batches_tracked`. It does not stream, and resets are an error.
    """

    ports = (Port("x", "the input", main=True, kinds=FLOATS),)
    reads = "all"
    eps: float = argument(1e-5, "added to the variance", gt=0)
    momentum: float = argument(0.1, "share of the new batch in the running statistics", ge=0, le=1)
    affine: bool = argument(True, "whether there are a weight and a bias")
    source = "Ioffe & Szegedy 2015 (arXiv:1502.03167)"

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        if not self.affine:
            return {}
        shape = (x.features,)
        return {
            "weight": Parameter(shape, Init("ones"), decay=False), "bias": Parameter(shape, Init("zeros"), decay=False)
        }

    def buffers(self, x: Wire) -> dict[str, State]:
        return {
            "running_mean": State((x.features,), "model"),
            "running_var": State((x.features,), "model", 1.0),
            "num_batches_tracked": State((), "int64"),
        }

    def macs(self, x: Wire) -> int:
        return 2 * x.features

    def cannot_stream(self, x: Wire) -> str | None:
        return "in training mode, it reads all tokens of the batch"

    def ignores_resets(self, x: Wire) -> str | None:
        return self.cannot_stream(x)

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        y = tape.like(x)
        statistics = 2 * x.features * max(x.item, 4)
        tape.function([x, p.get("weight"), p.get("bias")], [y], [x, statistics], x.bytes, turned=-x.bytes)
        return y

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        from torch.nn.functional import batch_norm

        check_batch(x, call.training)
        if call.training:
            p["num_batches_tracked"].add_(1)
        mean, var = p["running_mean"], p["running_var"]
        # Shards compute in 16 bits beside statistics in float32, and torch takes one dtype for both.
        weight, bias = (None if each is None else each.to(mean.dtype) for each in (p.get("weight"), p.get("bias")))
        y = batch_norm(as_maps(x), mean, var, weight, bias, call.training, self.momentum, self.eps)
        return as_input(y, x)


def as_maps(x: Tensor) -> Tensor:
    """View tokens [B, S, D] or vectors [B, D] as feature maps [B, D, 1, S], without a copy; images are returned."""
    return {2: lambda: x[:, :, None, None], 3: lambda: x.mT.unsqueeze(2), 4: lambda: x}[x.dim()]()


def as_input(y: Tensor, x: Tensor) -> Tensor:
    """Return feature maps with the axes of x."""
    return {2: lambda: y[:, :, 0, 0], 3: lambda: y.squeeze(2).mT, 4: lambda: y}[x.dim()]()


def check_batch(x: Tensor, training: bool) -> None:
    """Raise RunError for a batch with less than two values of each feature, which have no variance."""
    features = x.shape[1 if x.dim() == 4 else -1]
    if training and x.numel() < 2 * features:
        raise RunError(f"batch_norm needs at least two values of each feature to train, not {list(x.shape)}")
