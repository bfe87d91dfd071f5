"""Rotary positions for longer sequences than those of the training: other angles, and a factor of the rotated features.

Results are those of transformers' `modeling_rope_utils`, in float64. Angles never depend on the length of the sequence
of a call, so that a stream equals the whole sequence; types that depend on a length take it as an argument.
"""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from seqblocks.errors import Fault, listing

NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_length", "length"),
    "yarn": ("factor", "original_length"),
    "longrope": ("factor", "original_length", "short_factor", "long_factor"),
    "llama3": ("factor", "original_length"),
}
ALLOWED = {
    "linear": ("attention_factor",),
    "dynamic": ("attention_factor",),
    "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor"),
    "longrope": ("length", "attention_factor"),
    "llama3": ("low_freq_factor", "high_freq_factor", "attention_factor"),
}

TURNS = {"beta_fast": 32.0, "beta_slow": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # defaults


def entry(about: str, default: Any = None, **limits: Any) -> Any:
    return Field(default, description=about, **limits)


class Scaling(BaseModel):
    """The entries of `scaling:`. Names are those of transformers, except for the two lengths."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    type: Literal["linear", "dynamic", "yarn", "longrope", "llama3"] = entry("how angles are scaled", ...)
    factor: float | None = entry("how many times longer sequences become", gt=0)
    original_length: int | None = entry("tokens in a sequence of the training before the extension", ge=2)
    length: int | None = entry("tokens in a sequence now; dynamic and longrope choose the angles by it", ge=1)
    attention_factor: float | None = entry("factor of rotated features (default: by the type)", gt=0)
    beta_fast: float | None = entry("yarn: turns in the original length from which angles are unchanged", gt=0)
    beta_slow: float | None = entry("yarn: turns up to which angles are divided by the factor", gt=0)
    mscale: float | None = entry("yarn: weight of log(factor) in the attention factor", ge=0)
    mscale_all_dim: float | None = entry("yarn: weight of log(factor) in the divisor of the attention factor", ge=0)
    truncate: bool | None = entry("yarn: whether the bounds between features are rounded to whole ones")
    low_freq_factor: float | None = entry("llama3: turns up to which angles are divided by the factor", gt=0)
    high_freq_factor: float | None = entry("llama3: turns from which angles are unchanged", gt=0)
    short_factor: tuple[float, ...] | None = entry("longrope: divisor of each angle up to the original length")
    long_factor: tuple[float, ...] | None = entry("longrope: divisor of each angle beyond it")

    def check(self, width: int, base: float) -> None:
        """Raise Fault unless the entries are those of the type, and fit heads that rotate `width` features."""
        given = {key for key, value in self if value is not None and key != "type"}
        needed, allowed = NEEDED[self.type], ALLOWED[self.type]
        if missing := [key for key in needed if key not in given]:
            hint = f"scaling: {{type: {self.type}, {', '.join(f'{key}: …' for key in needed)}}}"
            raise Fault("E202", f"scaling by {self.type} needs {listing(missing)}", at="scaling", hint=hint)
        if odd := sorted(given - {*needed, *allowed}):
            message, expected = f"scaling by {self.type} does not take {listing(odd)}", listing([*needed, *allowed])
            raise Fault("E209", message, at="scaling", expected=expected)
        for key in ("short_factor", "long_factor"):
            divisors = getattr(self, key)
            if divisors is not None and (len(divisors) != width // 2 or min(divisors) <= 0):
                expected, found = f"{width // 2} numbers above 0, one for each pair of features", f"{len(divisors)}"
                raise Fault("E209", f"'{key}' does not fit", at="scaling", expected=expected, found=found)
        self._check_bounds(width, base)

    def _check_bounds(self, width: int, base: float) -> None:
        low, high = self._band
        if self.type == "llama3" and low >= high:
            message, found = "'low_freq_factor' must be less than 'high_freq_factor'", f"{low:g} and {high:g}"
            raise Fault("E209", message, at="scaling", found=found)
        if self.type == "yarn" and low > high:
            message, found = "'beta_slow' must be at most 'beta_fast'", f"{low:g} and {high:g}"
            raise Fault("E209", message, at="scaling", found=found)
        if self.type == "dynamic" and width < 4:
            raise Fault("E401", "scaling by dynamic needs at least two pairs of features", at="scaling")
        if self.type == "yarn" and base <= 1:
            raise Fault("E209", "scaling by yarn needs a base above 1", at="base", found=f"{base:g}")
        if self.type == "dynamic" and self._stretch <= 0:
            raise Fault("E209", "scaling by dynamic needs a larger factor or length", at="scaling")

    @property
    def _band(self) -> tuple[float, float]:
        """The turns up to which angles are divided by the factor, and those from which they are unchanged."""
        names = ("beta_slow", "beta_fast") if self.type == "yarn" else ("low_freq_factor", "high_freq_factor")
        low, high = (TURNS[name] if (given := getattr(self, name)) is None else given for name in names)
        return low, high

    @property
    def _stretch(self) -> float:
        """Return by how much dynamic scaling multiplies the base, before the exponent."""
        factor, before = self.factor or 1.0, self.original_length or 1
        return factor * max(self.length or 1, before) / before - (factor - 1)

    def rates(self, width: int, base: float) -> list[float]:
        """Return the angles [width / 2] at position 1, of the pairs of features of a head that rotates `width`."""
        plain = unscaled(width, base)
        factor = self.factor or 1.0
        match self.type:
            case "dynamic":
                return unscaled(width, base * self._stretch ** (width / (width - 2)))
            case "yarn":
                ramp = self._ramp(width, base)
                return [rate * (1 + share * (1 / factor - 1)) for rate, share in zip(plain, ramp, strict=True)]
            case "longrope":
                divisors = self.long_factor if (self.length or 0) > (self.original_length or 0) else self.short_factor
                return [rate / divisor for rate, divisor in zip(plain, divisors or (), strict=True)]
            case "llama3":
                return [rate * (1 + self._share(rate) * (1 / factor - 1)) for rate in plain]
        return [rate / factor for rate in plain]

    def _ramp(self, width: int, base: float) -> list[float]:
        """Return the share of interpolation for each pair: 0 for fast ones, 1 for slow ones, linear in between."""
        length = self.original_length or 1
        scale = width / (2 * math.log(base))
        low, high = (scale * math.log(length / (turns * 2 * math.pi)) for turns in reversed(self._band))
        if self.truncate is not False:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        high = high + 0.001 if low == high else high
        return [min(max((pair - low) / (high - low), 0.0), 1.0) for pair in range(width // 2)]

    def _share(self, rate: float) -> float:
        """Return the share of interpolation for llama3, by the turns in the original length."""
        turns = (self.original_length or 1) * rate / (2 * math.pi)
        low, high = self._band
        return 1 - min(max((turns - low) / (high - low), 0.0), 1.0)

    def amplitude(self) -> float:
        """Return the factor of rotated features."""
        factor = self.factor or 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if factor <= 1 or self.type not in ("yarn", "longrope"):
            return 1.0
        if self.type == "longrope":
            return math.sqrt(1 + math.log(factor) / math.log(self.original_length or 2))
        if self.mscale and self.mscale_all_dim:
            return (0.1 * self.mscale * math.log(factor) + 1) / (0.1 * self.mscale_all_dim * math.log(factor) + 1)
        return 0.1 * math.log(factor) + 1


def unscaled(width: int, base: float) -> list[float]:
    """Return base^(-2 j / width) for each pair j."""
    return [base ** (-2 * pair / width) for pair in range(width // 2)]
