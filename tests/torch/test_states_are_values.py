"""States are values: no later step, interrupt, hook, copy or other stream changes a state that something holds."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import seqblocks
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.streaming.stream import Stream
from tests.torch import planned
from tests.torch.planned import LINEAR, linear_attention

BATCH, TOKENS = 3, 9
MIXERS = [f"linear_attention: {{q: q, k: k, v: v, {options}}}" for options in LINEAR]
MLSTMS = [
    f"mlstm: {{q: q, k: k, v: v, i: i, f: f, heads: 2, {options}}}"
    for options in ("eps: 1e-5", "input_gate: sigmoid", "input_gate: sigmoid, normalize: false")
]


def language_model() -> SequenceModel:
    """Return a model with two mLSTM cells, an sLSTM, a selective scan, convolutions and attention."""
    second = "- mlstm_block: {dim: 16, heads: 2, name: second}\n    - slstm_block"
    return planned.build(planned.SPEC.replace("- slstm_block", second))


def mlstm(mixer: str) -> SequenceModel:
    lines = (f"linear: {{from: x, features: {2 if name in 'if' else 8}, as: {name}}}" for name in "qkvif")
    steps = "\n    - ".join(["identity: {as: x}", *lines, mixer])
    text = f"seqblocks: 1\nmodel:\n  input: {{features: 6}}\n  steps:\n    - {steps}\n"
    return seqblocks.build_text(text, seed=0).eval()


def inputs(model: SequenceModel) -> Tensor:
    """Return inputs [seq, batch, ...]."""
    generator = torch.Generator().manual_seed(1)
    if model.spec.input.kind == "tokens":
        return torch.randint(0, 11, (TOKENS, BATCH), generator=generator)
    return torch.randn(TOKENS, BATCH, 6, generator=generator, dtype=model.own_dtype())


def by_hand(model: SequenceModel) -> list[tuple[Any, Any]]:
    """Return the output and the state of each step, each in memory of its own."""
    state, made = model.init_state(BATCH), []
    with torch.inference_mode():
        for x in inputs(model):
            y, state = model.step(x, state)
            made.append((y, state))
    return made


def assert_same(found: Any, expected: Any) -> None:
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("mixer", [*MIXERS, *MLSTMS, ""])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_numbers_as_steps_of_the_model(mixer: str, dtype: torch.dtype) -> None:
    made = mlstm if "mlstm" in mixer else linear_attention
    model = (made(mixer) if mixer else language_model()).to(dtype)
    stream = model.stream(BATCH)
    for x, (y, state) in zip(inputs(model), by_hand(model), strict=True):
        assert_same(stream.step(x), y)
        assert_same(stream.state, state)


def test_resets_and_other_batches() -> None:
    model = language_model()
    stream, state, x = model.stream(BATCH), model.init_state(BATCH), inputs(model)
    resets = torch.tensor([False, True, False])
    with torch.inference_mode():
        for t in range(4):
            assert_same(stream.step(x[t], resets=resets), model.step(x[t], state, resets=resets)[0])
            _, state = model.step(x[t], state, resets=resets)
        for rows in ([0, 2], [1, 0, 0, 1, 1]):
            index = torch.tensor(rows)
            state = seqblocks.state.index_select(state, index)
            stream.select(index)
            for t in range(3):
                tokens = x[t][:1].expand(len(rows))
                y, state = model.step(tokens, state)
                assert_same(stream.step(tokens), y)
        assert_same(stream.state, state)


def test_a_state_that_was_set_never_changes() -> None:
    model = mlstm(MLSTMS[0])
    array = torch.zeros(BATCH, 2, 4, 4).numpy()
    given = {"mlstm": {**model.init_state(BATCH)["mlstm"], "C": torch.from_numpy(array)}}
    stream = model.stream(BATCH)
    stream.state, before = given, copy.deepcopy(given)
    del given
    for x in inputs(model):
        stream.step(x)
    assert torch.equal(torch.from_numpy(array), before["mlstm"]["C"])


def test_all_states_can_be_kept() -> None:
    model = language_model()
    stream, kept = model.stream(BATCH), []
    for x in inputs(model):
        stream.step(x)
        kept.append(stream.state)
    assert_same(kept, [state for _, state in by_hand(model)])


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))])
def test_copies_of_a_stream_continue_by_themselves(duplicate: Callable[[Stream], Stream]) -> None:
    class Named(Stream):
        pass

    globals()["Named"], Named.__qualname__ = Named, "Named"
    model = language_model()
    stream, expected = Named(model, model.init_state(BATCH)), by_hand(model)
    stream.name, x = "first", inputs(model)
    for t in range(4):
        stream.step(x[t])
    other = duplicate(stream)
    assert type(other) is Named
    assert other.name == "first"
    for t in range(4, TOKENS):
        for each in (stream, other):
            assert_same(each.step(x[t]), expected[t][0])
    assert_same([stream.state, other.state], [expected[-1][1]] * 2)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, MemoryError])
def test_an_interrupted_step_leaves_the_state_as_it_was(error: type[BaseException]) -> None:
    model = language_model()
    expected, x, calls = by_hand(model), inputs(model), 0

    def interrupt(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise error

    model.second.register_forward_pre_hook(interrupt)  # after the first mLSTM
    stream = model.stream(BATCH)
    for t in range(TOKENS):
        before = tree_map(torch.clone, stream.state)
        for _ in range(2):
            if calls % 2 == 0:
                with pytest.raises(error):
                    stream.step(x[t])
                assert_same(stream.state, before)
        torch.testing.assert_close(stream.step(x[t]), expected[t][0], rtol=1e-10, atol=1e-10)


def test_hooks_may_hold_states_and_step() -> None:
    """A hook runs in the middle of a step, when some parts of the state are already computed."""
    model = language_model()
    expected, x, held = by_hand(model), inputs(model), []
    stream, inner = model.stream(BATCH), []

    def hook(module: Any, given: Any, output: Any) -> None:
        state = stream.state
        held.append((state, given, tree_map(torch.clone, (state, given))))
        if not inner:
            inner.append(True)
            stream.step(x[0])
            stream.state = state
            inner.clear()

    model.second.register_forward_hook(hook)
    for t in range(TOKENS):
        torch.testing.assert_close(stream.step(x[t]), expected[t][0], rtol=1e-10, atol=1e-10)
    for state, given, before in held:
        assert_same((state, given), before)


def test_two_streams_of_a_model() -> None:
    model = language_model()
    expected, x = by_hand(model), inputs(model)
    one, other = model.stream(BATCH), model.stream(BATCH)
    for t in range(TOKENS):
        assert_same([one.step(x[t]), other.step(x[t])], [expected[t][0]] * 2)
    assert_same([one.state, other.state], [expected[-1][1]] * 2)
    other.state = one.state
    for each in (one, other):
        each.step(x[0])
    assert_same(one.state, other.state)


def test_generate_from_a_cached_prefix() -> None:
    model = language_model()
    prefix = inputs(model).t()
    with torch.no_grad():
        _, state = model(prefix, return_state=True)
        before = tree_map(torch.clone, state)
        prompt, current = prefix[:, :1], state
        wanted = [prompt[:, 0]]
        for _ in range(8):
            y, current = model.step(wanted[-1], current)
            wanted.append(y.argmax(-1))
    expected = torch.stack(wanted[1:], 1)
    for on_token in (None, lambda sequence, token: None):
        made = seqblocks.generate(model, prompt, 8, state=state, on_token=on_token)
        assert torch.equal(torch.stack(made), expected)
        assert_same(state, before)
    stopped = seqblocks.generate(model, prompt, 8, state=state, stop=int(expected[0, 2]))
    for row, tokens in zip(expected, stopped, strict=True):
        assert torch.equal(row[: len(tokens)], tokens)
    assert_same(state, before)


def test_a_replaced_step_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = language_model(), []
    step = model.step
    monkeypatch.setattr(model, "step", lambda *args, **options: calls.append(1) or step(*args, **options))
    assert_same(model.stream(BATCH).step(inputs(model)[0]), by_hand(model)[0][0])
    assert len(calls) == 1 + TOKENS
