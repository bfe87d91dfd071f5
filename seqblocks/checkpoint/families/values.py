"""Values of a config.json, checked as they are read, and written as YAML."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from seqblocks.combinators import MAX_REPEATS
from seqblocks.errors import UsageError, listing
from seqblocks.language.expressions import MAX_MAGNITUDE

Config = Mapping[str, Any]


class Recorded(Config):
    """The entries of a config.json. It records which were read, also in mappings inside it."""

    def __init__(self, entries: Config) -> None:
        self._entries = entries
        self._read: set[str] = set()
        self._inner: dict[str, Recorded] = {}

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        value = self._entries[key]
        return self._inner.setdefault(key, Recorded(value)) if isinstance(value, dict) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return repr(self._entries)

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yield entries that were not read; the name of one in a mapping is `rope_parameters.factor`."""
        for key, value in self._entries.items():
            if key not in self._read:
                yield key, value
            elif key in self._inner:
                yield from ((f"{key}.{name}", each) for name, each in self._inner[key].unread())


def renamed(config: Config, aliases: Mapping[str, str]) -> Config:
    """Return a config with aliases replaced. Raises UsageError if two names of one entry have different values."""
    found = dict(config)
    for alias, name in aliases.items():
        value = found.pop(alias, None)
        if value is not None and found.get(name) is None:
            found[name] = value
        if value is not None and found[name] != value:
            what = f"{alias} is {value!r} and {name} is {found[name]!r}"
            raise UsageError(f"config.json: {what}: these are two names of one entry. Remove one")
    return found


def require(config: Config, **values: Any) -> None:
    """Raise UsageError unless the entries, where present, have one of these values: others describe another model."""
    for key, allowed in values.items():
        allowed = allowed if isinstance(allowed, tuple) else (allowed, None)
        if config.get(key) not in allowed:
            expected = " or ".join(repr(value) for value in allowed if value is not None) or "None"
            raise UsageError(f"config.json: {key} is {config[key]!r}, but seqblocks only supports {expected}")


def _value(config: Config, key: str, kinds: tuple[type, ...], what: str, default: Any) -> Any:
    value = config.get(key, default)
    if type(value) not in kinds:
        raise UsageError(f"config.json: {key} must be {what}, not {value!r}")
    if type(value) is int and abs(value) > MAX_MAGNITUDE:  # may be too large to become a float
        raise UsageError(f"config.json: {key} is too large: at most 10^18 is possible")
    return value


def whole(config: Config, key: str, default: int | None = None, least: int = 1) -> int:
    """Return a whole number of at least `least`."""
    found = int(_value(config, key, (int,), "a whole number", default))
    if found < least:
        raise UsageError(f"config.json: {key} must be at least {least}, not {found}")
    return found


def depth_of(config: Config) -> int:
    """Return the number of layers, limited because the spec lists them one by one."""
    return limited(config, "num_hidden_layers")


def limited(config: Config, key: str, default: int | None = None, least: int = 1) -> int:
    """Return the number of layers or experts that the spec lists one by one."""
    found = whole(config, key, default, least)
    if found > MAX_REPEATS:
        raise UsageError(f"config.json: {key} must be at most {MAX_REPEATS}, not {found}")
    return found


def mapping(config: Config, key: str) -> Config:
    """Return a mapping in the config, empty if the entry is absent or null."""
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise UsageError(f"config.json: {key} is not a mapping")
    return found


def follows(config: Config, key: str, value: Any, why: str) -> None:
    """Raise UsageError if an entry is present with another value than the one that follows from others."""
    if config.get(key) not in (None, value):
        raise UsageError(f"config.json: {key} is {config[key]!r}, but seqblocks only supports {value!r}, {why}")


def head_of(config: Config) -> int:
    """Return the features of an attention head. Raises UsageError if `head_dim` says otherwise."""
    head = whole(config, "hidden_size") // whole(config, "num_attention_heads")
    follows(config, "head_dim", head, "hidden_size / num_attention_heads")
    return head


def numbers(config: Config, key: str) -> list[int]:
    """Return a list of whole numbers, empty if the entry is null."""
    found = config.get(key)
    if found is not None and not (isinstance(found, list) and all(type(each) is int for each in found)):
        raise UsageError(f"config.json: {key} must be a list of whole numbers, not {found!r}")
    return list(found or [])


def whole_or(config: Config, key: str, default: int) -> int:
    """Return a whole number, or the default if the entry is absent or null."""
    return default if config.get(key) is None else whole(config, key, least=min(default, 1))


def shared_heads(config: Config, heads: int, absent: int) -> int:
    """Return the heads of keys and values: as many as there are heads if the entry is null."""
    return whole_or(config, "num_key_value_heads", heads if "num_key_value_heads" in config else absent)


def window_of(config: Config, default: int | None = None) -> int:
    """Return the tokens that attention sees, 0 for all of them: the entry is null, or absent without a default."""
    key = "sliding_window"
    return 0 if config.get(key, default) is None else whole(config, key, default)


def number(config: Config, key: str, default: float | None = None) -> float:
    found = float(_value(config, key, (int, float), "a number", default))
    if not math.isfinite(found):
        raise UsageError(f"config.json: {key} must be a number, not {found}")
    return found


def above_0(config: Config, key: str, default: float = 1.0) -> float:
    """Return a number above 0."""
    found = number(config, key, default)
    if found <= 0:
        raise UsageError(f"config.json: {key} must be more than 0, not {found}")
    return found


def multipliers(config: Config, key: str, count: int) -> list[float]:
    """Return a list of `count` numbers, each 1 if the entry is absent or null."""
    found = config.get(key)
    if found is None:
        return [1.0] * count
    if not isinstance(found, list) or len(found) != count:
        raise UsageError(f"config.json: {key} must be a list of {count} numbers, not {found!r}")
    return [number({key: each}, key) for each in found]


def initial(config: Config, key: str, default: float) -> float:
    """Return a number above 0 that only affects initial values.

    Invalid ones are replaced by the default, because the weights of such a model may exist.
    """
    found: Any = config.get(key)
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return float(found) if is_number and 1e-9 <= found <= 1e9 else default


def std_of(config: Config, default: float = 0.02) -> float:
    """Return the standard deviation of initial weights; like transformers, treat null and 0 as 0.02."""
    key = "initializer_range"
    return initial(config, key, default) if config.get(key, default) else 0.02


def step_sizes(config: Config, prefix: str = "time_step_", floor: str = "floor") -> dict[str, float]:
    """Return the arguments of a mixer for its initial step sizes that are not the usual ones."""
    usual = {"dt_min": 0.001, "dt_max": 0.1, "dt_floor": 1e-4}
    names = dict(zip(usual, ("min", "max", floor), strict=True))
    found = {ours: initial(config, prefix + name, usual[ours]) for ours, name in names.items()}
    found["dt_min"], found["dt_max"] = sorted((found["dt_min"], found["dt_max"]))  # transformers accepts any order
    return {name: value for name, value in found.items() if value != usual[name]}


def flag(config: Config, key: str, default: bool) -> bool:
    return bool(_value(config, key, (bool,), "true or false", default))


def base_of(config: Config, key: str, default: float | None = None) -> float:
    """Return the base of rotary positions, at least 1."""
    found = number(config, key, default)
    if found < 1:
        raise UsageError(f"config.json: {key} must be at least 1, not {found}")
    return found


def rotated(head: int, share: float) -> int:
    """Return how many of a head's features rotate. Raises UsageError unless they are pairs."""
    found = int(head * share)
    if found % 2 or not 2 <= found <= head:
        what = f"which rotates {found} of {head} features"
        raise UsageError(f"config.json: partial_rotary_factor is {share}, {what}, but seqblocks only supports pairs")
    return found


def check_choice(arguments: Mapping[str, Any], count: str) -> None:
    """Raise UsageError if a token goes to more experts than its groups have. count: the key of all experts."""
    groups, chosen = (int(arguments.get(name, 1)) for name in ("groups", "top_groups"))
    most = chosen * (int(arguments[count]) // groups)
    if arguments["top"] > most:
        has = f"but topk_group, n_group and the number of experts give a token {most}"
        raise UsageError(f"config.json: num_experts_per_tok is {arguments['top']}, {has}")


def words(config: Config, key: str, allowed: Iterable[str]) -> list[str]:
    """Return a list of words, each of which is allowed."""
    found = _value(config, key, (list,), "a list", None)
    for word in found:
        if word not in allowed:
            known = listing(allowed)
            raise UsageError(f"config.json: {key} has {word!r}, but seqblocks only supports {known}")
    return list(found)


def rank(config: Config, key: str) -> int:
    """Return the rank of dt; 0 means the default, a sixteenth of the width."""
    return 0 if config.get(key, "auto") == "auto" else whole(config, key)


def expansion(config: Config) -> float:
    expand = number(config, "expand", 2)
    inner, dim = config.get("intermediate_size"), whole(config, "hidden_size")
    if inner is not None and inner != int(expand * dim):
        expected = f"expand * hidden_size is {int(expand * dim)}"
        raise UsageError(f"config.json: intermediate_size is {inner!r}, but {expected}")
    return expand


def written(arguments: Mapping[str, float | str]) -> str:
    """Return arguments as YAML."""
    return ", ".join(f"{name}: {scalar(value)}" for name, value in arguments.items())


def scalar(value: float | str) -> str:
    """Return a number, truth value or word as YAML."""
    return value if isinstance(value, str) else repr(value).lower()


def rotary(
    config: Config, part: float = 1.0, base: float = 10000.0, share_at_the_top: bool = True
) -> tuple[float, float]:
    """Return the base of rotary positions and the share of a head that is rotated.

    They are read from `rope_parameters` or, for older versions of transformers, from the top level; the share only
    with `share_at_the_top`. Raises UsageError for other kinds of positions.
    """
    found = mapping(config, "rope_parameters")
    require(found, rope_type="default", type="default")
    require(config, rope_scaling=(None,))
    share, theta = "partial_rotary_factor", "rope_theta"
    outer = config if share_at_the_top else {}
    return base_of(found if theta in found else config, theta, base), number(
        found if share in found else outer, share, part
    )
