"""States that reuse memory (seqblocks/runtime/reused_memory.py): the same numbers, and no change of anything in use."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import seqblocks
from seqblocks.runtime import reused_memory, source
from seqblocks.runtime.model import SequenceModel
from seqblocks.runtime.reused_memory import Spares
from seqblocks.runtime.stream import Stream
from tests.torch import planned
from tests.torch.planned import LINEAR, linear_attention

BATCH, TOKENS = 3, 9
MIXERS = [f"linear_attention: {{q: q, k: k, v: v, {options}}}" for options in LINEAR]
MLSTMS = [
    f"mlstm: {{q: q, k: k, v: v, i: i, f: f, heads: 2, {options}}}"
    for options in ("eps: 1e-5", "input_gate: sigmoid", "input_gate: sigmoid, normalize: false")
]


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "LARGE", 1)


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
    return torch.randn(TOKENS, BATCH, 6, generator=generator, dtype=model._own_dtype())


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


def addresses(stream: Stream) -> list[int]:
    """Return the addresses of the parts of the state that are written to spares."""
    states = torch.utils._pytree.tree_flatten_with_path(stream.state)[0]
    return [x.data_ptr() for path, x in states if path[-1].key in ("C", "S", "h")]


@pytest.mark.parametrize("mixer", [*MIXERS, *MLSTMS, ""])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_numbers_as_in_new_memory(mixer: str, dtype: torch.dtype) -> None:
    made = mlstm if "mlstm" in mixer else linear_attention
    model = (made(mixer) if mixer else language_model()).to(dtype)
    stream, used = model.stream(BATCH), []
    for x, (y, state) in zip(inputs(model), by_hand(model), strict=True):
        assert_same(stream.step(x), y)
        assert_same(stream.state, state)
        used.append(addresses(stream))
    for part in zip(*used, strict=True):
        assert len({*part}) == 2  # those of the last step and of the one before
        assert [*part[::2]] == [part[0]] * len(part[::2])
    assert used[0]


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
            assert not stream._spares._held
            for t in range(3):
                tokens = x[t][:1].expand(len(rows))
                y, state = model.step(tokens, state)
                assert_same(stream.step(tokens), y)
        assert_same(stream.state, state)


def _capsule(x: Tensor) -> Callable[[], Tensor]:
    capsule = torch.utils.dlpack.to_dlpack(x)
    return lambda: torch.utils.dlpack.from_dlpack(capsule)


def _storage(x: Tensor) -> Callable[[], Tensor]:
    storage, shape, dtype = x.untyped_storage(), x.shape, x.dtype
    return lambda: torch.empty(0, dtype=dtype).set_(storage, 0, shape)


def _memory(x: Tensor) -> Callable[[], Tensor]:
    memory, shape, dtype = memoryview(x.numpy()), x.shape, x.dtype
    return lambda: torch.frombuffer(memory, dtype=dtype).view(shape).clone()


def _shared(x: Tensor) -> Callable[[], Tensor]:
    """Move the tensor to shared memory, as for another process, and map it a second time, as that process does."""
    shape, dtype = x.shape, x.dtype
    mapped = torch.UntypedStorage._new_shared_fd_cpu(*x.untyped_storage()._share_fd_cpu_())
    return lambda: torch.empty(0, dtype=dtype).set_(mapped, 0, shape)


def _unpickled(x: Tensor) -> Callable[[], Tensor]:
    pickled = pickle.dumps(x)
    return lambda: pickle.loads(pickled)


def _held(hold: Callable[[Tensor], Any], read: Callable[[Any], Tensor] = lambda held: held) -> Any:
    def make(x: Tensor) -> Callable[[], Tensor]:
        held = hold(x)
        return lambda: read(held)

    return make


HOLDERS = {
    "variable": _held(lambda x: x), "list": _held(lambda x: [x], lambda held: held[0]),
    "view": _held(lambda x: x[1:]), "strides": _held(lambda x: x.as_strided((4,), (1,))),
    "bytes": _held(lambda x: x.view(torch.uint8)), "detach": _held(Tensor.detach), "data": _held(lambda x: x.data),
    "copy": _held(copy.copy), "parameter": _held(lambda x: torch.nn.Parameter(x, requires_grad=False)),
    "set": _held(lambda x: torch.empty(0, dtype=x.dtype).set_(x)), "deepcopy": _held(copy.deepcopy),
    "numpy": _held(Tensor.numpy, torch.from_numpy), "numpy of a view": _held(lambda x: x[1:].numpy(), torch.from_numpy),
    "memoryview": _memory, "capsule": _capsule, "dlpack": _held(torch.from_dlpack), "storage": _storage,
    "pickle": _unpickled, "process": _shared,
}  # fmt: skip


@pytest.mark.parametrize("name", HOLDERS)
@pytest.mark.filterwarnings("ignore:.*buffer is not writable")
def test_what_is_held_never_changes(name: str) -> None:
    model = mlstm(MLSTMS[0])
    stream, held = model.stream(BATCH), []
    for x in inputs(model):
        stream.step(x)
        C = stream.state["mlstm"]["C"]
        held.append([HOLDERS[name](each) for each in (C, C.clone())])
        del C
    stream.step(x)
    assert all(torch.equal(read(), expected()) for read, expected in held)


def test_tensors_are_new() -> None:
    """Their memory is used again, but not what Python holds about them."""
    model = mlstm(MLSTMS[0])
    stream, seen = model.stream(BATCH), []
    for x in inputs(model):
        stream.step(x)
        C = stream.state["mlstm"]["C"]
        assert not hasattr(C, "mark")
        C.mark = "mine"
        seen.append(weakref.ref(C))
        del C
    assert [each() is None for each in seen] == [True] * (TOKENS - 1) + [False]


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
    assert stream._spares._held
    assert not other._spares._held
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


def test_threads_never_get_the_same_memory() -> None:
    pool, like, wrong = Spares(), torch.empty(64), []

    def work(number: int) -> None:
        held = []
        with torch.inference_mode():
            for n in range(300):
                memory = pool.take(0, like)
                assert memory is not None
                memory.fill_(number)
                held = [*held[-(n % 3) :], memory]
                wrong.extend(x for x in held if not bool((x == number).all()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


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


def test_only_large_states_use_spares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "LARGE", 2 * 4 * 4 * 4 * 5)  # bytes of C for 5 sequences
    model = mlstm(MLSTMS[0])
    for batch, places in ((4, 0), (5, 1)):
        stream = model.stream(batch)
        stream.step(torch.zeros(batch, 6))
        assert len(stream._spares._held) == places


def test_a_plugin_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions without `out` allocate."""
    model = mlstm(MLSTMS[0])
    prepare = type(model.mlstm.op).prepare_step

    def plain(self: Any, p: Any) -> Any:
        run = prepare(self, p)
        return lambda *given: run(*given)

    monkeypatch.setattr(type(model.mlstm.op), "prepare_step", plain)
    stream = model.stream(BATCH)
    for x, (y, _) in zip(inputs(model), by_hand(model), strict=True):
        assert_same(stream.step(x), y)
    assert not stream._spares._held


def test_without_counts_nothing_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both functions are private to torch: without them, or if they do not count a holder, states are allocated."""
    assert reused_memory.sees_holders()
    detect = reused_memory.sees_holders.__wrapped__
    with monkeypatch.context() as context:
        context.setattr(reused_memory, "count_uses", None)
        assert not detect()
    with monkeypatch.context() as context:
        context.setattr(reused_memory, "holders", lambda held: reused_memory._alone())
        assert not detect()
    monkeypatch.setattr(reused_memory, "sees_holders", lambda: False)
    model = mlstm(MLSTMS[0])
    stream = model.stream(BATCH)
    for x, (y, state) in zip(inputs(model), by_hand(model), strict=True):
        assert_same((stream.step(x), stream.state), (y, state))
    assert not stream._spares._held
