"""Shorthands of all verbs: a scalar is the one required argument or the only one, a list a combinator's steps."""

from __future__ import annotations

import pytest

from seqblocks import op
from seqblocks.analysis import check
from seqblocks.combinators import COMBINATORS, find_combinator
from seqblocks.descriptions import listing, reference
from seqblocks.errors import SpecError

HEAD = (
    "seqblocks: 1\nmodel:\n  input: {features: 8, length: 6}\n  steps:\n    - linear: {features: 8, as: other}\n    - "
)
VERBS = reference.verbs()


def required(verb: str) -> list[str]:
    """Return the required arguments and inputs of a primitive."""
    cls = op.PRIMITIVES[verb]
    ports = [port.name for port in cls.ports if not (port.main or port.optional)]
    return ports + [name for name, info in op.field_infos(cls).items() if info.is_required()]


def value_of(verb: str, name: str) -> str:
    kinds = op.fields_of(op.PRIMITIVES[verb])
    if name not in kinds:
        return "other"
    kind = kinds[name]
    if kind.choices:
        return kind.choices[0]
    if name == "pattern":
        return '"seq (two n) -> seq (n two)"'
    return {"number": "2" if kind.whole else "0.5", "flag": "true"}.get(kind.kind, "other")


def answer(step: str) -> str | list[tuple[str, str]]:
    """Return the listing of a model that ends with this step, or the codes and messages of its errors."""
    try:
        _, model = check.check_text(HEAD + step)
    except SpecError as error:
        return [(each.code, each.message) for each in error.diagnostics]
    assert model is not None
    return listing.text(model)


def sole(verb: str) -> list[str]:
    """Return the arguments of which a scalar may be one: those that are required, or all, if it is only one."""
    cls = op.PRIMITIVES[verb]
    every = [port.name for port in cls.ports if not port.main] + list(op.field_infos(cls))
    only = every if len(every) == 1 and every[0] in op.field_infos(cls) else []
    return required(verb) or only


PRIMITIVES = sorted(verb for verb in VERBS if verb in op.PRIMITIVES and op.PRIMITIVES[verb].builtin)
SOLE = [verb for verb in PRIMITIVES if len(sole(verb)) == 1]


@pytest.mark.parametrize("verb", SOLE)
def test_a_scalar_is_the_one_argument(verb: str) -> None:
    (name,) = sole(verb)
    value = value_of(verb, name)
    assert answer(f"{verb}: {value}") == answer(f"{verb}: {{{name}: {value}}}")


def test_many_verbs_have_one() -> None:
    assert {"linear", "scale", "add", "multiply", "drop_path", "rearrange", "headwise_linear", "soft_cap"} <= set(SOLE)
    assert {"dropout", "pool", "softmax", "leaky_relu", "layer_scale"} <= set(SOLE)
    accepted = [verb for verb in SOLE if isinstance(answer(f"{verb}: {value_of(verb, sole(verb)[0])}"), str)]
    assert len(accepted) > len(SOLE) / 2


@pytest.mark.parametrize("verb", [verb for verb in PRIMITIVES if len(sole(verb)) != 1])
def test_a_scalar_needs_exactly_one_argument(verb: str) -> None:
    found = answer(f"{verb}: 2")
    assert isinstance(found, list)
    assert [code for code, _ in found] == ["E203"]


@pytest.mark.parametrize("verb", COMBINATORS)
def test_a_list_is_the_steps_of_a_combinator(verb: str) -> None:
    key, *_ = find_combinator(verb).holds
    steps = {"parallel": "[{a: [silu]}, {b: [relu]}]", "aside": "[silu, {relu: {as: side}}]"}.get(verb, "[silu, relu]")
    found = answer(f"{verb}: {steps}")
    if verb in ("experts", "choose", "each", "cell"):  # which also require their number, scores, an axis, or states
        assert isinstance(found, list)
        assert [code for code, _ in found] == ["E203"]
    else:
        assert isinstance(found, str)
        assert found == answer(f"{verb}: {{{key}: {steps}}}")


def test_the_one_argument_of_a_block() -> None:
    blocks = """
blocks:
  wide: {args: {dim: int, heads: 2}, steps: [{linear: dim}]}
  around: {args: {inner: steps}, steps: [inner]}
  beside: {args: {by: wire}, steps: [{multiply: {by: by}}]}
  dropped: {args: {rate: 0.1}, steps: [{dropout: rate}]}
"""

    def of(step: str) -> str:
        _, model = check.check_text(HEAD.replace("\nmodel:", blocks + "model:") + step)
        assert model is not None
        return listing.text(model)

    assert of("wide: 4") == of("wide: {dim: 4}")
    assert of("dropped: 0.3") == of("dropped: {rate: 0.3}")
    assert of("around: [silu]") == of("around: {inner: [silu]}")
    assert of("beside: other") == of("beside: {by: other}")
