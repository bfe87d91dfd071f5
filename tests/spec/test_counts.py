"""Parameter counts match the official tables exactly. The counts were measured on instances of the official classes."""

from __future__ import annotations

import pytest

from seqblocks import graph
from seqblocks.analysis import check

SEVEN = "m*3 s m s m s m*32 s m s m s m*3"
XLSTM = [  # spec, overrides, parameters
    ("xlstm_125m", {}, 163_806_144),
    ("xlstm_125m_7_1", {}, 163_690_928),
    ("xlstm_125m", {"dim": 1024, "model.blocks.pattern": "m*48"}, 409_290_112),
    ("xlstm_125m_7_1", {"dim": 1024, "model.blocks.pattern": SEVEN}, 408_436_048),
    ("xlstm_125m", {"dim": 1536, "model.blocks.pattern": "m*48"}, 840_427_392),
    ("xlstm_125m_7_1", {"dim": 1536, "model.blocks.pattern": SEVEN}, 839_736_144),
    ("xlstm_1_3b", {}, 1_422_559_616),
    ("xlstm_1_3b_7_1", {}, 1_420_065_104),
    ("xlstm_125m", {"vocabulary": 50257}, 163_733_952),
    ("xlstm_125m_7_1", {"vocabulary": 50257}, 163_618_736),
    ("xlstm_125m_7_1", {"dim": 384, "vocabulary": 50257}, 60_575_792),
    ("xlstm_7b", {}, 6_865_424_896),
    ("xlstm_7b", {"dim": 768, "depth": 12, "heads": 4}, 162_303_840),
    ("xlstm_7b", {"dim": 2048, "depth": 24, "heads": 4}, 1_420_839_104),
    ("xlstm_7b", {"dim": 2560, "depth": 32, "heads": 5}, 2_780_449_600),
    ("xlstm_7b", {"dim": 512, "depth": 6, "heads": 4, "vocabulary": 2048}, 21_399_088),
]


@pytest.mark.parametrize(("name", "overrides", "expected"), XLSTM)
def test_xlstm(name: str, overrides: dict[str, object], expected: int) -> None:
    assert graph.count(check.load_model(name, overrides).graph) == expected


MAMBA = [
    ("mamba_130m", {}, 129_135_360),
    ("mamba_370m", {}, 371_516_416),
    ("mamba_790m", {}, 793_204_224),
    ("mamba_1_4b", {}, 1_372_178_432),
    ("mamba_2_8b", {}, 2_768_345_600),
    ("vim_tiny", {}, 7_148_008),
    ("vim_small", {}, 25_796_584),
    ("vim_base", {}, 97_598_440),
    ("vim_tiny", {"model.patch_embed.stride": 8}, 7_250_344),
    ("vim_small", {"model.patch_embed.stride": 8}, 26_001_256),
]


@pytest.mark.parametrize(("name", "overrides", "expected"), MAMBA)
def test_mamba_and_vision_mamba(name: str, overrides: dict[str, object], expected: int) -> None:
    assert graph.count(check.load_model(name, overrides).graph) == expected


LAYERS = [  # of flash-linear-attention and mamba_ssm: file, step, width, parameters
    ("linear_attention", "linear_attention_mixer: {dim: 1024}", 1024, 4_260_480),
    ("linear_attention", "linear_attention_mixer: {dim: 64, heads: 4}", 64, 17_488),
    ("deltaproduct", "gated_deltaproduct_mixer: {dim: 2048}", 2048, 34_683_404),
    ("mamba2", "mamba2_mixer: {dim: 2048}", 2048, 25_847_232),
    # in_proj 2048 * (2 * 3072 + 2 * 1024 + 256 + 16), convolution 5 * 1280, 3 * 16 numbers, norm, out_proj 4096 * 2048
    ("mamba2", "mamba2_mixer: {dim: 2048, ssm: 1024}", 2048, 2048 * 8464 + 5 * 1280 + 48 + 1024 + 4096 * 2048),
]


@pytest.mark.parametrize(("file", "step", "width", "expected"), LAYERS)
def test_layers(file: str, step: str, width: int, expected: int) -> None:
    text = f"seqblocks: 1\nuse: [{file}]\nmodel: {{input: {{features: {width}}}, steps: [{{{step}}}]}}\n"
    assert graph.count(check.require_model(*check.load_text(text)).graph) == expected


def test_centaurus() -> None:
    """Closed forms: neck 3NM + N + N(H + G), pointwise 2NM + N + NM(H + G), full 3NM + 3N with N = H G."""

    def neck(h: int, g: int, n: int, m: int = 8) -> int:
        return 3 * n * m + n + n * (h + g)

    def pointwise(h: int, g: int, n: int, m: int = 8) -> int:
        return 2 * n * m + n + n * m * (h + g)

    def full(h: int, g: int, m: int = 8) -> int:
        return 3 * h * g * m + 3 * h * g

    encoder = full(1, 16) + 16 + 16 + full(16, 32, 4) + 32 + 16 * 32  # layer, norm, skip
    words = neck(32, 64, 64) + 64 + 32 * 64 + neck(64, 64, 64) + 64
    words += pointwise(64, 128, 32) + 128 + 64 * 128 + pointwise(128, 128, 32) + 128 + 129 * 128 + 129 * 35
    assert graph.count(check.load_model("centaurus_keywords").graph) == encoder + words
    speech = neck(32, 96, 64) + 96 + 32 * 96 + 2 * (pointwise(96, 96, 32) + 96) + 97 * 32
    speech += 65 * 32 + neck(32, 16, 64) + 16 + 32 * 16 + 33 * 16 + neck(16, 16, 32) + 16 + 17
    assert graph.count(check.load_model("centaurus_denoiser").graph) == encoder + speech


def test_tying_the_head_saves_one_embedding() -> None:
    made = check.load_model("xlstm_125m", {"model.unembed.tie": "embed"})
    assert graph.count(made.graph) == 125_172_672


@pytest.mark.parametrize(
    ("block", "dim", "expected"),
    [
        ("mlstm_block", 768, 3_605_768),
        ("mlstm_block", 2048, 25_344_008),
        ("slstm_block", 768, 3_548_160),
        ("slstm_block", 1024, 6_238_208),
        ("slstm_block", 2048, 24_928_256),
        ("xlstm_large_block", 4096, 201_666_576),
    ],
)
def test_blocks(block: str, dim: int, expected: int) -> None:
    text = f"seqblocks: 1\nuse: [xlstm]\nmodel: {{input: {{features: {dim}}}, steps: [{{{block}: {{dim: {dim}}}}}]}}"
    file, model = check.load_text(text)
    assert graph.count(check.require_model(file, model).graph) == expected
