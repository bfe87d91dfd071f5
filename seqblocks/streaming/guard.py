"""Detect changes to a model since a plan was made from it, fast enough to check at each token."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from seqblocks.runtime.modules import Assignments, StepModule, is_hooked


class Updates:
    """What identifies the latest step of an optimiser in this process: a new object, as a count could lose a step.

    Fused optimisers, and those that write to `parameter.data`, change parameters without changing their versions.
    """

    latest = object()


def _note_update(*_: Any) -> None:
    if not torch.compiler.is_compiling():  # A compiled optimiser changes versions.
        Updates.latest = object()


register_optimizer_step_post_hook(_note_update)


class Bypassed(NamedTuple):
    """A module that is not called, and the class and op whose computation runs instead."""

    find: Callable[[], nn.Module | None]
    kind: type[nn.Module]
    op: Any

    @classmethod
    def of(cls, module: nn.Module, find: Callable[[], nn.Module | None]) -> Bypassed:
        return cls(find, type(module), module.__dict__.get("op"))

    def is_as_before(self) -> bool:
        """Return whether the module has the same class and op, and neither hooks nor a replaced `forward`."""
        module = self.find()
        return type(module) is self.kind and module.__dict__.get("op") is self.op and not is_hooked(module)


class Guard:
    """Record modules and parameters, and check whether any of them was replaced, modified or hooked.

    The comparisons are compiled as one expression, since looping over tables takes twice as long. Bypassed modules are
    checked only if a hook was registered, or a class, op or `forward` assigned, anywhere since the last check.
    """

    def __init__(self) -> None:
        self._comparisons: dict[str, None] = {}
        self._names: dict[int, tuple[str, Any]] = {}  # by the id of the value
        self._bypassed: list[Bypassed] = []
        self._checked_after: tuple[int, object] | None = None  # hooks registered, and the latest assignment
        self._compare: Callable[[], bool]

    def note_entry(self, table: dict[str, Any], name: str) -> None:
        """Record the identity of an entry in one of a module's dicts."""
        self._add(f"{self._constant(table)}[{name!r}] is {self._constant(table[name])}")

    def note_values(self, x: Tensor) -> None:
        """Record the values of a tensor by its version counter and address."""
        own = self._constant(x)
        self._add(f"{own}._version == {x._version} and {own}.data_ptr() == {x.data_ptr()}")

    def note_bypassed(self, module: nn.Module) -> None:
        """Record that a module is bypassed."""
        self._bypassed.append(Bypassed.of(module, lambda: module))
        if not isinstance(module, StepModule):  # torch's own class does not report that its `forward` is replaced
            self._add(f"'forward' not in {self._constant(module.__dict__)}")

    def note_hooked(self, module: nn.Module) -> None:
        """Record that a module is called because of its hooks: without them, another plan is faster."""
        self._add(f"{self._constant(is_hooked)}({self._constant(module)})")

    def note_evaluation(self, module: nn.Module) -> None:
        """Record that a module is in evaluation mode."""
        self._add(f"not {self._constant(module.__dict__)}['training']")

    def note_owner(self, module: nn.Module) -> None:
        """Do the same for the module that holds the guard, without a reference to it."""
        self._bypassed.append(Bypassed.of(module, weakref.ref(module)))

    def holds(self) -> bool:
        """Return whether everything is unchanged."""
        if self._checked_after != (now := (RemovableHandle.next_id, Assignments.latest)):
            if nn.modules.module._has_any_global_hook() or not all(each.is_as_before() for each in self._bypassed):
                return False
            self._checked_after = now
        try:
            return self._compare()
        except KeyError:  # an entry was deleted
            return False

    def compile(self) -> None:
        """Compile what was recorded, before `holds` is called."""
        names = dict(self._names.values())
        self._compare = eval(f"lambda: {' and '.join(self._comparisons) or True}", names)  # noqa: S307

    def _add(self, comparison: str) -> None:
        self._comparisons[comparison] = None

    def _constant(self, value: Any) -> str:
        return self._names.setdefault(id(value), (f"c{len(self._names)}", value))[0]
