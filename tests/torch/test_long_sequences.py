"""Long sequences without gradients run in chunks: same outputs and states, and only where nothing could observe it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.runtime import long_sequences
from seqblocks.runtime.call import Call
from seqblocks.state import States

MAMBA = "use: [mamba]\nmodel: {input: {features: 16}, steps: [{mamba_mixer: {dim: 16}}]}"
MLSTM = "use: [xlstm]\nmodel: {input: {features: 16}, steps: [{mlstm_layer: {dim: 16, heads: 2}}]}"
NETWORK = "model: {input: {features: 16}, steps: [{linear: {features: 64}}, gelu]}"
TOKENS = 3000
TOLERANCE = 1e-12  # Chunks of a kernel may begin at other tokens, so that sums are rounded differently.


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lower the limit, and return a list to which each run in chunks adds their size."""
    found: list[int] = []
    run = long_sequences.run

    def counted(x: Tensor, size: int, *others: object) -> tuple[object, States]:
        found.append(size)
        return run(x, size, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(long_sequences, "REUSED_BYTES", 1 << 20)
    monkeypatch.setattr(long_sequences, "run", counted)
    return found


def built(text: str) -> seqblocks.SequenceModel:
    return seqblocks.build_text(f"seqblocks: 1\n{text}", seed=0).double()


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def at_once(model: seqblocks.SequenceModel, x: Tensor, **options: object) -> object:
    """Run a model on all tokens at once, as it runs with gradients."""
    with torch.enable_grad():
        return model(x, **options)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("text", [MAMBA, MLSTM, NETWORK], ids=["mamba", "mlstm", "network"])
def test_chunks_equal_the_whole(text: str, batch: int, sizes: list[int]) -> None:
    model, x = built(text).eval(), drawn(batch, TOKENS, 16)
    with torch.no_grad():
        y, state = model(x, return_state=True)
        later, _ = model(x, state=state, return_state=True)
    assert len(sizes) == 2
    assert sizes[0] % long_sequences.CHUNK_MULTIPLE == 0
    assert sizes[0] < TOKENS
    expected, expected_state = at_once(model, x, return_state=True)  # type: ignore[misc]
    torch.testing.assert_close(y, expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=TOLERANCE)
    again, _ = at_once(model, x, state=expected_state, return_state=True)  # type: ignore[misc]
    torch.testing.assert_close(later, again, rtol=0, atol=TOLERANCE)


def test_resets_are_cut_like_the_tokens(sizes: list[int]) -> None:
    model, x = built(MAMBA), drawn(2, TOKENS, 16)
    resets = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.01
    with torch.no_grad():
        y = model(x, resets=resets)
    assert sizes
    torch.testing.assert_close(y, at_once(model, x, resets=resets), rtol=0, atol=TOLERANCE)


def test_a_block_whose_steps_are_left_out_runs_in_chunks(sizes: list[int]) -> None:
    optional = "blocks: {optional: {args: {on: false}, steps: [{gelu: {when: on}}]}}\n"
    model, x = built(optional + NETWORK.replace("gelu", "optional")).eval(), drawn(1, TOKENS, 16)
    with torch.no_grad():
        y = model(x)
    assert sizes
    torch.testing.assert_close(y, at_once(model, x), rtol=0, atol=TOLERANCE)


def hooked(model: seqblocks.SequenceModel) -> None:
    next(m for m in model.modules() if not list(m.children())).register_forward_hook(lambda *_: None)


def replaced(model: seqblocks.SequenceModel) -> None:
    block = model.mamba_mixer
    block.out_proj = torch.nn.Linear(32, 16).double()


@pytest.mark.parametrize("change", [hooked, replaced])
def test_changed_models_run_at_once(change: Callable[[seqblocks.SequenceModel], None], sizes: list[int]) -> None:
    model = built(MAMBA)
    change(model)
    with torch.no_grad():
        model(drawn(1, TOKENS, 16))
    assert not sizes


def test_dropout_runs_in_parts_in_evaluation_mode_only(sizes: list[int]) -> None:
    model, x = built(NETWORK.replace("gelu]", "gelu, dropout]")), drawn(1, TOKENS, 16)
    with torch.no_grad():
        model(x)
        assert not sizes
        model.eval()(x)
    assert sizes


@pytest.mark.parametrize(
    "steps",
    [
        "[{attention: {q: q, k: k, v: v, heads: 2}}]",  # its cache ends after a number of tokens
        "[{scan: {order: reverse, steps: [{linear: {features: 64}}]}}]",
        "[{linear: {features: 64}}, {pool: {mode: mean}}]",
    ],
    ids=["cache", "reverse", "pool"],
)
def test_other_steps_run_at_once(steps: str, sizes: list[int]) -> None:
    if "attention" in steps:
        steps = "[{linear: {features: 48, as: [q, k, v]}}, " + steps[1:]
    model = built("model: {input: {features: 16}, steps: " + steps + "}").eval()
    with torch.no_grad():
        model(drawn(1, TOKENS, 16))
    assert not sizes


def test_only_tensors_above_32_mb_are_cut() -> None:
    found = long_sequences.Chunks(widest=3072, states=29_184, draws=False)  # the mixer of mamba-130m
    with torch.no_grad():
        tokens = {length: found.size(torch.empty(1, length, 768), Call(training=False)) for length in (64, 2048, 8192)}
    assert tokens == {64: 0, 2048: 0, 8192: 2048}
