"""Rotary positions from the config.json of transformers, also of its older versions, with all kinds of scaling."""

from __future__ import annotations

from typing import Any, NamedTuple

from seqblocks.checkpoint.families.values import Config, base_of, mapping, number, rotated, scalar, whole
from seqblocks.errors import UsageError, listing

# Names of entries in transformers and in `scaling:`
SHARED = (
    "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor",
    "high_freq_factor",
)  # fmt: skip
TAKEN = {
    "linear": ("factor", "attention_factor"),
    "dynamic": ("factor", "attention_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
    "llama3": ("factor", "attention_factor", "low_freq_factor", "high_freq_factor"),
}


class Rope(NamedTuple):
    """The arguments of a `rotary` step as YAML, and its base."""

    text: str
    base: float


class Scaled(NamedTuple):
    """The entries of `scaling:`, and the same as YAML."""

    entries: dict[str, Any]
    text: str


def rope(
    config: Config, head: int, base: float = 10000.0, *, part: float = 1.0, kind: str = "",
    base_name: str = "rope_theta",
) -> Rope:
    """Return the rotary positions of heads with `head` features.

    base, part: the default base, and part of the features that is rotated. kind: of the layers, for configs with angles
    by kind. base_name: the entry of old configs.
    """
    found = mapping(config, "rope_parameters")
    if kind and kind in found:
        found = mapping(found, kind)
    scaled = scaling_of(config, found, base_name == "rope_theta")
    theta = base_of(found if "rope_theta" in found else {"rope_theta": config.get(base_name, base)}, "rope_theta")
    name = "partial_rotary_factor"
    share = number(found if name in found else config, name, part)
    parts = [f"base: {scalar(theta)}"]
    if share != 1.0:
        parts.append(f"features: {rotated(head, share)}")
    if scaled:
        parts.append(f"scaling: {scaled.text}")
    return Rope(", ".join(parts), theta)


def scaling_of(config: Config, found: Config | None = None, may_be_old: bool = True) -> Scaled | None:
    """Return how the angles are scaled, None if they are not. found: the parameters, by default the config's.

    may_be_old: whether `rope_scaling` of older versions may say it.
    """
    found = mapping(config, "rope_parameters") if found is None else found
    given = found if _kind(found) != "default" or not may_be_old else mapping(config, "rope_scaling")
    return None if _kind(given) == "default" else _scaling(config, given)


def _kind(given: Config) -> str:
    return str(given.get("rope_type") or given.get("type") or "default")


def _scaling(config: Config, given: Config) -> Scaled:
    kind = {"su": "longrope"}.get(_kind(given), _kind(given))
    if kind not in TAKEN:
        known = listing(["default", *TAKEN])
        raise UsageError(f"config.json: rope_type is {kind!r}, but seqblocks only supports {known}")
    longest = whole(config, "max_position_embeddings", 2048)
    before = _original(given) or _original(config)
    entries: dict[str, Any] = {"type": kind}
    for name in SHARED:
        if given.get(name) is not None and name in TAKEN[kind]:
            value = given[name]
            entries[name] = value if isinstance(value, bool) else number(given, name)
    if kind != "linear":
        entries["original_length"] = (before or longest)
    if kind == "dynamic":
        entries["original_length"] = entries["length"] = longest
    if kind == "longrope":
        if before or "factor" not in entries:  # transformers then ignores the entry
            entries["factor"] = longest / (before or longest)
        entries |= {name: _divisors(given, name) for name in ("short_factor", "long_factor")}
    return Scaled(entries, "{" + ", ".join(f"{name}: {_text(value)}" for name, value in entries.items()) + "}")


def _original(given: Config) -> int:
    """Return the tokens of a sequence before an extension, 0 if the entry is absent."""
    name = "original_max_position_embeddings"
    return 0 if given.get(name) is None else whole(given, name)


def _divisors(given: Config, name: str) -> list[float]:
    found = given.get(name)
    if not isinstance(found, list) or not all(type(each) in (int, float) for each in found):
        raise UsageError(f"config.json: {name} of rope_parameters must be a list of numbers, not {found!r}")
    return [float(each) for each in found]


def _text(value: Any) -> str:
    return f"[{', '.join(map(scalar, value))}]" if isinstance(value, list) else scalar(value)
