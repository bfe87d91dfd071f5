"""Values that hold for the whole process while a context is open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Standing(Generic[T]):
    """Contexts of several threads overlap in any order: each takes away what it brought, whatever came after it."""

    def __init__(self) -> None:
        self._held: dict[object, T] = {}  # by the contexts that are open, in the order in which they were opened

    @contextlib.contextmanager
    def hold(self, value: T) -> Iterator[None]:
        context = object()
        self._held[context] = value
        try:
            yield
        finally:
            del self._held[context]

    def newest(self) -> T | None:
        """What the context says that was opened last, of those still open."""
        held = [*self._held.values()]  # a copy is taken at once; other threads may open or close one meanwhile
        return held[-1] if held else None
