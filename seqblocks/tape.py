"""A replay of a training step that counts bytes: it records operations on shapes as torch records those on tensors.

An op describes what its `forward` allocates by the same operations in `Op.memory`, on shapes instead of values. The
tape keeps what torch would keep for the backward pass and for as long, and counts the bytes that are in use. Memory is
in use while some `Value` refers to it, so that a variable of Python has the same effect as in `forward`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

Shape = tuple[int, ...]
R = TypeVar("R")
CONVERTED_KINDS: Collection[str] = {"float16"}  # for whose products most processors have no instructions
CONVERTED_ELEMENTS = 1 << 23  # of a matrix that are converted to float32 at once, for a product of several tokens
MIN_CONVERTED = 8  # tokens
CONVERTED_MIN_ELEMENTS = 1 << 12  # of an operand with gradients: a convolution or attention of fewer is not converted
ONEDNN_MIN_MACS = 1 << 23  # multiply-accumulates: on AMD with AVX-512 oneDNN computes it, pads, and copies the gradient


class Event(NamedTuple):
    """Memory is allocated (bytes > 0), freed (< 0), or from now on kept for the backward pass (0)."""

    memory: Memory
    bytes: int
    phase: str


class Memory:
    """Memory of one tensor and its views. kind: weights, gradients, optimizer or work."""

    __slots__ = ("bytes", "kind", "step", "tape", "uses")

    def __init__(self, tape: Tape, size: int, kind: str) -> None:
        size = 0 if tape.stopped else size
        self.tape, self.bytes, self.kind, self.step, self.uses = tape, size, kind, tape.step, 0
        tape.note(self, size)


class Value:
    """A tensor without values: a shape, the bytes of an element, and the memory it lies in, perhaps with others.

    dense: whether its numbers are contiguous. turned: whether they are in another order of the axes: tokens [B, S, D]
    lie as [B, D, S], images [B, D, rows, columns] as [B, rows, columns, D]. A value that is neither has gaps. rows:
    whether it is a matrix of all its rows without a copy, as a part of the features of a dense one is. is_view: whether
    it was made from another tensor, to which torch does not add in place. tracked: whether a gradient of it is needed.
    """

    __slots__ = ("dense", "is_view", "item", "memory", "rows", "shape", "source", "tracked", "turned")

    def __init__(
        self, memory: Memory, shape: Shape, item: int, *, dense: bool = True, tracked: bool = False,
        source: tuple[Node | None, int] = (None, 0),
    ) -> None:
        self.memory, self.shape, self.item, self.dense, self.rows = memory, shape, item, dense, dense
        self.tracked, self.source, self.turned, self.is_view = tracked, source, False, False
        memory.uses += 1

    def __del__(self) -> None:
        memory = self.memory
        memory.uses -= 1
        if not memory.uses:
            memory.tape.note(memory, -memory.bytes)

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numbers * self.item

    @property
    def features(self) -> int:
        return self.shape[-1]

    def again(self, shape: Shape | None = None, *, dense: bool = True, rows: bool | None = None) -> Value:
        """Return a view that autograd does not know of."""
        y = Value(self.memory, self.shape if shape is None else shape, self.item, dense=dense and self.dense)
        y.rows = (dense if rows is None else rows) and self.rows
        y.turned = dense and self.turned and y.shape[:2] == self.shape[:2]
        y.is_view = self.is_view or shape is not None
        return y

    def turn(self, turned: bool = True) -> Value:
        """Let the axes of the numbers be in another order. Returns the value."""
        self.turned, self.dense, self.rows = turned, not turned, not turned
        return self

    @property
    def whole(self) -> bool:
        """Whether the numbers have no gaps."""
        return self.dense or self.turned

    @property
    def is_channels_last(self) -> bool:
        """Whether torch computes on feature maps of this value in the order rows, columns, features."""
        return self.turned if len(self.shape) == 4 else not self.turned


Keep = Value | int
Backward = Callable[[list[Value | None]], "list[Value | None]"]


class Node:
    """A recorded operation: what it keeps, and how it returns the gradients of its inputs.

    Like torch's, it exists as long as some value was computed by it, or from that.
    """

    __slots__ = ("__weakref__", "backward", "grads", "inputs", "kept", "layer", "step")

    def __init__(self, inputs: Sequence[Value], outputs: int, kept: list[Value], backward: Any, step: str) -> None:
        self.inputs = [value.source if value.tracked else None for value in inputs]
        self.grads: list[Value | None] = [None] * outputs
        self.kept, self.backward, self.step = kept, backward, step
        self.layer: Layer | None = None


class Layer:
    """A layer whose operations are recomputed in the backward pass."""

    def __init__(self, nodes: list[Node], again: Callable[[], list[Node]] | None, held: Iterable[Value]) -> None:
        self.nodes, self.again = nodes, again
        self.held = [*held]  # until the operation whose gradients are computed first has them

    def restore(self) -> None:
        """Compute the layer again, for what its operations keep."""
        again, self.again = self.again, None
        if again is None:
            return
        made = again()
        of = {id(anew): node for node, anew in zip(self.nodes, made, strict=True)}
        for node, anew in zip(self.nodes, made, strict=True):
            node.kept, node.layer = [value.again() for value in anew.kept], anew.layer
        for layer in {id(anew.layer): anew.layer for anew in made if anew.layer}.values():  # those in this one
            layer.nodes = [of[id(anew)] for anew in layer.nodes]


class Tape:
    """Operations in order, and the bytes in use."""

    def __init__(self, item: int, converts: bool = False) -> None:
        self.item = item  # bytes of a number of the model
        self.converts = converts  # whether products of 16 bits are computed in float32
        self.events: list[Event] = []
        self._nodes: list[weakref.ref[Node]] = []
        self.merged = 1  # products of a loop's tokens that a recorded one stands for
        self._inside = 0  # of layers that are recomputed
        self._saves, self._last = 0, 0  # what the present layer has kept, and will before torch stops
        self.stopped = False  # so that nothing needs memory
        self.live = 0
        self.step, self.phase = "", "forward"
        self.out: Shape = ()  # the shape of the present step's output
        self.gradients: dict[int, Value] = {}  # of parameters, by the parameter's memory
        self.parameters: dict[int, Value] = {}

    def note(self, memory: Memory, size: int) -> None:
        self.live += size
        self.events.append(Event(memory, size, self.phase))

    def forget(self) -> None:
        """Forget all. The command does not collect garbage, and memory refers to its tape."""
        self.gradients.clear()
        self.parameters.clear()
        self.events.clear()

    # --- values ---------------------------------------------------------------------------------------------------

    def new(self, shape: Shape, item: int | None = None, kind: str = "work") -> Value:
        """Allocate memory for a tensor that autograd does not know of."""
        item = self.item if item is None else item
        return Value(Memory(self, math.prod(shape) * item, kind), shape, item)

    def like(self, x: Value, item: int | None = None) -> Value:
        """Allocate a result of an operation on the elements of x, which torch lays out as x, without gaps."""
        y = self.new(x.shape, item or x.item)
        return y.turn() if x.turned else y

    def parameter(self, shape: Shape, item: int, trained: bool = True) -> Value:
        """Return a parameter. trained: whether it gets a gradient."""
        value = self.new(shape, item, "weights")
        if trained:
            self.track(value)
            self.parameters[id(value.memory)] = value
        return value

    def track(self, value: Value) -> None:
        """Make a value one whose gradient is needed, like a parameter."""
        value.tracked, value.source = True, (None, id(value.memory))

    def passing(self, size: float) -> None:
        """Allocate this many bytes and free them again."""
        if size:
            self.new((int(size),), 1)

    # --- operations -----------------------------------------------------------------------------------------------

    def function(
        self, inputs: Sequence[Value | None], outputs: Sequence[Value], keeps: Iterable[Keep] = (),
        backward: float | Backward = 0, turned: float | None = None,
    ) -> Sequence[Value]:
        """Record an operation with these outputs, new or views of its inputs.

        keeps: values, or bytes of other memory, that are kept for the backward pass. backward: bytes that it needs
        besides the gradients of the inputs, or a function from the gradients of the outputs to those of the inputs.
        turned: bytes that it needs besides if the gradient of the output is not laid out as the output; the gradients
        of the inputs then are as the output. By default, one of its shape is laid out as it is.
        """
        given = [value for value in inputs if value is not None]
        if not any(value.tracked for value in given):
            return outputs
        kept = [value.again() if isinstance(value, Value) else self.new((value,), 1) for value in keeps]
        for value in kept:
            self.note(value.memory, 0)
        if self._save(bool(kept)):
            self._cancel(outputs, [*given, *kept])
        node = Node(given, len(outputs), kept, self._gradients(given, outputs[0], backward, turned), self.step)
        self._nodes.append(weakref.ref(node))
        for at, value in enumerate(outputs):
            value.tracked, value.source = True, (node, at)
        return outputs

    def _gradients(
        self, inputs: list[Value], y: Value, backward: float | Backward, turned: float | None
    ) -> Backward:
        if callable(backward):
            return backward
        sizes = [(value.shape, value.item) if value.tracked else None for value in inputs]
        are_turned, is_turned, is_last = [value.turned for value in inputs], y.turned, y.is_channels_last

        def run(grads: list[Value | None]) -> list[Value | None]:
            grad, found = grads[0], [None if size is None else self.new(*size) for size in sizes]
            for value, was_turned in zip(found, are_turned, strict=True):
                if value and turned is not None:
                    value.turn(is_last == (len(value.shape) == 4))
                elif value:
                    value.turn(grad.turned if grad and grad.shape == value.shape else was_turned)
            differs = grad is not None and (not grad.whole or grad.turned != is_turned)
            self.passing(backward + (turned if turned and differs else 0))
            return found

        return run

    def unary(self, x: Value, keeps: Iterable[str] = ("input",), *, backward: float = 0) -> Value:
        """Return f(x), element by element. keeps: `input` and `output`."""
        y = self.like(x)
        self.function([x], [y], [x if name == "input" else y for name in keeps], backward)
        return y

    def pointwise(
        self, *inputs: Value, keeps: Iterable[Keep] = (), same: Sequence[int] = (), backward: float = 0
    ) -> Value:
        """Return an operation on values that are broadcast.

        same: those whose gradient is that of the result. backward: bytes needed there besides the gradients.
        """
        shape, item = broadcast(*(value.shape for value in inputs)), max(value.item for value in inputs)
        wider = [self.new(value.shape, item) for value in inputs if value.item < item]  # torch converts these
        y = self.new(shape, item)
        first = next((value for value in inputs if value.shape == shape and value.whole), None)
        y = y.turn() if first and first.turned else y
        del wider, first
        sizes = [(value.shape, value.item) if value.tracked else None for value in inputs]

        def run(grads: list[Value | None]) -> list[Value | None]:
            (grad,), whole = grads, list[Value | None]([None] * len(sizes))
            assert grad
            for at, size in reversed([*enumerate(sizes)]):  # as autograd orders them
                if size is None:
                    continue
                wider = None if size[1] >= grad.item else self.like(grad)  # then it is rounded
                whole[at] = grad.again() if at in same and size[1] == grad.item else self.like(grad, size[1])
                del wider
            self.passing(backward)
            del grad
            for at, size in enumerate(sizes):
                if size is not None and math.prod(size[0]) != math.prod(shape):
                    whole[at] = self.new(*size)  # the gradient of what was broadcast is summed
            return whole

        self.function(inputs, [y], keeps, run)
        return y

    def add(self, a: Value, b: Value) -> Value:
        return self.pointwise(a, b, same=(0, 1))

    def subtract(self, a: Value, b: Value) -> Value:
        return self.pointwise(a, b, same=(0,))

    def multiply(self, a: Value, b: Value) -> Value:
        keeps = [*([a] if b.tracked else ()), *([b] if a.tracked else ())]
        converted = [x.numbers * each.item for x, each in ((a, b), (b, a)) if x.item < each.item and each.tracked]
        return self.pointwise(a, b, keeps=keeps, backward=max(converted, default=0))

    def divide(self, a: Value, b: Value) -> Value:
        y = broadcast(a.shape, b.shape)
        temporaries = 2 * math.prod(y) * a.item if b.tracked else 0
        return self.pointwise(a, b, keeps=[*([a] if b.tracked else ()), b], backward=temporaries)

    def square(self, x: Value) -> Value:
        y = self.like(x)
        self.function([x], [y], [x], 2 * x.bytes)
        return y

    def inverse(self, x: Value) -> Value:
        """Return 1 / x."""
        return self.unary(x, ["output"], backward=2 * x.bytes)

    def logsigmoid(self, x: Value) -> Value:
        """Return the logarithm of the sigmoid, which keeps its input and a buffer."""
        y = self.like(x)
        self.function([x], [y], [x, x.bytes])
        return y

    def where(self, mask: Value, a: Value, b: Value) -> Value:
        """Return a where a mask, as large as `mask` but of one byte each, is true, else b."""
        return self.pointwise(a, b, keeps=[self.new(mask.shape, 1)])

    def wave(self, x: Value) -> Value:
        """Return a sine or cosine, whose derivative is the other one."""
        return self.unary(x, backward=x.bytes)

    def dropout(self, x: Value) -> Value:
        """Return the product of x and a mask, which on a CPU has the dtype of x."""
        return self.multiply(x, self.like(x))

    def layer_norm(self, x: Value, gain: Value | None = None, bias: Value | None = None) -> Value:
        """Normalise the last axis by torch's layer_norm, which keeps its input, the means and the deviations."""
        self.passing(0 if x.dense else x.bytes)
        y = self.new(x.shape, x.item)
        rows = [self.new((*x.shape[:-1], 1), max(x.item, 4)) for _ in range(2)]
        self.function([x, gain, bias], [y], [x, *rows], 0 if x.dense else x.bytes, turned=x.bytes)
        return y

    def matmul(self, a: Value, b: Value, shape: Shape) -> Value:
        """Return a product of matrices, with this shape."""
        y = self.new(shape, a.item)
        self.function([a, b], [y], [*([a] if b.tracked else ()), *([b] if a.tracked else ())])
        return y

    def most(self) -> int:
        """Return the most bytes that were in use at a time."""
        live = most = 0
        for event in self.events:
            live += event.bytes
            most = max(most, live)
        return most

    def expand(self, x: Value, shape: Shape | Value) -> Value:
        """Return a view of x with repeated elements; the gradient is summed."""
        shape = shape.shape if isinstance(shape, Value) else shape
        if shape == x.shape:
            return self.view(x, shape)
        y, size = x.again(shape, dense=False), (x.shape, x.item)
        self.function([x], [y], (), lambda grads: [self.new(*size)])
        return y

    def pad(self, x: Value, shape: Shape) -> Value:
        y, small = self.new(shape, x.item), x.shape
        self.function([x], [y], (), lambda grads: [grads[0] and grads[0].again(small, dense=False)])
        return y

    def view(self, x: Value, shape: Shape, *, dense: bool = True) -> Value:
        """Return x with another shape, or with its elements in another order if not dense, without a copy."""
        y = x.again(shape, dense=dense)
        old = x.shape
        self.function([x], [y], (), lambda grads: [grads[0] and grads[0].again(old)])
        return y

    def turn(self, x: Value, shape: Shape) -> Value:
        """Return the tokens of an image as feature maps, or feature maps as tokens, without a copy."""
        y, old = x.again(shape, dense=False), x.shape
        y = y.turn(x.dense) if x.whole else y

        def backward(grads: list[Value | None]) -> list[Value | None]:
            (grad,) = grads
            found = grad and grad.again(old, dense=False)
            return [found.turn(grad.dense) if found and grad and grad.whole else found]

        self.function([x], [y], (), backward)
        return y

    def copy(self, x: Value, item: int | None = None) -> Value:
        """Return a contiguous copy, perhaps in another dtype."""
        y = self.new(x.shape, item or x.item)
        same, size = y.item == x.item, (x.shape, x.item)
        self.function([x], [y], (), lambda grads: [grads[0].again() if grads[0] and same else self.new(*size)])
        return y

    def dense(self, x: Value) -> Value:
        """Return x, copied if it is not contiguous."""
        return x if x.dense else self.copy(x)

    def rows(self, x: Value) -> Value:
        """Return x, copied if a product cannot read it as a matrix of its rows."""
        return x if x.rows else self.copy(x)

    def cast(self, x: Value, item: int) -> Value:
        """Return x in another dtype."""
        if x.item == item:
            return x
        y, size = self.like(x, item), (x.shape, x.item)
        self.function([x], [y], (), lambda grads: [self.like(grads[0], size[1]) if grads[0] else self.new(*size)])
        return y

    def split(self, x: Value, sizes: Sequence[int], axis: int = -1) -> list[Value]:
        """Return parts of x as views."""
        axis = axis % len(x.shape)
        shapes = [(*x.shape[:axis], size, *x.shape[axis + 1 :]) for size in sizes]
        whole = (x.shape, x.item)

        def backward(grads: list[Value | None]) -> list[Value | None]:
            zeros = [self.new(shape, x_item) for shape, grad in zip(shapes, grads, strict=True) if grad is None]
            y = self.new(*whole)
            del zeros
            return [y]

        x_item = x.item
        last = axis == len(x.shape) - 1
        parts = [x.again(shape, dense=len(sizes) == 1, rows=last) for shape in shapes]
        return [*self.function([x], parts, (), backward)]

    def slice(self, x: Value, shape: Shape) -> Value:
        """Return a part of x as a view; its gradient is as large as x."""
        rows = shape[:-1] == x.shape[:-1] or len(shape) == 2
        y, whole = x.again(shape, dense=shape == x.shape, rows=rows), (x.shape, x.item)
        self.function([x], [y], (), lambda grads: [self.new(*whole)])
        return y

    def cat(self, values: Sequence[Value], axis: int = -1) -> Value:
        axis = axis % len(values[0].shape)
        total = sum(value.shape[axis] for value in values)
        shape = (*values[0].shape[:axis], total, *values[0].shape[axis + 1 :])
        y, shapes = self.new(shape, values[0].item), [value.shape for value in values]

        def backward(grads: list[Value | None]) -> list[Value | None]:
            (grad,) = grads
            return [grad and grad.again(shape, dense=False, rows=axis == len(shape) - 1) for shape in shapes]

        self.function(values, [y], (), backward)
        return y

    def stack(self, values: Sequence[Value]) -> Value:
        """Return values of one shape side by side."""
        y, shape = self.new((len(values), *values[0].shape), values[0].item), values[0].shape
        count = len(values)
        self.function(values, [y], (), lambda grads: [grads[0] and grads[0].again(shape, dense=False)] * count)
        return y

    def sum(self, x: Value, shape: Shape) -> Value:
        """Return sums of x; their gradient is expanded, without memory of its own."""
        y, whole = self.new(shape, x.item), x.shape
        self.function([x], [y], (), lambda grads: [grads[0] and grads[0].again(whole, dense=False)])
        return y

    def mean(self, x: Value, shape: Shape) -> Value:
        """Return means of x, of 16 bits from a copy in float32; their gradient is divided, and so as large as x."""
        y = self.new(shape, x.item)
        self.passing(4 * (x.numbers + y.numbers) if x.item < 4 else 0)
        size = x.shape, x.item
        self.function([x], [y], (), lambda grads: [self.new(*size)])
        return y

    def extreme(self, x: Value, shape: Shape) -> Value:
        """Return maxima or minima of x. Their gradient needs a mask, its count in 64 bits, and then a product."""
        y = self.new(shape, x.item)
        self.function([x], [y], [x, y], x.numbers * (1 + max(8 - x.item, x.item)))
        return y

    def split_product(self, x: Value, weight: Value, bias: Value | None, sizes: Sequence[int]) -> list[Value]:
        """Return x W' + b in parts of these sizes, each computed by itself with its rows of W."""
        weights = self.split(weight, sizes, 0)
        biases: list[Any] = [None] * len(sizes) if bias is None else self.split(bias, sizes)
        return [self.product(x, rows, part) for rows, part in zip(weights, biases, strict=True)]

    def product(self, x: Value, weight: Value, bias: Value | None = None) -> Value:
        """Return x W' + b of x [..., I] and W [O, I]."""
        x = self.rows(x)
        width, out, merged = x.features, weight.shape[0], self.merged
        tokens = x.numbers // (width * merged)
        made = self._convert(x.item, tokens, width, out)
        extra = missing(tokens) if x.item == 4 and tokens * out * width >= ONEDNN_MIN_MACS else 0
        padded = self.new((tokens + extra if extra else 0, width), x.item)
        y = self._padded((*x.shape[:-1], out), x.item, extra * merged)
        del padded
        is_half = x.item == 2 and not self.converts
        self.passing(max(made, _blocks_of_product(width, tokens, out, False) * is_half))
        keeps = [*([x] if weight.tracked else ()), *([weight] if x.tracked else ())]
        sizes = [(v.shape, v.item) if v and v.tracked else None for v in (x, weight, bias)]

        def backward(grads: list[Value | None]) -> list[Value | None]:
            (grad,), found = grads, list[Value | None]([None] * len(sizes))
            assert grad
            grad = grad if grad.rows else self.new(grad.shape, grad.item)
            grads.clear()
            # Without a bias, autograd computes the gradient of the weight first.
            for at in (0, 1, 2) if bias_given or not is_half else (1, 0):
                size = sizes[at]
                if size is not None:
                    found[at] = (of_x, of_weight, self.new)[at](*size)
            return found if bias_given else found[:2]

        def of_x(shape: Shape, item: int) -> Value:
            made = self._convert(item, tokens, out, width)
            value = self._padded(shape, item, extra * merged)
            value.is_view = len(shape) > 2  # torch multiplies matrices
            self.passing(max(made, _blocks_of_product(out, tokens, width, False) * is_half))
            return value

        def of_weight(shape: Shape, item: int) -> Value:
            turned = 4 * out * (tokens + extra)  # the gradient, which oneDNN copies
            is_by_onednn = tokens * out * width >= ONEDNN_MIN_MACS
            is_by_torch = tokens < MIN_CONVERTED  # like y
            made = 0 if is_by_torch else self._convert(item, out, tokens, width, turned * is_by_onednn)
            value = self.new(shape, item)
            value.is_view = not (is_by_onednn if item == 4 else made)  # torch transposes its product
            if item == 4 and is_by_onednn:
                self.passing(turned + 4 * (tokens + extra) * width * (extra > 0))
            self.passing(max(made, _blocks_of_product(tokens, out, width) * is_half))
            return value

        bias_given = bias is not None
        self.function([x, weight, bias], [y], keeps, backward)
        return y

    def _padded(self, shape: Shape, item: int, extra: int) -> Value:
        """Allocate a product of this shape without these extra tokens, which are computed too."""
        return Value(Memory(self, (math.prod(shape) + extra * shape[-1]) * item, "work"), shape, item)

    def _convert(self, item: int, rows: int, width: int, out: int, more: int = 0) -> int:
        """Convert matrices [rows, width] and [width, out] of 16 bits. Returns the bytes of their product in float32.

        more: bytes that are needed besides.
        """
        if not self.converts or item != 2 or rows < MIN_CONVERTED:
            return 0
        self.passing(4 * (rows * width + min(width * out, CONVERTED_ELEMENTS) + rows * out) + more)
        return 4 * rows * out

    # --- backward pass --------------------------------------------------------------------------------------------

    def backward(self, loss: Value) -> None:
        """Compute the gradients of all parameters, in the order of torch: the latest operation first."""
        node, at = loss.source
        self.phase = "backward"
        if node is None:
            return
        node.grads[at] = self.new(loss.shape, loss.item)
        del node
        nodes, self._nodes = self._existing(0), []
        while nodes:
            self._run(nodes.pop())

    def _existing(self, first: int) -> list[Node]:
        """Return the operations from the index `first` on that still exist."""
        return [node for node in (reference() for reference in self._nodes[first:]) if node is not None]

    def _run(self, node: Node) -> None:
        if not any(node.grads):
            node.kept.clear()
            return
        self.step = node.step
        while node.layer is not None:  # and then one inside of it
            layer, node.layer = node.layer, None
            layer.restore()
            self.step = node.step
        grads, node.grads = node.grads, []
        found = node.backward(grads)
        node.kept, node.backward = [], None
        del grads
        for at, (edge, grad) in enumerate(zip(node.inputs, found, strict=True)):
            found[at] = None
            if edge is not None and grad is not None:
                self._pass(*edge, grad)
            del grad
        node.inputs = []

    def _pass(self, node: Node | None, at: int, grad: Value) -> None:
        """Add a gradient to those that an operation, or a parameter, has received."""
        if node is None:
            if at in self.gradients:  # it is added in place, but to a view
                if self.gradients[at].is_view:
                    self.gradients[at] = self.new(grad.shape, grad.item, "gradients")
                return
            grad.memory.kind = "gradients"
            if grad.memory.uses > 1:  # a parameter does not share the memory of its gradient
                grad = self.new(grad.shape, grad.item, "gradients")
            self.gradients[at] = grad
            return
        before = node.grads[at]
        if before is None:
            node.grads[at] = grad
        elif before.memory.uses > 1 or before.is_view or not before.whole:
            node.grads[at] = self.like(before if before.whole else grad, max(grad.item, before.item))

    def layer(self, run: Callable[[], R], reads: Iterable[Value] = (), holds: bool = False) -> R:
        """Run a layer whose operations keep nothing, and are run again in the backward pass. Returns what it makes.

        reads: what `run` reads, which is kept instead. holds: whether it is kept until an operation of the layer has
        computed its gradients, as torch does unless another layer contains this one.
        """
        first, step = len(self._nodes), self.step
        self._save()  # what it reads
        y, saves = self._run_layer(run, 0)

        def again() -> list[Node]:
            outer, self._nodes, here, self.step = self._nodes, [], self.step, step
            result, _ = self._run_layer(run, saves)
            nodes, self._nodes, self.step = self._existing(0), outer, here
            del result
            return nodes

        nodes = self._existing(first)
        if any(node.kept or node.layer for node in nodes):
            for value in reads:
                self.note(value.memory, 0)
        layer = Layer(nodes, again, reads if holds and not self._inside else ())
        for node in nodes:
            if node.kept or node.layer:  # torch computes the layer again when the first of these is read
                node.kept, node.layer = [], layer
        return y

    def _run_layer(self, run: Callable[[], R], last: int) -> tuple[R, int]:
        """Run a layer, until so much is kept if it is computed again. Returns what it makes, and how much it kept."""
        outer = self._saves, self._last, self.stopped
        self._saves, self._last, self.stopped = 0, last, self.stopped and not last
        self._inside += 1
        y = run()
        self._inside -= 1
        saves, (self._saves, self._last, self.stopped) = self._saves, outer
        return y, saves

    def _save(self, is_saved: bool = True) -> bool:
        """Count what is kept. Nothing needs memory after the last part of a layer that is computed again.

        Returns whether this is that last part.
        """
        self._saves += is_saved
        is_last = is_saved and self._saves == self._last
        self.stopped |= is_last
        return is_last

    def _cancel(self, outputs: Iterable[Value], others: Iterable[Value]) -> None:
        """Count no outputs, unless others lie in their memory: torch keeps operands before it computes."""
        kept = {id(value.memory) for value in others}
        made = {id(y.memory) for y in outputs} - kept
        for at in reversed(range(len(self.events))):
            if not made:
                return
            memory, size, phase = self.events[at]
            if size > 0 and id(memory) in made:
                self.events[at], memory.bytes = Event(memory, 0, phase), 0
                self.live -= size
                made.remove(id(memory))

    def in_float32(self, run: Callable[..., Value], x: Value, *others: Value | None) -> Value:
        """Record run(x, *others) as `numerics.in_float32` computes it: 16 bits are converted, and so again backward."""
        operands = (x, *others)
        is_tracked = any(value is not None and value.tracked for value in operands)
        if not self.converts or x.item != 2 or (is_tracked and x.numbers < CONVERTED_MIN_ELEMENTS * self.merged):
            return run(*operands)

        def wide() -> Value:
            return run(*(None if value is None else self.cast(value, 4) for value in operands))

        reads = [value for value in operands if value is not None]
        return self.cast(self.layer(wide, reads, holds=True) if is_tracked else wide(), x.item)


def broadcast(*shapes: Shape) -> Shape:
    """Return the shape to which shapes are broadcast."""
    most = max(map(len, shapes))
    wide = [(1,) * (most - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*wide, strict=True))


def missing(tokens: int) -> int:
    """Return by how many tokens products of oneDNN are padded, to a number with four binary digits before its zeros."""
    return -tokens % (1 << max(0, tokens.bit_length() - 4))


def _blocks_of_product(rows: int, out: int, width: int, turned: bool = True) -> int:
    """Return the bytes of the blocks in which oneDNN multiplies 16-bit matrices [out, rows] and [rows, width].

    Measured on AMD EPYC (Zen 4 and 5): up to 512 rows of the second matrix, 64 columns each, up to 256 sums in float32,
    and as many columns of the first matrix if it is turned, as for the gradient of a weight.
    """
    part = min(-(-rows // 32) * 32, 512)
    block = -(-out // max(1, -(-out // 256)))
    sums = -(-width // 64) * 64 if turned and rows > 512 else min(width, 64)
    read = part + 32 * (part == 512) if turned and width > 1 else 0
    return 2 * 64 * part + block * (2 * read + 4 * sums) + 1024
