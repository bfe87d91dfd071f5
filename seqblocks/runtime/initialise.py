"""Initialise parameters, each with a generator seeded by its name, so that inserting a step changes no other weight."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from seqblocks.errors import UsageError
from seqblocks.graph import Graph, parameters
from seqblocks.kernels.attention import alibi_slopes
from seqblocks.parameters import LISTED, Init, Parameter
from seqblocks.runtime.agreement import check_seed
from seqblocks.runtime.shards import TensorShards, assign, groups_of

Draw = Callable[[tuple[int, ...], Init, int, torch.Generator], Tensor]

# Passed wherever a tensor is made, because a caller may have changed torch's default dtype and device.
PLAIN: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


def draw_all(module: nn.Module, body: Graph, seed: int, shards: TensorShards | None = None) -> None:
    """Draw all parameters of a graph that are tied to no other, in the module that holds them.

    Raises UsageError if the module is spread over ranks that pass different seeds.
    """
    check_seed(seed, groups_of(module.parameters(), shards))
    for item in parameters(body):
        if item.tied is None:
            draw(module.get_parameter(item.name), item.name, item.parameter, seed, shards)


def draw(target: Tensor, name: str, parameter: Parameter, seed: int, shards: TensorShards | None = None) -> None:
    """Fill `target` in place with values drawn in float32 on the CPU; a rank takes its shard of them.

    The result does not depend on the device of the target or on torch's defaults. Raises UsageError if a value exceeds
    the range of float16.
    """
    if target.device.type == "meta":
        return
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    shape = parameter.shape
    drawn = DRAWS[parameter.init.name](shape, parameter.init, parameter.inputs, generator)
    assign(target, shards.take(name, drawn) if shards else drawn)
    if target.dtype == torch.float16 and not torch.isfinite(drawn.to(torch.float16)).all():
        raise UsageError(f"{parameter.init} draws numbers for {name} that float16 cannot hold; build in another dtype")


def draw_anew(target: Tensor, parameter: Parameter) -> None:
    """Fill `target` in place with other initial values, by a seed from torch's generator."""
    draw(target, "", parameter, int(torch.randint(1 << 62, (), device="cpu")))


def _uniform(shape: tuple[int, ...], low: float, high: float, g: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=g, **PLAIN) * (high - low) + low


def _normal(shape: tuple[int, ...], std: float, g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g, **PLAIN) * std


def _fan_in_uniform(shape: tuple[int, ...], init: Init, fan_in: int, g: torch.Generator) -> Tensor:
    bound = 1 / math.sqrt(fan_in)
    return _uniform(shape, -bound, bound, g)


def _xavier_uniform(shape: tuple[int, ...], init: Init, fan_in: int, g: torch.Generator) -> Tensor:
    bound = math.sqrt(6 / (shape[0] + math.prod(shape[1:])))
    return _uniform(shape, -bound, bound, g)


def _trunc_normal(shape: tuple[int, ...], init: Init, fan_in: int, g: torch.Generator) -> Tensor:
    return nn.init.trunc_normal_(torch.empty(shape, **PLAIN), 0.0, init.values[0], generator=g)


def _linspace(shape: tuple[int, ...], init: Init, fan_in: int, g: torch.Generator) -> Tensor:
    return torch.linspace(init.values[0], init.values[1], shape[-1], **PLAIN).expand(shape).clone()


def _small(shape: tuple[int, ...], init: Init, fan_in: int, g: torch.Generator) -> Tensor:
    return _normal(shape, math.sqrt(2 / (5 * (init.values[0] or fan_in))), g)


def _wang(shape: tuple[int, ...], init: Init, fan_in: int, g: torch.Generator) -> Tensor:
    width, blocks = init.values
    return _normal(shape, 2 / (blocks * math.sqrt(width)), g)


def _powerlaw(shape: tuple[int, ...], init: Init, fan_in: int, g: torch.Generator) -> Tensor:
    ramp = torch.arange(shape[-1], **PLAIN) / max(shape[-1] - 1, 1)
    return (5 - 12 * ramp ** (0.3 + 1.3 * init.values[0])).expand(shape).clone()


def _ramp(shape: tuple[int, ...], init: Init, fan_in: int, g: torch.Generator) -> Tensor:
    return (torch.arange(shape[-1], **PLAIN) * init.values[0]).expand(shape).clone()


def _log_range(shape: tuple[int, ...], init: Init, fan_in: int, g: torch.Generator) -> Tensor:
    return torch.arange(1, shape[-1] + 1, **PLAIN).log().expand(shape).clone()


def _inverse_softplus(shape: tuple[int, ...], init: Init, fan_in: int, g: torch.Generator) -> Tensor:
    low, high, floor = init.values
    steps = _uniform(shape, math.log(low), math.log(high), g).exp().clamp(min=floor)
    return steps + torch.log(-torch.expm1(-steps))


def _log_of_uniform(shape: tuple[int, ...], init: Init, fan_in: int, g: torch.Generator) -> Tensor:
    low, high = init.values
    return _uniform(shape, low, high, g).clamp(min=torch.finfo(torch.float32).tiny).log()


def _ring(shape: tuple[int, ...], init: Init, fan_in: int, g: torch.Generator) -> Tensor:
    low, high = init.values
    return torch.expm1(-0.5 * _uniform(shape, low**2, high**2, g).log()).log()


def _orthogonal(shape: tuple[int, ...], init: Init, fan_in: int, g: torch.Generator) -> Tensor:
    flat = torch.empty(shape[0], math.prod(shape[1:]), **PLAIN)
    return nn.init.orthogonal_(flat, init.values[0], generator=g).reshape(shape)


def _falling(shape: tuple[int, ...], init: Init, fan_in: int, g: torch.Generator) -> Tensor:
    return (1 - (torch.arange(shape[-1], **PLAIN) / shape[-1]) ** init.values[0]).expand(shape).clone()


def _waves(shape: tuple[int, ...], init: Init, fan_in: int, g: torch.Generator) -> Tensor:
    first, last, power, height, width = init.values
    n = torch.arange(shape[-1], **PLAIN)
    z = 2 * (n % width) / max(width - 1, 1) - 1
    rise = (last - first) * (n / max(shape[-1] - 1, 1)) ** power
    return (first + rise + height * z * z.abs()).expand(shape).clone()


def _alibi(shape: tuple[int, ...], init: Init, fan_in: int, g: torch.Generator) -> Tensor:
    return alibi_slopes(shape[-1], torch.device("cpu")).expand(shape).clone()


def _grid_waves(shape: tuple[int, ...], init: Init, fan_in: int, g: torch.Generator) -> Tensor:
    """Return the waves of the last three axes, with zeros for features that are left over."""
    rows, columns, width = (1, 1, *shape)[-3:]
    pairs = width // 4
    rates = init.values[0] ** (-torch.arange(pairs, dtype=torch.float64, device="cpu") / max(pairs, 1))
    row, column = (torch.arange(n, device="cpu").unsqueeze(-1) * rates for n in (rows, columns))
    across, down = column.expand(rows, columns, pairs), row.unsqueeze(1).expand(rows, columns, pairs)
    waves = torch.cat([across.sin(), across.cos(), down.sin(), down.cos()], -1).to(PLAIN["dtype"])
    whole = torch.nn.functional.pad(waves, (0, width - 4 * pairs))
    return whole.reshape(shape[-3:]).expand(shape).clone()


DRAWS: dict[str, Draw] = {
    "zeros": lambda shape, init, fan_in, g: torch.zeros(shape, **PLAIN),
    "ones": lambda shape, init, fan_in, g: torch.ones(shape, **PLAIN),
    "constant": lambda shape, init, fan_in, g: torch.full(shape, init.values[0], **PLAIN),
    "normal": lambda shape, init, fan_in, g: _normal(shape, init.values[1], g) + init.values[0],
    "uniform": lambda shape, init, fan_in, g: _uniform(shape, init.values[0], init.values[1], g),
    "trunc_normal": _trunc_normal,
    "linspace": _linspace,
    "fan_in_uniform": _fan_in_uniform,
    "xavier_uniform": _xavier_uniform,
    "small": _small,
    "wang": _wang,
    "powerlaw": _powerlaw,
    "alibi": _alibi,
    "grid_waves": _grid_waves,
    "log_of_uniform": _log_of_uniform,
    "ring": _ring,
    "orthogonal": _orthogonal,
    "falling": _falling,
    "waves": _waves,
    "ramp": _ramp,
    "log_range": _log_range,
    "inverse_softplus": _inverse_softplus,
    LISTED: lambda shape, init, fan_in, g: torch.tensor(init.values, **PLAIN).expand(shape).clone(),
}
