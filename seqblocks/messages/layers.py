"""Faults of a block that is used as a layer in Python: its name, its input, its wires."""

from __future__ import annotations

from collections.abc import Sequence

from seqblocks.errors import Fault, listing, quote
from seqblocks.messages.suggestions import did_you_mean


def no_bundled_block(name: str, known: Sequence[str], file: Sequence[str], is_builtin: bool) -> Fault:
    """known: bundled blocks; file: those of a bundled file of this name; is_builtin: whether it is a built-in verb."""
    hint = did_you_mean(name, known) or 'docs/blocks.md lists them; for your own: block("my.yaml", "name", …)'
    if file:
        hint = f"it is a file with the blocks {listing(file)}: pass one of these names"
    elif is_builtin:
        hint = f"{name} is a step: define a block that contains it, and pass it to block_text"
    return Fault("E301", f"there is no bundled block {quote(name)}", hint=hint)


def no_block_in_file(name: str, file: str, known: Sequence[str]) -> Fault:
    expected = f"one of {listing(known)}" if known else None
    hint = did_you_mean(name, known) or (None if known else "define one in `blocks:`")
    return Fault("E301", f"{file} has no block {quote(name)}", expected=expected, hint=hint)


def key_of_a_step(block: str, key: str) -> Fault:
    message = f"block {block} has no argument {quote(key)}"
    return Fault("E201", message, hint=f"`{key}:` belongs to a step of a spec, and a layer is a block by itself")


def no_width(block: str, wires: bool) -> Fault:
    hint = "features=64" + (', or input={"image": {"size": 32}}' if not wires else "")
    return Fault("E202", f"the arguments of {block} do not give the width of its input", hint=f"pass {hint}")


def no_wire(block: str, wire: str, width: object) -> Fault:
    what = f"pass {wire}={width} for {width} features next to each token of the input"
    other = f'{wire}={{"features": {width}}} for a sequence with a length of its own'
    return Fault("E411", f"block {block} needs its input {quote(wire)}", hint=f"{what}, or {other}")


def not_an_input(wire: str, found: str) -> Fault:
    expected = 'a number of features, or an input as in `inputs:`, such as {"features": 64} or {"vector": 8}'
    return Fault("E203", f"{quote(wire)} is a wire", expected=expected, found=found)


def not_beside(wire: str, kind: str) -> Fault:
    message = f"{quote(wire)} cannot have features next to each token of the input, which is {kind}"
    return Fault("E203", message, hint=f'pass {wire}={{"features": …}}, or {{"vector": …}}')
