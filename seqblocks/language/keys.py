"""Checks that all sections of a spec share: known and required keys, names, texts."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Protocol

from seqblocks.errors import Fault, Report, Span, listing, quote
from seqblocks.language.document import Mapping, Node, Scalar, kind_of
from seqblocks.language.expressions import RESERVED
from seqblocks.suggestions import key_hint, missing_colon

# Parameters, and steps with parameters, are attributes of torch modules under their names. These are already attributes
# there, or methods of a built model; tests/torch/test_module.py compares the list with both.
ATTRIBUTES = frozenset(
    (
        "forward", "fwd", "rev", "rows", "rows_reverse", "columns", "columns_reverse", "sorted",
        "sorted_reverse", "graph", "step", "init_state",
        "parameter_groups", "stream", "tie", "reset_parameters", "frame_size", "takes_frames", "input", "T_destination",
        "add_module", "apply", "bfloat16", "buffers", "call_super_init", "children", "compile", "cpu", "cuda", "double",
        "dump_patches", "eval", "extra_repr", "float", "get_buffer", "get_extra_state", "get_parameter",
        "get_submodule", "half", "ipu", "load_state_dict", "modules", "mtia", "named_buffers", "named_children",
        "named_modules", "named_parameters", "parameters", "register_backward_hook", "register_buffer",
        "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
        "register_full_backward_pre_hook", "register_load_state_dict_post_hook", "register_load_state_dict_pre_hook",
        "register_module", "register_parameter", "register_state_dict_post_hook", "register_state_dict_pre_hook",
        "requires_grad_", "set_extra_state", "set_submodule", "share_memory", "auxiliary_losses", "spec", "state_dict",
        "tensor_shards", "to", "to_empty", "train", "training", "type", "whole_spec", "xpu", "zero_grad",
        "declared_state", "has_experts", "keeps_routing", "latest_routing", "latest_stream", "own_dtype",
        "resets_obstacle", "sequence_relay", "some_tensor", "streaming_obstacle", "token_outputs", "token_plan",
        "traced_plan", "unguarded_step",
    )
)  # fmt: skip


def known_keys(
    report: Report, node: Mapping, known: Iterable[str], what: str, elsewhere: Container[str] = (), place: str = ""
) -> None:
    """Report unknown keys (E201) and mark a mapping that has any as incomplete.

    elsewhere: keys that belong in another place of a spec, which `place` describes.
    """
    words = tuple(known)
    for key, span, _ in node:
        if key not in words:
            node.incomplete = True
            hint = f"move `{key}:` {place}" if key in elsewhere else partial(key_hint, key, words)
            message = f"unknown key {quote(key)} in {what}"
            report.fault(Fault("E201", message, expected=f"one of {listing(words)}", hint=hint), span)


class Holder(Protocol):
    """A mapping, or a step with its arguments."""

    incomplete: bool

    def get(self, key: str) -> Node | None: ...


def required(
    report: Callable[[Fault, Span | None], object],
    holder: Holder,
    key: str,
    missing: Fault,
    where: Span | None,
) -> Node | None:
    """Return the value of a key. If it is absent, report `missing`, unless the holder is incomplete."""
    node = holder.get(key)
    if node is None and not holder.incomplete:
        report(missing, where)
    return node


def is_name(report: Report, name: str, span: Span | None, key: bool = False) -> bool:
    """Return whether a word is a valid name; report it (E207, E311) if not. `key`: whether a colon could be missing."""
    if name in RESERVED:
        fault = Fault("E311", f"{quote(name)} is a reserved word in expressions", hint="choose another name")
        report.fault(fault, span)
    elif not (name.isascii() and name.isidentifier()) or len(name) > 64:
        message = f"{quote(name)} is not a valid name"
        expected = "letters, digits and _, not beginning with a digit"
        report.fault(Fault("E207", message, expected=expected, hint=missing_colon(name) if key else None), span)
    else:
        return True
    return False


def is_taken(word: str) -> bool:
    """Return whether a word cannot be an attribute of a built model that contains parameters.

    torch modules have an attribute of this name, or Python reads it as a keyword, as in code that torch writes.
    """
    return word in ATTRIBUTES or keyword.iskeyword(word)


def namespace_of(word: str) -> str:
    """Return the namespace of a step without `name:`, from its `as:` name or its verb, or that of a learned scalar."""
    return f"{word}_" if is_taken(word) and word != "input" else word


def text_of(report: Report, root: Mapping, key: str) -> str:
    """Return the text at a key, or "" if there is none."""
    node = root.get(key)
    if node is None:
        return ""
    if isinstance(node, Scalar):
        return node.text
    report.fault(Fault("E203", f"{key} must be text", found=kind_of(node)), node.span)
    return ""
