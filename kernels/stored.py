"""What takes the place of a matrix that multiplies tokens of float32, but is stored in fewer bits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor


class StoredMatrix:
    """A weight [O, I], passed to functions of this package that take one."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size: ...

    @abstractmethod
    def numel(self) -> int: ...

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of these numbers, like an embedding: [..., I] for ids [...]."""

    @abstractmethod
    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W' + b [..., O] for x [..., I], in the dtype of x."""

    @abstractmethod
    def prepare(self, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        """Return f(x [N, I]) -> `product(x, bias)` for a stream, without gradients."""
