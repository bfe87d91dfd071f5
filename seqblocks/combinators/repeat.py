"""The arguments of repeat: layers in a row."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from typing import Any, Literal

from seqblocks.combinators import MAX_REPEATS, Combinator, combinator
from seqblocks.op import argument


@combinator("repeat")
class Repeat(Combinator):
    """Run steps several times, one after the other, each with parameters of its own unless they are shared.

    `times: 12` with `steps`, or `pattern: m*3 s m*16 s` with the steps of each word under the word; `times` then
    repeats the pattern. Inside, `layer` is the index (from 0) and `layers` their number. With `share`, layers use
    parameters of the first layer (of a pattern: of the first layer of their word).
    """

    times: int = argument(1, "how often the steps, or the pattern, are repeated (0: not at all)", ge=0, le=MAX_REPEATS)
    pattern: str | None = argument(None, "words with counts, for instance `m*7 s`; each word is a key holding steps")
    index: str = argument("layer", "what the layer index is called inside; the number of layers is its plural")
    share: Literal["all", "none"] | list[str] | str = argument(
        "none",
        "what layers share: all, none, or a list of steps and parameters; or a step whose parameters the repeat uses",
    )
    steps: Any = argument(None, "the steps to repeat, if there is no pattern")
    open_keys = True
