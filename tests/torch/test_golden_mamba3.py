"""The state space of the bundled Mamba-3 block against the official step function's float64 run: outputs and gradients.

It is a linear attention over the previous tokens plus one product for the current token. A token is therefore written
with one weight at its own step, and with the remaining weight one step later.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import seqblocks
from seqblocks.checkpoint import load_official
from tests.torch import golden

NAMES = {"C": "Q", "B": "K", "x": "V", "step_size": "DT", "decay": "ADT", "trap": "Trap", "angle": "Angles", "z": "Z"}
HEADS_FIRST = ("DT", "ADT", "Trap")
WEIGHTS = {"D": "D", "C_bias": "Q_bias", "B_bias": "K_bias"}


def read() -> dict[str, Tensor]:
    with np.load(golden.FOLDER / "mamba" / "mamba3_siso_L9.npz") as file:
        return {name: torch.from_numpy(file[name]).double() for name in file.files if name != "cfg"}


def sequence(x: Tensor, name: str) -> Tensor:
    """Return [batch, seq, features] from the official layout."""
    return x.transpose(1, 2) if name in HEADS_FIRST else x.flatten(2)


def built(data: dict[str, Tensor], widths: dict[str, int]) -> Any:
    parts = ", ".join(f"{name}: {width}" for name, width in widths.items())
    wires = ", ".join(f"{name}: {name}" for name in ("B", "C", "step_size", "decay", "trap", "angle"))
    model = seqblocks.build_text(f"""
seqblocks: 1
use: [mamba3]
model:
  input: {{features: {sum(widths.values())}}}
  steps:
    - identity: {{as: {{{parts}}}}}
    - softplus: {{from: rate}}
    - scale: {{by: -1, as: decay}}
    - mamba3_memory: {{from: x, heads: 4, state: 8, {wires}, name: it}}
    - gate: {{by: z}}
checkpoint: {{it: ""}}
""", dtype=torch.float64)
    weights = {name: data[f"in/{official}"] for name, official in WEIGHTS.items()}
    load_official(model, {name: x if name == "D" else x.unsqueeze(1) for name, x in weights.items()})
    return model.eval()


def run() -> tuple[dict[str, Tensor], Any, dict[str, Tensor], Tensor]:
    """Return the case, the model, its leaves in the official layout, and the model's input built from them."""
    data = read()
    leaves = {name: data[f"in/{official}"].requires_grad_() for name, official in NAMES.items()}
    inputs = {name: sequence(x, NAMES[name]) for name, x in leaves.items()}
    inputs["rate"] = torch.log(torch.expm1(-inputs.pop("decay")))  # the analysis knows that its softplus is positive
    model = built(data, {name: x.shape[-1] for name, x in inputs.items()})
    return data, model, leaves, torch.cat([*inputs.values()], -1)


def test_the_official_state_space() -> None:
    data, model, leaves, x = run()
    y = model(x).unflatten(-1, (4, 4))
    torch.testing.assert_close(y, data["out/y"], rtol=1e-9, atol=1e-10)
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad((y * data["cot/y"]).sum(), [*leaves.values(), *parameters.values()])
    named = dict(zip([*(NAMES[name] for name in leaves), *parameters], grads, strict=True))
    official = {"it.skip.weight": "D", "it.C_bias.weight": "Q_bias", "it.B_bias.weight": "K_bias"}
    for name, gradient in named.items():
        expected = data[f"grad/{official.get(name, name)}"]
        torch.testing.assert_close(gradient.reshape(expected.shape), expected, rtol=1e-9, atol=1e-10, msg=name)


def test_it_streams() -> None:
    data, model, _, x = run()
    state, outputs = model.init_state(2), []
    with torch.no_grad():
        for t in range(x.shape[1]):
            y, state = model.step(x[:, t], state)
            outputs.append(y.unflatten(-1, (4, 4)))
    torch.testing.assert_close(torch.stack(outputs, 1), data["out/y"], rtol=1e-9, atol=1e-10)
