"""Steps that torch has a module for: primitives that are also torch's `nn.Linear`, `nn.Embedding`, norms and so on.

Tools find modules by their class and read the attributes of that class: adapters, quantisers, counters of operations,
rules of weight decay. Such a step is a subclass of torch's module with the same parameters, and computes what its
primitive computes. A convolution takes tokens [batch, seq, features], as all steps do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.nn.functional import dropout

from seqblocks import graph
from seqblocks.graph import OpNode
from seqblocks.op import Op
from seqblocks.ops import activations
from seqblocks.ops.batch_norm import BatchNorm as BatchNormOp
from seqblocks.ops.batch_norm import as_input, as_maps, check_batch
from seqblocks.ops.conv import CausalConv
from seqblocks.ops.conv1d import Conv1d as Conv1dOp
from seqblocks.ops.conv2d import Conv2d as Conv2dOp
from seqblocks.ops.conv2d import ConvTranspose2d as ConvTranspose2dOp
from seqblocks.ops.dropout import Dropout as DropoutOp
from seqblocks.ops.embed import Embed, Unembed
from seqblocks.ops.linear import Affine
from seqblocks.ops.norm import LayerNorm as LayerNormOp
from seqblocks.ops.pool2d import Pool2d as Pool2dOp
from seqblocks.ops.resize import Resize as ResizeOp
from seqblocks.ops.rms_norm import RMSNorm as RMSNormOp
from seqblocks.runtime.call import Call
from seqblocks.runtime.initialise import draw_anew
from seqblocks.runtime.modules import Place, is_linear, makes
from seqblocks.runtime.primitive import Primitive
from seqblocks.state import States


class _WithParameters(Primitive):
    """Base of the steps with a weight and a bias, either of which may be None."""

    def __init__(self, node: OpNode, place: Place) -> None:
        super().__init__(node, place)
        self._declared = node.parameters
        for name in ("weight", "bias"):
            if name not in self._parameters:  # not as a parameter, so that those are the ones that the spec declares
                self.__dict__[name] = None

    def reset_parameters(self) -> None:
        """Draw the initial values of the spec by a seed from torch's generator."""
        for name, parameter in self._declared.items():
            if (own := self._parameters.get(name)) is not None:
                draw_anew(own, parameter)


class Linear(_WithParameters, nn.Linear):
    """A linear map that needs more than torch's class has, such as a matrix in 8 bits. Others are exactly torch's."""

    def __init__(self, node: OpNode, place: Place) -> None:
        super().__init__(node, place)
        self.out_features, self.in_features = self.weight.shape


class Embedding(_WithParameters, nn.Embedding):
    def __init__(self, node: OpNode, place: Place) -> None:
        super().__init__(node, place)
        self.num_embeddings, self.embedding_dim = self.weight.shape
        self.padding_idx, self.max_norm, self.norm_type = None, None, 2.0
        self.scale_grad_by_freq = self.sparse = False


class _Norm(_WithParameters):
    def __init__(self, node: OpNode, place: Place) -> None:
        super().__init__(node, place)
        op: Any = node.op
        width = node.wires[0].features if node.wires and node.wires[0] else 0
        self.__dict__ |= {"normalized_shape": (width,), "eps": op.eps, "elementwise_affine": op.gain != "none"}


class LayerNorm(_Norm, nn.LayerNorm):
    pass


class RMSNorm(_Norm, nn.RMSNorm):
    pass


class Conv1d(_WithParameters, nn.Conv1d):
    def __init__(self, node: OpNode, place: Place) -> None:
        super().__init__(node, place)
        self.out_channels, width, taps = self.weight.shape
        op: Any = node.op
        self.groups = op.groups if isinstance(op, Conv1dOp) else 1 if op.mixing else self.out_channels
        self.in_channels, self.kernel_size = width * self.groups, (taps,)
        self.stride, self.dilation = (getattr(op, "stride", 1),), (getattr(op, "dilation", 1),)
        self.padding, self.output_padding, self.transposed, self.padding_mode = (0,), (0,), False, "zeros"


class Conv2d(_WithParameters, nn.Conv2d):
    def __init__(self, node: OpNode, place: Place) -> None:
        super().__init__(node, place)
        assert isinstance(node.op, Conv2dOp)
        op = node.op
        self.out_channels, width, *sides = self.weight.shape
        self.in_channels = node.wires[0].features if node.wires and node.wires[0] else width
        self.groups, self.kernel_size = self.in_channels // width, (sides[0], sides[1])
        self.stride, self.dilation = (op.stride, op.stride), (op.dilation, op.dilation)
        self.padding, self.output_padding = (op.pad, op.pad), (0, 0)
        self.transposed, self.padding_mode = False, "zeros"


class ConvTranspose2d(_WithParameters, nn.ConvTranspose2d):  # type: ignore[misc]  # torch's takes an output size
    def __init__(self, node: OpNode, place: Place) -> None:
        super().__init__(node, place)
        assert isinstance(node.op, ConvTranspose2dOp)
        op = node.op
        self.in_channels, self.out_channels, self.groups = self.weight.shape[0], op.features, op.groups
        self.kernel_size, self.stride, self.dilation = (op.kernel, op.kernel), (op.stride, op.stride), (1, 1)
        self.padding, self.output_padding = (op.padding, op.padding), (op.output_padding, op.output_padding)
        self.transposed, self.padding_mode = True, "zeros"


class MaxPool2d(Primitive, nn.MaxPool2d):
    dilation, return_indices, ceil_mode = 1, False, False

    def __init__(self, node: OpNode, place: Place) -> None:
        super().__init__(node, place)
        assert isinstance(node.op, Pool2dOp)
        self.kernel_size, self.stride, self.padding = node.op.kernel, node.op.step, node.op.padding


class AvgPool2d(Primitive, nn.AvgPool2d):
    ceil_mode, count_include_pad, divisor_override = False, True, None

    def __init__(self, node: OpNode, place: Place) -> None:
        super().__init__(node, place)
        assert isinstance(node.op, Pool2dOp)
        self.kernel_size, self.stride, self.padding = node.op.kernel, node.op.step, node.op.padding


class BatchNorm2d(_WithParameters, nn.BatchNorm2d):
    track_running_stats = True

    def __init__(self, node: OpNode, place: Place) -> None:
        super().__init__(node, place)
        assert isinstance(node.op, BatchNormOp)
        self.num_features = self.running_mean.shape[0] if self.running_mean is not None else 0
        self.eps, self.momentum, self.affine = node.op.eps, node.op.momentum, node.op.affine

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.reset_buffers()

    def _compute(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        mean, weight = self.running_mean, self.weight
        mixed = mean is not None and weight is not None and mean.dtype != weight.dtype
        if self._reduction or self._converts_to is not None or mixed:
            return super()._compute(*tensors, call=call)
        (x,) = tensors
        check_batch(x, self.training)
        return as_input(nn.BatchNorm2d.forward(self, as_maps(x)), x), {}  # tools set momentum and eps


class Upsample(Primitive, nn.Upsample):
    recompute_scale_factor, name = None, "Upsample"

    def __init__(self, node: OpNode, place: Place) -> None:
        super().__init__(node, place)
        assert isinstance(node.op, ResizeOp)
        op = node.op
        self.size = None if op.factor is not None else (op.rows, op.columns)  # type: ignore[assignment]
        self.scale_factor, self.mode = op.factor, op.mode
        self.align_corners = False if op.mode == "bilinear" else None


class Dropout(Primitive, nn.Dropout):
    def __init__(self, node: OpNode, place: Place) -> None:
        super().__init__(node, place)
        assert isinstance(node.op, DropoutOp)
        self.p, self.inplace = node.op.p, False

    def _compute(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        (x,) = tensors
        return dropout(x, self.p, self.training), {}  # tools set p


class SiLU(Primitive, nn.SiLU):
    inplace = False


class GELU(Primitive, nn.GELU):
    approximate = "none"


class GELUTanh(Primitive, nn.GELU):
    approximate = "tanh"


class ReLU(Primitive, nn.ReLU):
    inplace = False


class LeakyReLU(Primitive, nn.LeakyReLU):
    inplace = False

    def __init__(self, node: OpNode, place: Place) -> None:
        super().__init__(node, place)
        assert isinstance(node.op, activations.LeakyRelu)
        self.negative_slope = node.op.slope


class ELU(Primitive, nn.ELU):
    alpha, inplace = 1.0, False


class SELU(Primitive, nn.SELU):
    inplace = False


class Sigmoid(Primitive, nn.Sigmoid):
    pass


class Tanh(Primitive, nn.Tanh):
    pass


class Softplus(Primitive, nn.Softplus):
    beta, threshold = 1.0, 20.0


CLASSES: dict[type[Op], type[Primitive]] = {
    Unembed: Linear, Embed: Embedding, LayerNormOp: LayerNorm, RMSNormOp: RMSNorm, Conv1dOp: Conv1d, CausalConv: Conv1d,
    Conv2dOp: Conv2d, ConvTranspose2dOp: ConvTranspose2d, Pool2dOp: MaxPool2d,
    BatchNormOp: BatchNorm2d, ResizeOp: Upsample,
    DropoutOp: Dropout, activations.Silu: SiLU, activations.Gelu: GELU, activations.GeluTanh: GELUTanh,
    activations.Relu: ReLU, activations.LeakyRelu: LeakyReLU, activations.Elu: ELU, activations.Selu: SELU,
    activations.Sigmoid: Sigmoid, activations.Tanh: Tanh, activations.Softplus: Softplus,
}  # fmt: skip
PRIMITIVES: frozenset[type[nn.Module]] = frozenset({Primitive, Linear, AvgPool2d, *CLASSES.values()})
"""The classes of primitives as they are built."""


def is_built(module: nn.Module | None) -> TypeGuard[Primitive]:
    """Return whether a module has the class that `build` gives a primitive: no user's subclass or replacement.

    If it is torch's own class, only the functions of seqblocks/runtime/primitive.py apply to it.
    """
    return type(module) in PRIMITIVES or is_linear(module)


@makes(OpNode)
def primitive(node: OpNode, place: Place) -> Primitive:
    """Build the module of a primitive, of torch's class if it has one and the module holds its parameters itself."""
    held = (graph.join(place.path, name) in place.held_elsewhere for name in node.parameters)
    found = Primitive if any(held) or not _is_torchs(node) else _class_of(node.op)
    module = found(node, place)
    if found is Linear and node.parameters.keys() <= {"weight", "bias"}:
        module.__class__ = nn.Linear  # type: ignore[assignment]  # many tools compare classes and accept no subclass
    return module


def as_primitive(module: nn.Module) -> Primitive:
    """Return the module of a primitive, after making it a `Primitive` if it is torch's `nn.Linear`."""
    if is_linear(module):
        module.__class__ = Linear
    assert isinstance(module, Primitive)
    return module


@contextmanager
def all_primitives(model: nn.Module) -> Iterator[None]:
    """Make each linear map a `Primitive` for a while, so that with hooks it computes what it computes without them."""
    linear = [module for module in model.modules() if is_linear(module)]
    for module in linear:
        as_primitive(module)
    try:
        yield
    finally:
        for module in linear:
            module.__class__ = nn.Linear


def _class_of(op: Op | None) -> type[Primitive]:
    if isinstance(op, Affine) and op.builtin:
        return Linear
    if isinstance(op, Pool2dOp) and op.mode == "mean":
        return AvgPool2d
    return CLASSES.get(type(op), Primitive) if op is not None else Primitive


def _is_torchs(node: OpNode) -> bool:
    """Return whether torch's module of the same name computes what a step does, apart from the gain `one_plus`."""
    op = node.op
    if isinstance(op, RMSNormOp):
        return op.groups == 1 and not op.bias and not node.inputs.get("z")
    return not isinstance(op, CausalConv | Conv2dOp) or op.activation == "none"
