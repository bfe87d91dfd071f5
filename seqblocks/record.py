"""Classes of named values, without the source that `dataclass` writes and compiles for each.

`seqblocks check` defines 30 of them in every process. See docs/decisions/0046-what-check-may-cost.md.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, field
from inspect import get_annotations
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self, dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """Do what typing's decorator of this name does at run time; Python 3.10 lacks it."""
        return lambda cls: cls


@dataclass_transform(eq_default=False, field_specifiers=(field,))
class Record:
    """Base of classes whose annotations are the arguments of `__init__`, as in a dataclass; equal only to itself.

    Defaults are values, or `field(default_factory=list)`; `field(kw_only=True)` has none, and may follow those that do.
    """

    _names: ClassVar[tuple[str, ...]] = ()
    _known: ClassVar[frozenset[str]] = frozenset()
    _required: ClassVar[frozenset[str]] = frozenset()
    _factories: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        own = get_annotations(cls)
        fields = {name: value for name in own if isinstance(value := cls.__dict__.get(name), Field)}
        made = {name: each.default_factory for name, each in fields.items() if each.default_factory is not MISSING}
        for name in made:  # a field that is required stays, and hides a property of the same name in the base
            delattr(cls, name)
        cls._names += tuple(own)
        cls._known = frozenset(cls._names)
        cls._factories = {**cls._factories, **made}
        cls._required |= {name for name in own if name not in made and (name in fields or name not in cls.__dict__)}

    def __init__(self, *values: Any, **named: Any) -> None:
        if len(values) > len(self._names):
            raise TypeError(f"{type(self).__name__} takes {len(self._names)} values at most, not {len(values)}")
        count = len(values) + len(named)
        named.update(zip(self._names, values))  # noqa: B905  # `strict=False` would take longer
        if len(named) < count:
            raise TypeError(f"{type(self).__name__}: an argument is passed by position and by name")
        if not (self._required <= named.keys() and self._known.issuperset(named)):
            wrong = sorted((self._required - named.keys()) | (named.keys() - self._known))
            raise TypeError(f"{type(self).__name__}: missing or unknown arguments: {', '.join(wrong)}")
        for name, make in self._factories.items():
            if name not in named:
                named[name] = make()
        self.__dict__.update(named)

    def _replace(self, **changes: Any) -> Self:
        """Return a copy with some of its values changed."""
        if not self._known.issuperset(changes):
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(changes.keys() - self._known))}")
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, **changes)
        return new
