"""The state law for every bundled streaming spec at a small size: whole = chunks = steps, value and gradient.

In float64, to 1e-9 of the largest value: rounding is about length * 2^-52 on intermediate values of order 1e2.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import seqblocks
from seqblocks import graph, testing
from seqblocks.analysis import check
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.state import map_state
from seqblocks.testing import check_law, check_lookahead
from tests.sampled import sampled
from tests.torch import test_context_models

SMALL = {
    "xlstm_125m_7_1": {"dim": 16, "vocabulary": 11, "model.blocks.pattern": "m s m"},
    "xlstm_7b": {"dim": 16, "heads": 2, "depth": 2, "vocabulary": 11},
    "vil_small_block": {"dim": 8},
    "mamba_130m": {"dim": 16, "depth": 2, "vocabulary": 11},
    "mamba2_130m": {"dim": 8, "depth": 2, "vocabulary": 11, "state": 4, "head": 4},
    "mamba3_130m": {"dim": 8, "depth": 2, "vocabulary": 11, "state": 4, "head": 4},
    "gla_1_3b": {"dim": 16, "depth": 2, "vocabulary": 11, "heads": 2},
    "retnet_1_3b": {"dim": 16, "depth": 2, "vocabulary": 11, "heads": 2},
    "deltanet_1_3b": {"dim": 16, "depth": 2, "vocabulary": 11, "heads": 2},
    "gated_deltanet_1_3b": {"dim": 16, "depth": 2, "vocabulary": 11, "heads": 2, "head": 4},
    "kda_1_3b": {"dim": 16, "depth": 2, "vocabulary": 11, "heads": 2, "head": 4},
    "hgrn2_1_3b": {"dim": 16, "depth": 2, "vocabulary": 11, "key": 4},
    "rwkv7_0_4b": {"dim": 16, "depth": 3, "vocabulary": 11, "head": 4},
    "rwkv6_1_4b": {"dim": 16, "depth": 2, "vocabulary": 11, "heads": 2},
    "recurrentgemma_2b": {"dim": 24, "hidden": 16, "heads": 2, "layers": "r a", "vocabulary": 11, "window": 5},
    "mingru_small": {"dim": 8, "depth": 2, "vocabulary": 11},
    "minlstm_small": {"dim": 8, "depth": 2, "vocabulary": 11},
    "qwen3_next_small": {"dim": 16, "rounds": 1, "vocabulary": 11, "head": 8, "experts": 3},
    "kimi_linear_small": {"dim": 16, "rounds": 1, "vocabulary": 11, "head": 4, "rank": 8},
    "falcon_h1_0_5b": {
        "dim": 16, "depth": 2, "heads": 2, "kv_heads": 1, "head": 4, "ssm": 24, "ssm_head": 4, "state": 4, "hidden": 12,
        "vocabulary": 11,
    },
    "lfm2_350m": {
        "dim": 16, "layers": "c a", "heads": 4, "kv_heads": 2, "head": 4, "hidden": 12, "vocabulary": 11,
    },
    "rwkv4_169m": {"dim": 8, "depth": 2, "hidden": 12, "vocabulary": 11},
    "ttt_small": {
        "dim": 12, "heads": 2, "layers_wanted": 2, "hidden": 10, "vocabulary": 11, "batch": 4,
    },
    "nemotron_h_4b": {
        "dim": 16, "layers": "m f a", "heads": 2, "kv_heads": 1, "head": 4, "ssm": 24, "ssm_head": 4, "groups": 2,
        "state": 4, "hidden": 12, "vocabulary": 11,
    },
    "gemma2_2b": {
        "dim": 16, "heads": 2, "kv_heads": 1, "head": 4, "hidden": 12, "rounds": 1, "window": 5, "vocabulary": 11,
    },
    "deepseek_v2_lite": {
        "dim": 16, "heads": 2, "head": 4, "turned": 4, "rank": 8, "hidden": 12, "experts": 4, "top": 2, "each": 8,
        "layers": "d m", "vocabulary": 11, "context": 300,
    },
    "samba_small": {"dim": 16, "rounds": 1, "vocabulary": 11, "window": 5},
    "zamba2_small": {"dim": 16, "rounds": 1, "vocabulary": 11, "head": 4, "state": 4},
    "xlstm_deltanet_small": {"dim": 16, "layers": "m d", "vocabulary": 11},
    "memoroid_agent": {"dim": 8, "observation": 5},
    "hybrid_small": {"dim": 16, "depth": 1, "vocabulary": 11, "window": 5},
    "centaurus_mlstm": {"dim": 16, "depth": 1},
    "centaurus_denoiser": {"model.in1.dim": 2, "model.in2.dim": 3, "model.in3.dim": 4, "model.core.times": 1},
    "transformer_small": {"dim": 16, "depth": 2, "vocabulary": 11, "context": 300},
    "jamba_small": {"dim": 16, "depth": 1, "hidden": 12, "vocabulary": 11},
    "zamba_small": {"dim": 16, "rounds": 2, "vocabulary": 11, "window": 5},
    "mod_small": {"dim": 16, "rounds": 1, "vocabulary": 11, "context": 300},
    "looped_small": {"dim": 16, "loops": 3, "vocabulary": 11, "context": 300},
    "transformer_125m": {"dim": 24, "depth": 2, "vocabulary": 11, "context": 300},
    "unet_gpt": {"dim": 16, "depth": 4, "heads": 2, "vocabulary": 11, "window": 5},
    "resformer_82m": {"dim": 16, "depth": 3, "heads": 2, "hidden": 12, "vocabulary": 11, "context": 300},
}

MADE_OF_OTHERS = (  # other models have their mixers too
    "minlstm_small", "samba_small", "zamba_small", "zamba2_small", "xlstm_deltanet_small", "kimi_linear_small",
    "qwen3_next_small", "jamba_small", "hybrid_small", "xlstm_125m_7_1", "centaurus_mlstm", "transformer_125m",
    "looped_small", "resformer_82m",
)  # fmt: skip
ALONE = [name for name in SMALL if name not in MADE_OF_OTHERS]
OTHERS = [pytest.param(name, marks=pytest.mark.long if at % 2 else pytest.mark.slow)
          for at, name in enumerate(MADE_OF_OTHERS)]


@functools.cache
def built(name: str, **change: int) -> SequenceModel:
    return seqblocks.build(name, set={**SMALL[name], **change}, dtype=torch.float64).eval()


def model(name: str, seed: int, **change: int) -> SequenceModel:
    """Return the model of a name, which is built once, with the parameters of a seed."""
    made = built(name, **change)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return made


def lengths(most: int, least: int = 1) -> Any:
    return given(
        seq=st.integers(least, most),
        cuts=st.lists(st.integers(1, most - 1), max_size=3),
        resets=st.lists(st.tuples(st.integers(0, 1), st.integers(0, most - 1)), max_size=3),
        seed=st.integers(0, 3),
    )


def law_holds(
    name: str, seq: int, cuts: list[int], resets: list[tuple[int, int]], seed: int, **change: int
) -> None:
    made = model(name, seed, **change)
    if made.frame_size > 1:  # about as many tokens, and no resets
        seq, cuts, resets = 1 + seq // made.frame_size, [1 + c // made.frame_size for c in cuts], []
    cuts = [cut for cut in cuts if cut < seq]
    resets = [(row, at % seq) for row, at in resets]
    check_law(made, seq=seq, cuts=cuts, resets=resets, seed=seed, tolerance=1e-9)


@pytest.mark.parametrize("name", [*sampled(ALONE, every=4, ci=1), *OTHERS])
@settings(max_examples=1)
@lengths(40)
@example(seq=18, cuts=[4, 11], resets=[(0, 7), (1, 11), (1, 15)], seed=1)  # resets in a chunk and at its start
def test_whole_is_chunks_is_steps(
    name: str, seq: int, cuts: list[int], resets: list[tuple[int, int]], seed: int
) -> None:
    law_holds(name, seq, cuts, resets, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(ALONE, ci=4))
def test_at_length(name: str) -> None:
    """The sequence is longer than two chunks of the kernels that run on a CPU; half of the models have resets.

    One layer of a kind is enough: that layers follow one another is tested above.
    """
    resets = [(0, 40), (1, 67), (1, 133)] if ALONE.index(name) % 8 < 4 else []
    shallow = {key: 1 for key in ("depth", "layers_wanted") if SMALL[name].get(key) == 2}
    law_holds(name, 140, [67, 131], resets, seed=1, **shallow)


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=8)
@lengths(300)
def test_at_many_lengths(name: str, seq: int, cuts: list[int], resets: list[tuple[int, int]], seed: int) -> None:
    law_holds(name, seq, cuts, resets, seed)


@pytest.mark.slow
def test_every_streaming_spec_is_here() -> None:
    """Sizes of one architecture count as one."""
    from seqblocks.language.spec_files import bundled

    families = {
        "xlstm_125m_7_1": ("mlstm_small", "xlstm_125m", "xlstm_125m_7_1", "xlstm_1_3b", "xlstm_1_3b_7_1"),
        "xlstm_7b": ("xlstm_7b",),
        "mamba_130m": ("mamba_small", "mamba_130m", "mamba_370m", "mamba_790m", "mamba_1_4b", "mamba_2_8b"),
        "mamba2_130m": ("mamba2_130m", "mamba2_370m", "mamba2_780m", "mamba2_1_3b", "mamba2_2_7b"),
        "vil_small_block": ("vil_small_block",),
    }
    tested = {name for name in SMALL if name not in families} | {n for names in families.values() for n in names}
    tested |= set(test_context_models.SMALL)
    streaming = set()
    for name, path in bundled().items():
        if path.parent.name != "models":
            continue
        made = check.load_model(name)
        if graph.stream_obstacle(made) is None:
            streaming.add(name)
    assert streaming == tested


def test_truncated_backpropagation_stops_where_it_is_cut() -> None:
    from seqblocks import state as states

    made = model("xlstm_125m_7_1", 0)
    tokens = torch.randint(11, (2, 12))
    _, state = made(tokens[:, :6], return_state=True)
    assert any(t.requires_grad for t in torch.utils._pytree.tree_leaves(state))
    cut = states.detach(state)
    (made(tokens[:, 6:], state=cut)).sum().backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in made.parameters())
    assert not any(t.requires_grad for t in torch.utils._pytree.tree_leaves(cut))


def test_an_op_that_looks_further_ahead_than_it_says_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame of four tokens, and an op that reads one token more than it declares."""
    from seqblocks import op

    class Peek(op.Op):
        """Compute x[t] + x[t + far]."""

        far: int = op.argument(1, "how far it looks")
        said: int = op.argument(1, "how far it says it looks")

        def looks_ahead(self, x: Any) -> int:
            return self.said * x.rate

        def forward(self, p: Any, call: Any, x: Any) -> Any:
            return x + torch.cat([x[:, self.far :], torch.zeros_like(x[:, : self.far])], 1)

    Peek.__module__ = "seqblocks.ops.peek"  # not a plug-in: its source is not searched
    monkeypatch.setattr(op, "PRIMITIVES", {**op.PRIMITIVES})
    op.primitive("peek")(Peek)
    head = "seqblocks: 1\nmodel: {input: {features: 3}, steps: ["
    frame = "{downsample: {factor: 4}}, %s, {upsample: {factor: 4}}"
    for steps in ("{peek: {far: 2, said: 2}}", frame % "{peek: {far: 2, said: 2}}", frame % "silu"):
        check_lookahead(seqblocks.build_text(f"{head}{steps}]}}", dtype=torch.float64))
    for steps in ("{peek: {far: 2, said: 1}}", "{peek: {said: 0}}", frame % "{peek: {far: 2, said: 1}}"):
        with pytest.raises(AssertionError, match=r"lookahead .*: outputs before token .* of the input: differs by"):
            check_lookahead(seqblocks.build_text(f"{head}{steps}]}}", dtype=torch.float64))
    monkeypatch.setattr("seqblocks.ops.rate.Downsample.looks_ahead", lambda self, x: 0)
    with pytest.raises(AssertionError, match="lookahead 0: outputs before token"):
        check_lookahead(seqblocks.build_text(f"{head}{frame % 'silu'}]}}", dtype=torch.float64))


def test_the_law_of_a_model_with_dropout_is_that_of_its_evaluation() -> None:
    text = "seqblocks: 1\nmodel: {input: {features: 3}, steps: [{dropout: {p: 0.5}}, {linear: 3}]}"
    model = seqblocks.build_text(text, dtype=torch.float64)
    with pytest.raises(seqblocks.UsageError, match=r"call model\.eval\(\) first"):
        check_law(model)
    check_law(model.eval())


def test_an_angle_of_a_whole_turn_is_the_same_state_as_0() -> None:
    """A sum that is rounded differently may end up at either end of the range."""
    declared = seqblocks.build_text("seqblocks: 1\nmodel: {input: {features: 2}, steps: [phase]}\n").declared_state
    near = {"phase": {"sum": torch.tensor([[2 * math.pi - 1e-12, 1.0]], dtype=torch.float64)}}
    start = {"phase": {"sum": torch.tensor([[0.0, 1.0]], dtype=torch.float64)}}
    testing._assert_tree_close("state", near, start, 1e-9, declared)
    with pytest.raises(AssertionError, match="sum: differs by 1e-05"):
        testing._assert_tree_close("state", near, map_state(lambda x: x + 1e-5, start), 1e-9, declared)


def test_a_call_without_tokens_keeps_a_phase_that_was_rounded_to_a_whole_turn() -> None:
    model = seqblocks.build_text("seqblocks: 1\nmodel: {input: {features: 2}, steps: [phase]}\n")
    state = map_state(lambda x: torch.full_like(x, 2 * math.pi), model.init_state(1))  # in float32, above 2 pi
    _, after = model(torch.zeros(1, 0, 2), state=state, return_state=True)
    assert torch.equal(after["phase"]["sum"], state["phase"]["sum"])
