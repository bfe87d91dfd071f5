"""Arguments of `repeat`: consecutive layers."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from typing import Any, Literal

from seqblocks.combinators import MAX_REPEATS, Combinator, combinator
from seqblocks.op import argument


@combinator("repeat")
class Repeat(Combinator):
    """Repeat steps several times in sequence, with separate parameters for each layer unless they are shared.

    Write `times: 12` with `steps`, or `pattern: m*3 s m*16 s` with the steps of each word under that word; `times` then
    repeats the pattern. `(m m s)*4` repeats a group, and `mms*4` is the same if there are steps for `m` and `s` and
    none for `mms`. Inside, `layer` is the layer index (from 0) and `layers` the number of layers. With `share`,
    layers use the parameters of the first layer (in a pattern, of the first layer with the same word).

    A layer can read wires of the layers above it: `layers.0.v`, or `layers[-1].v or input`, which says what to read
    where there is none. After the repeat, its name takes the place of `layers`.
    """

    times: int = argument(1, "number of repetitions of the steps or the pattern (may be 0)", ge=0, le=MAX_REPEATS)
    pattern: str | None = argument(
        None, "words with counts, for instance `m*7 s` or `(m*7 s)*6`; each word is a key with its steps"
    )
    index: str = argument(
        "layer", "name of the layer index inside the steps; the number of layers has the plural of this name"
    )
    share: Literal["all", "none"] | list[str] | str = argument(
        "none",
        "what layers share: all, none, or a list of steps and parameters; or a step to share with",
    )
    steps: Any = argument(None, "the steps to repeat, if there is no pattern")
    open_keys = True
