"""Outer products and products with matrices that are wires: the arithmetic of a memory that is a matrix per head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seqblocks.errors import Fault
from seqblocks.op import ANY, Op, Port, argument, primitive
from seqblocks.tape import Tape, Value
from seqblocks.types import Kind, Wire
from seqblocks.widths import must_divide

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call

KINDS: tuple[Kind, ...] = ("sequence", "vector")


@primitive("outer_product")
class OuterProduct(Op):
    """Compute the outer product of each head with the same head of another wire: M[i, j] = x[i] * with[j].

    The matrices are flattened row by row: heads of width I and J become heads of width I * J.
    """

    ports = (ANY, Port("with", "the factor of the columns", kinds=KINDS))
    independent = "heads"
    heads: int = argument(1, "number of heads; must divide both widths", ge=1)

    def shape(self, x: Wire, other: Wire) -> Wire:
        rows = must_divide(self.heads, x.features, "heads", "the width")
        return x.with_features(rows * other.features) if self._columns(other) else x

    def _columns(self, other: Wire) -> int:
        return must_divide(self.heads, other.features, "heads", "the width of `with`", at="with")

    def macs(self, x: Wire, other: Wire) -> int:
        return x.features // self.heads * other.features

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value, other: Value) -> Value:
        rows = tape.view(x, (*x.shape[:-1], self.heads, x.shape[-1] // self.heads, 1))
        columns = tape.view(other, (*other.shape[:-1], self.heads, 1, other.shape[-1] // self.heads))
        return tape.view(tape.multiply(rows, columns), tape.out)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor, other: Tensor) -> Tensor:
        rows, columns = (each.unflatten(-1, (self.heads, -1)) for each in (x, other))
        return (rows.unsqueeze(-1) * columns.unsqueeze(-2)).flatten(-3)


@primitive("matrix_product")
class MatrixProduct(Op):
    """Multiply the matrix of each head, which is a wire, by the same head of x: y[i] = sum_j M[i, j] x[j].

    `matrix` has the layout of `outer_product`: heads of I * J features, row by row. Heads of x have the width J, and
    those of the output I. With `transposed`, y[j] = sum_i M[i, j] x[i].
    """

    ports = (ANY, Port("matrix", "the matrices, row by row", kinds=KINDS))
    independent = "heads"
    heads: int = argument(1, "number of heads; must divide both widths", ge=1)
    transposed: bool = argument(False, "whether to multiply by the transposed matrices")

    def shape(self, x: Wire, matrix: Wire) -> Wire:
        must_divide(self.heads, x.features, "heads", "the width")
        if matrix.features % x.features:
            what = "rows" if self.transposed else "columns"
            expected = f"a multiple of {x.features}: {self.heads} matrices with {x.features // self.heads} {what}"
            note = matrix.origin_note("`matrix`")
            raise Fault(
                "E402", "the width of 'matrix' is no multiple of the width of its factor", at="matrix",
                expected=expected, found=f"{matrix.features}", notes=[note] if note else [],
            )  # fmt: skip
        return x.with_features(self.heads * (matrix.features // x.features))

    def macs(self, x: Wire, matrix: Wire) -> int:
        return matrix.features

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value, matrix: Value) -> Value:
        inner, outer = x.shape[-1] // self.heads, tape.out[-1] // self.heads
        vector = tape.view(x, (*x.shape[:-1], self.heads, inner, 1))
        whole = tape.view(matrix, (*x.shape[:-1], self.heads, outer, inner))
        return tape.view(tape.matmul(whole, vector, (*x.shape[:-1], self.heads, outer, 1)), tape.out)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor, matrix: Tensor) -> Tensor:
        import torch

        kind = torch.promote_types(x.dtype, matrix.dtype)
        vector = x.to(kind).unflatten(-1, (self.heads, -1))
        sizes = (vector.shape[-1], -1) if self.transposed else (-1, vector.shape[-1])
        whole = matrix.to(kind).unflatten(-1, (self.heads, -1)).unflatten(-1, sizes)
        return ((whole.mT if self.transposed else whole) @ vector.unsqueeze(-1)).squeeze(-1).flatten(-2)
