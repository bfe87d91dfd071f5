"""The words of the faults: messages, hints, and the long explanations of codes.

Each file is about one topic. Its functions describe one fault each: they are given facts, and return a Fault (those of
`yaml_syntax.py` also find the place, and return a Diagnostic). The code that finds the fault (`language/`, `analysis/`,
`widths.py`) raises or reports it:

    from seqblocks import messages
    raise messages.wires.given_twice(port.name)

A primitive words the faults in its own arguments itself, in `ops/`, as a plug-in does. A topic is imported when one of
its functions is first used; a valid spec uses none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqblocks.messages import (
        blocks,
        checkpoint_maps,
        combinators,
        document,
        expectations,
        expressions,
        initialisers,
        inputs,
        layers,
        recipes,
        sharing,
        spec,
        steps,
        unused,
        values,
        wires,
        yaml_syntax,
    )

__all__ = [
    "blocks", "checkpoint_maps", "combinators", "document", "expectations", "expressions", "initialisers", "inputs",
    "layers", "recipes", "sharing", "spec", "steps", "unused", "values", "wires", "yaml_syntax",
]  # fmt: skip


def __getattr__(topic: str) -> Any:
    if topic in __all__:
        return importlib.import_module(f"{__name__}.{topic}")
    raise AttributeError(f"module {__name__!r} has no attribute {topic!r}")
