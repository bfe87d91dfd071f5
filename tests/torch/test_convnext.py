"""The bundled ConvNeXt against the same network made of torch's modules, in both layouts of its releases."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import seqblocks
from seqblocks.checkpoint import load_official
from tests.draws import draw

DIM, DEPTHS, CLASSES = 4, (1, 1, 2, 1), 5
SIZES = {"dim": DIM, "depth": 1, "middle": 2, "classes": CLASSES}


class Maps(nn.Module):
    """A layer norm over the features of [batch, features, rows, columns]."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.pwconv2(nn.functional.gelu(self.pwconv1(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [DIM * 2**stage for stage in range(4)]
        self.downsample_layers = nn.ModuleList([nn.Sequential(nn.Conv2d(3, DIM, 4, stride=4), Maps(DIM))])
        for dim, wider in pairwise(widths):
            self.downsample_layers.append(nn.Sequential(Maps(dim), nn.Conv2d(dim, wider, 2, stride=2)))
        blocks = zip(widths, DEPTHS, strict=True)
        self.stages = nn.ModuleList(nn.Sequential(*(Block(dim) for _ in range(depth))) for dim, depth in blocks)
        self.norm, self.head = nn.LayerNorm(widths[-1], eps=1e-6), nn.Linear(widths[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for down, stage in zip(self.downsample_layers, self.stages, strict=True):
            x = stage(down(x))
        return self.head(self.norm(x.mean((2, 3))))

    def official(self) -> dict[str, Tensor]:
        """Return the weights under the names of the paper's code, where a norm over maps is one module."""
        return {name.replace(".norm.", ".") if "downsample" in name else name: p for name, p in self.named_parameters()}

    def of_torchvision(self) -> dict[str, Tensor]:
        """Return them under torchvision's names: stages and what is between them are one list."""
        parts = {"dwconv": "block.0", "norm": "block.2", "pwconv1": "block.3", "pwconv2": "block.5"}
        found = {}
        for name, value in self.official().items():
            group, *rest = name.split(".")
            if group == "downsample_layers":
                name = ".".join(["features", str(2 * int(rest[0])), *rest[1:]])
            elif group == "stages":
                place = f"features.{2 * int(rest[0]) + 1}.{rest[1]}"
                is_scale = rest[2] == "gamma"
                name = f"{place}.layer_scale" if is_scale else f"{place}.{parts[rest[2]]}.{rest[3]}"
                value = value[:, None, None] if is_scale else value
            else:
                name = f"classifier.{ {'norm': 0, 'head': 2}[group]}.{rest[0]}"
            found[name] = value
        return found


@pytest.mark.parametrize("layout", ["official", "of_torchvision"])
@pytest.mark.parametrize("size", [(64, 64), (96, 32)])
def test_outputs_and_gradients(layout: str, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    theirs = ConvNeXt().double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    ours = seqblocks.build("convnext_tiny", set={**SIZES, "input.image.size": [64, 64]}, dtype=torch.float64)
    load_official(ours, {name: value.detach() for name, value in getattr(theirs, layout)().items()})
    x = draw(2, 3, *size).requires_grad_()
    found, expected = ours(x), theirs(x)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    weights = draw(*expected.shape)
    gradients = torch.autograd.grad((found * weights).sum(), [x, ours.get_parameter("stem.weight")])
    others = torch.autograd.grad((expected * weights).sum(), [x, theirs.get_parameter("downsample_layers.0.0.weight")])
    for ours_, theirs_ in zip(gradients, others, strict=True):
        torch.testing.assert_close(ours_, theirs_, rtol=1e-9, atol=1e-9 * float(theirs_.abs().max()))


def test_rates_of_drop_path_grow_over_all_blocks() -> None:
    model = seqblocks.build("convnext_tiny", set={**SIZES, "depth": 3, "middle": 9, "drop_path": 0.1}, device="meta")
    rates = [module._drop_path for name, module in model.named_modules() if name.endswith(".block")]
    assert rates == pytest.approx(torch.linspace(0, 0.1, 18, dtype=torch.float64).tolist(), abs=1e-12)
