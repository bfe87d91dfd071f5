"""Detect changes to a model since a plan was made from it, fast enough to check at each token."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from seqblocks.kernels.dispatch.compiled import constant


class Updates:
    """What identifies the latest step of an optimiser in this process: a new object, as a count could lose a step.

    Fused optimisers, and those that write to `parameter.data`, change parameters without changing their versions.
    """

    latest = object()


@constant  # A compiled optimiser changes versions.
def _note_update(*_: Any) -> None:
    Updates.latest = object()


register_optimizer_step_post_hook(_note_update)


class Guard:
    """Record modules and parameters, and check whether any of them was replaced, modified or hooked.

    The comparisons are compiled as one expression, since looping over tables takes twice as long. Tables of hooks are
    checked only if a hook was registered anywhere since they were last found empty.
    """

    def __init__(self) -> None:
        self._comparisons: dict[str, None] = {}
        self._names: dict[int, tuple[str, Any]] = {}  # by the id of the value
        self._hooks: list[Any] = []
        self._hooks_registered = -1
        self._compare: Callable[[], bool]

    def note_entry(self, table: dict[str, Any], name: str) -> None:
        """Record the identity of an entry in one of a module's dicts."""
        self._add(f"{self._constant(table)}[{name!r}] is {self._constant(table[name])}")

    def note_numbers(self, x: Tensor) -> None:
        """Record the values of a tensor by its version counter and address."""
        own = self._constant(x)
        self._add(f"{own}._version == {x._version} and {own}.data_ptr() == {x.data_ptr()}")

    def note_bypassed(self, module: nn.Module) -> None:
        """Record that a module is bypassed, and must keep its class and op and have no hooks or replaced `forward`."""
        own = self._constant(module.__dict__)
        self._add(f"type({self._constant(module)}) is {self._constant(type(module))}")
        self._add(f"'forward' not in {own}")
        if "op" in module.__dict__:
            self.note_entry(module.__dict__, "op")
        self._note_hooks(module)

    def note_evaluation(self, module: nn.Module) -> None:
        """Record that a module is in evaluation mode."""
        self._add(f"not {self._constant(module.__dict__)}['training']")

    def note_owner(self, module: nn.Module) -> None:
        """Do the same for the module that holds the guard, without a reference to it or its attributes."""
        own = self._constant(weakref.ref(module))
        self._add(f"type({own}()) is {self._constant(type(module))}")
        self._add(f"'forward' not in {own}().__dict__")
        self._note_hooks(module)

    def _note_hooks(self, module: nn.Module) -> None:
        self._hooks += [
            module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        ]  # fmt: skip

    def holds(self) -> bool:
        """Return whether everything is unchanged."""
        if self._hooks_registered != (registered := RemovableHandle.next_id):
            if any(self._hooks) or nn.modules.module._has_any_global_hook():
                return False
            self._hooks_registered = registered
        try:
            return self._compare()
        except KeyError:  # an entry was deleted
            return False

    def compile(self) -> None:
        """Compile what was recorded, before `holds` is called."""
        names = {"type": type, **dict(self._names.values())}
        self._compare = eval(f"lambda: {' and '.join(self._comparisons) or True}", names)  # noqa: S307

    def _add(self, comparison: str) -> None:
        self._comparisons[comparison] = None

    def _constant(self, value: Any) -> str:
        return self._names.setdefault(id(value), (f"c{len(self._names)}", value))[0]
