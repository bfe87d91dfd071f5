"""`seqblocks.generate` against the whole forward pass, and its errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import seqblocks
from seqblocks.errors import RunError, UsageError
from seqblocks.streaming import cuda_graph
from seqblocks.streaming import generate as generation
from seqblocks.streaming.advance import CAPTURE_MIN_TOKENS, UNCHECKED
from seqblocks.streaming.frames import PROMPT_MAX_ROWS
from seqblocks.token_function import TokenFunction

SMALL = {
    "mlstm_small": {"dim": 16, "depth": 2, "vocabulary": 13},
    "mamba_small": {"dim": 16, "depth": 2, "vocabulary": 13},
    "hybrid_small": {"dim": 16, "vocabulary": 13, "window": 5},
    "transformer_small": {"dim": 16, "depth": 2, "vocabulary": 13, "context": 300},
}


def build(name: str) -> seqblocks.SequenceModel:
    model = seqblocks.build(name, set=SMALL[name], dtype=torch.float64, seed=1).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def prompt(rows: int = 3, tokens: int = 7) -> Tensor:
    return torch.randint(0, 13, (rows, tokens), generator=torch.Generator().manual_seed(6))


def greedy(model: seqblocks.SequenceModel, row: Tensor, count: int) -> list[int]:
    """Return the argmax of the whole forward pass, repeatedly."""
    tokens = row.tolist()
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[row.numel() :]


@pytest.mark.parametrize("name", SMALL)
def test_greedy_is_the_argmax_of_the_whole_sequence(name: str) -> None:
    model, x = build(name), prompt()
    found = seqblocks.generate(model, x, 9)
    assert [row.tolist() for row in found] == [greedy(model, row, 9) for row in x]
    assert all(row.dtype == torch.long for row in found)


@pytest.mark.parametrize("name", SMALL)
def test_prompts_of_several_lengths_equal_single_prompts(name: str) -> None:
    model, x = build(name), prompt()
    rows = [x[0], x[1, :3], x[2, :1]]
    found = seqblocks.generate(model, rows, 6)
    assert [row.tolist() for row in found] == [greedy(model, row, 6) for row in rows]
    assert torch.equal(seqblocks.generate(model, x[1, :3].tolist(), 6)[0], found[1])


def test_long_prompts_are_read_in_chunks() -> None:
    model, x = build("mamba_small"), prompt(2, 1100)
    assert [row.tolist() for row in seqblocks.generate(model, x, 3)] == [greedy(model, row, 3) for row in x]


@pytest.mark.parametrize("name", SMALL)
def test_a_head_reads_the_last_token_of_a_prompt_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = build(name), []
    head = type(model.unembed.op)  # type: ignore[union-attr]
    run = head.forward
    monkeypatch.setattr(head, "forward", lambda op, p, call, x: seen.append(x.shape[1]) or run(op, p, call, x))
    x = prompt(tokens=PROMPT_MAX_ROWS // 3 + 1)
    found = seqblocks.generate(model, x, 1)
    assert seen == [1]
    assert [tokens.tolist() for tokens in found] == [greedy(model, row, 1) for row in x]


FEW_AT_ONCE = {
    **{name: SMALL[name] for name in ("mlstm_small", "mamba_small", "hybrid_small")},
    "minlstm_small": {"dim": 16, "vocabulary": 13}, "samba_small": {"dim": 32, "vocabulary": 13},
    "xlstm_deltanet_small": {"dim": 32, "vocabulary": 13},
}  # fmt: skip


@pytest.mark.parametrize("name", FEW_AT_ONCE)
@torch.no_grad()
def test_a_short_prompt_is_read_by_the_steps_of_a_stream(name: str) -> None:
    """Values and states agree with the forward pass, from any state, and the given state is not modified."""
    model = seqblocks.build(name, set=FEW_AT_ONCE[name], dtype=torch.float64, seed=1).eval()
    first, x = prompt(2, 3), prompt(2, 9)
    _, state = model(first, return_state=True)
    before = tree_map(torch.clone, state)
    expected, expected_state = model(x, state=state, return_state=True)
    plan = model._plan_for(x)
    assert plan is not None
    done = plan.read(state, x)
    assert done is not None
    found, states = done
    torch.testing.assert_close(found, expected[:, -1:], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(states, expected_state, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", FEW_AT_ONCE)
@torch.no_grad()
def test_states_after_a_short_prompt_have_the_layout_and_memory_of_initial_states(name: str) -> None:
    model = seqblocks.build(name, set=FEW_AT_ONCE[name], seed=1).eval()
    x, initial = prompt(1, 9), model.init_state(1)
    plan = model._plan_for(x)
    assert plan is not None
    done = plan.read(initial, x)
    assert done is not None
    for state in (done[1], model.step(x[:, 0], done[1])[1]):
        parts = tree_leaves(state)
        assert [part.stride() for part in parts] == [part.stride() for part in tree_leaves(initial)]
        assert [part.untyped_storage().nbytes() for part in parts] == [part.nbytes for part in parts]
        assert len({part.data_ptr() for part in parts if part.numel()}) == sum(part.numel() > 0 for part in parts)


@torch.no_grad()
def test_the_head_of_a_short_prompt_reads_its_last_token_alone() -> None:
    model = build("mamba_small")
    plan = model._plan_for(prompt())
    assert plan is not None
    values, seen = dict(plan._source.values), []
    head = next(name for name in reversed(values) if name in plan._source._prepared)
    run = values[head].one
    values[head] = TokenFunction(lambda x: seen.append(len(x)) or run(x))
    plan._set_values(values)
    plan.read(model.init_state(3), prompt())
    assert seen == [3]


@torch.no_grad()
def test_only_few_tokens_are_read_by_the_steps_of_a_stream() -> None:
    recurrent, attention = build("mamba_small"), build("transformer_small")
    for model, x, runs in (
        (recurrent, prompt(1, PROMPT_MAX_ROWS), True), (recurrent, prompt(1, PROMPT_MAX_ROWS + 1), False),
        (recurrent, prompt(8, PROMPT_MAX_ROWS // 8 + 1), False), (attention, prompt(8, PROMPT_MAX_ROWS // 8), True),
    ):  # fmt: skip
        plan = model._plan_for(x)
        assert plan is not None
        assert (plan.read(model.init_state(x.shape[0]), x) is not None) == runs


def test_a_model_that_has_read_a_short_prompt_frees_its_memory_at_once() -> None:
    model = build("mamba_small")
    seqblocks.generate(model, prompt(), 3)
    parameter = weakref.ref(model.unembed.weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert parameter() is None
    finally:
        gc.enable()


def test_a_short_prompt_runs_replaced_modules_and_hooks() -> None:
    model, x = build("mamba_small"), prompt()
    calls: list[int] = []
    handle = model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    hooked = seqblocks.generate(model, x, 4)
    assert len(calls) == 4
    handle.remove()
    assert [row.tolist() for row in hooked] == [row.tolist() for row in seqblocks.generate(model, x, 4)]
    model.unembed = torch.nn.Linear(*reversed(model.unembed.weight.shape), dtype=torch.float64)  # type: ignore[union-attr, arg-type]
    assert [row.tolist() for row in seqblocks.generate(model, x, 4)] == [greedy(model, row, 4) for row in x]


def test_a_short_prompt_reads_changed_weights() -> None:
    model, x = build("mamba_small"), prompt()
    seqblocks.generate(model, x, 2)
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5
    assert [row.tolist() for row in seqblocks.generate(model, x, 5)] == [greedy(model, row, 5) for row in x]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
    assert [row.tolist() for row in seqblocks.generate(model, x, 5)] == [greedy(model, row, 5) for row in x]


def test_each_sequence_stops_by_itself() -> None:
    model, x = build("mlstm_small"), prompt(4)
    whole = [row.tolist() for row in seqblocks.generate(model, x, 12)]
    stops = {whole[0][2], whole[1][5]}
    seen: list[tuple[int, int]] = []
    found = seqblocks.generate(model, x, 12, stop=stops, on_token=lambda row, token: seen.append((row, token)))
    for row, (cut, full) in enumerate(zip(found, whole, strict=True)):
        end = next((at + 1 for at, token in enumerate(full) if token in stops), 12)
        assert cut.tolist() == full[:end]
        assert [token for at, token in seen if at == row] == full[:end]
    assert seqblocks.generate(model, x, 12, stop=whole[0][2])[0].tolist() == found[0].tolist()


def test_a_seed_gives_the_same_draws() -> None:
    model, x = build("mlstm_small"), prompt()
    options: dict[str, Any] = {"temperature": 1.5}
    one, two = (seqblocks.generate(model, x, 20, seed=3, **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert any(
        not torch.equal(a, b) for a, b in zip(one, seqblocks.generate(model, x, 20, seed=4, **options), strict=True)
    )
    torch.manual_seed(0)
    three = seqblocks.generate(model, x, 20, **options)
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(three, seqblocks.generate(model, x, 20, **options), strict=True))


def test_draws_follow_the_probabilities() -> None:
    """Frequencies of 4,000 first tokens are within five standard deviations."""
    model = build("mlstm_small")
    x = prompt(1, tokens=2).expand(4_000, -1)
    with torch.no_grad():
        logits = model(x[:1])[0, -1]
    for temperature, top_k, top_p in (
        (1.0, None, None),
        (0.7, None, None),
        (1.0, 3, None),
        (1.3, None, 0.6),
        (1.0, 5, 0.8),
    ):
        p = expected(logits / temperature, top_k, top_p)
        tokens = seqblocks.generate(model, x, 1, temperature=temperature, top_k=top_k, top_p=top_p, seed=0)
        found = torch.bincount(torch.cat(tokens), minlength=13) / 4_000
        assert ((found - p).abs() <= 5 * (p * (1 - p) / 4_000).sqrt()).all()


def expected(scores: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    order = scores.argsort(descending=True).tolist()
    kept = order[:top_k]
    if top_p is not None:
        p = torch.softmax(scores[kept], 0).tolist()
        while len(p) > 1 and sum(p[:-1]) >= top_p:
            p.pop()
        kept = kept[: len(p)]
    out = torch.zeros(13, dtype=torch.float64)
    out[kept] = torch.softmax(scores[kept], 0)
    return out


def test_a_state_is_a_cached_prefix() -> None:
    model, x = build("hybrid_small"), prompt(2, 12)
    with torch.no_grad():
        _, prefix = model(x[:, :8], return_state=True)
    expected = seqblocks.generate(model, x, 5)
    for _ in range(2):  # the state is not changed
        found = seqblocks.generate(model, x[:, 8:], 5, state=prefix)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_logits_of_several_outputs() -> None:
    text = (
        "seqblocks: 1\nmodel:\n  input: {tokens: 13}\n  steps:\n    - embed: {features: 8, as: h}\n    - causal_conv\n"
        "    - unembed: {as: logits}\n    - linear: {from: h, features: 1, as: value}\n  outputs: [logits, value]\n"
    )
    model = seqblocks.build_text(text, seed=1).eval()
    assert len(seqblocks.generate(model, [1, 2], 4, output="logits")[0]) == 4
    with pytest.raises(UsageError, match="outputs logits, value: pass output="):
        seqblocks.generate(model, [1, 2], 4)


def test_hooks_of_all_modules_are_called_for_a_prompt() -> None:
    model = build("mlstm_small")
    called: list[torch.nn.Module] = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(module))
    try:
        seqblocks.generate(model, [1, 2], 1)
    finally:
        hook.remove()
    assert called.count(model) == 1


def test_a_model_is_trained_on_generated_tokens() -> None:
    model = build("mlstm_small")
    row, = seqblocks.generate(model, [1, 2], 4)
    model(row[None]).sum().backward()
    row[0] = 3


def test_a_temperature_close_to_0_selects_the_most_likely_token() -> None:
    model = build("mlstm_small")
    greedy, = seqblocks.generate(model, [1, 2], 6)
    for temperature in (1e-20, 1e-42):
        found, = seqblocks.generate(model, [1, 2], 6, temperature=temperature)
        assert torch.equal(found, greedy)


def test_numbers_of_other_libraries_are_numbers() -> None:
    model = build("mlstm_small")
    expected = seqblocks.generate(model, [1, 2], 5, top_k=3, temperature=1.0, seed=0)[0].tolist()
    prompt = [*numpy.array([1, 2])]
    found = seqblocks.generate(model, prompt, numpy.int64(5), top_k=numpy.int64(3), temperature=1.0, seed=0)  # type: ignore[arg-type]
    assert found[0].tolist() == expected
    at = expected.index(expected[2]) + 1
    for stop in (numpy.int64(expected[2]), torch.tensor(expected[2]), torch.tensor([expected[2]])):
        found = seqblocks.generate(model, [1, 2], 5, top_k=3, temperature=1.0, seed=0, stop=stop)  # type: ignore[arg-type]
        assert found[0].tolist() == expected[:at]


def test_inputs_that_a_state_contains_are_refused() -> None:
    model = seqblocks.build("captioner", set={"dim": 16, "encoder_depth": 1, "decoder_depth": 1}).eval()
    image = torch.randn(1, *model.spec.inputs["image"].axes[1:])
    state = model.init_state(1, image=image)
    with pytest.raises(RunError, match="the state already depends on image: pass either that input or the state"):
        seqblocks.generate(model, [1], 3, state=state, image=image)
    with pytest.raises(RunError, match=r"no input 'images', and generate no such argument: it takes .*, image$"):
        seqblocks.generate(model, [1], 3, state=state, images=image)


@pytest.mark.parametrize("name", ["eos_token_id", "max_length"])
def test_arguments_of_other_libraries(name: str) -> None:
    message = f"the model has no input '{name}', and generate no such argument: it takes max_new_tokens, .*, output$"
    with pytest.raises(RunError, match=message):
        seqblocks.generate(build("mlstm_small"), [1], 3, **{name: 5})


def test_bytes_are_the_prompt_of_a_model_of_bytes() -> None:
    model = seqblocks.build("mamba_small", set={"dim": 16, "depth": 1}).eval()
    expected = seqblocks.generate(model, [list(b"abc"), list(b"de")], 5)
    assert torch.equal(seqblocks.generate(model, b"abc", 5)[0], expected[0])
    assert torch.equal(seqblocks.generate(model, bytearray(b"abc"), 5)[0], expected[0])
    assert all(map(torch.equal, seqblocks.generate(model, [b"abc", b"de"], 5), expected))
    with pytest.raises(UsageError, match=r"not str: encode it, with text\.encode"):
        seqblocks.generate(model, "abc", 5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"at least one token id, not torch\.int64"):
        seqblocks.generate(model, b"", 5)


def test_nothing_to_do() -> None:
    model = build("mlstm_small")
    assert [row.tolist() for row in seqblocks.generate(model, prompt(2), 0)] == [[], []]
    assert seqblocks.generate(model, [], 5) == []


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ("text", {}, "a prompt is token ids, in a tensor or in lists, not str: encode it with the model's tokenizer"),
        (b"text", {}, "bytes are the token ids of a model of 256 tokens, and this model has 13"),
        ([b"a", b"bc"], {}, "bytes are the token ids of a model of 256 tokens, and this model has 13"),
        ([[1, 2], []], {}, "at least one token id"),
        (torch.zeros(1, 3), {}, "must be a sequence of at least one token id, not torch.float32"),
        (torch.tensor(3), {}, r"must be a sequence of at least one token id, not torch.int64 \[\]"),
        ([["a"]], {}, r"a prompt is token ids, 64-bit integers, and .*\(list: "),
        ([10**30], {}, r"a prompt is token ids, 64-bit integers, and .*\(list: Overflow"),
        ([1], {"top_p": torch.tensor([0.5, 0.9])}, "top_p must be a probability above 0"),
        ([1], {"temperature": torch.ones(2)}, "temperature must be a number"),
        ([1], {"temperature": -1}, "temperature must be a number, at least 0, not -1"),
        ([1], {"temperature": "x"}, "temperature must be a number, at least 0, not 'x'"),
        ([1], {"temperature": None}, "temperature must be a number, at least 0, not None"),
        ([1], {"top_k": "x"}, "top_k must be a whole number, at least 1, not 'x'"),
        ([1], {"top_k": True}, "top_k must be a whole number, at least 1, not True"),
        ([1], {"top_k": 1.5}, "top_k must be a whole number, at least 1, not 1.5"),
        ([1], {"top_p": "x"}, "top_p must be a probability above 0, not 'x'"),
        ([1], {"stop": None}, "stop must be a token id or several, not None"),
        ([1], {"stop": torch.tensor([1.5])}, "stop must be a token id or several, not tensor"),
        ([1], {"output": "logits"}, "one output, which has no name: leave out output='logits'"),
        ([1], {"stop": 1.5}, "stop must be a token id or several, not 1.5"),
        ([1], {"seed": "x"}, "a seed must be a 64-bit integer or None, not 'x'"),
        ([1], {"seed": 2**70}, "a seed must be a 64-bit integer or None"),
        ([1], {"on_token": 3}, r"on_token must be a function \(sequence, token\), not 3"),
        ([1], {"top_k": 0}, "top_k must be a whole number, at least 1"),
        ([1], {"top_p": 0.0}, "top_p must be a probability above 0"),
        ([1], {"stop": "x"}, "stop must be a token id or several"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens must be a whole number, at least 0"),
    ],
)
def test_wrong_arguments(given: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        seqblocks.generate(build("mlstm_small"), given, **({"max_new_tokens": 3} | options))


def test_the_most_likely_token_is_always_kept() -> None:
    model = build("mlstm_small")
    (found,) = seqblocks.generate(model, [1], 4, temperature=1.0, top_p=1e-50)
    assert found.tolist() == seqblocks.generate(model, [1], 4)[0].tolist()


def test_logits_that_are_not_finite_cannot_be_sampled() -> None:
    model = build("mlstm_small")
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(RunError, match="the model's logits are not finite"):
        seqblocks.generate(model, [1], 4, temperature=1.0)


def test_models_that_do_not_generate() -> None:
    agent = seqblocks.build("memoroid_agent", set={"dim": 8, "observation": 5})
    with pytest.raises(RunError, match="not token ids, so it cannot generate"):
        seqblocks.generate(agent, [1], 3)
    classifier = seqblocks.build_text(
        "seqblocks: 1\nmodel: {input: {tokens: 13}, steps: [{embed: 8}, causal_conv, {pool: {mode: last}}]}"
    )
    with pytest.raises(RunError, match=r"not logits of each token, so it cannot generate"):
        seqblocks.generate(classifier, [1], 3)
    model = build("mlstm_small")
    with pytest.raises(RunError, match="outside the vocabulary of 13"):
        seqblocks.generate(model, [13], 3)
    state = model.init_state(2)
    with pytest.raises(UsageError, match="prompts that continue a state must have equal lengths"):
        seqblocks.generate(model, [[1, 2], [3]], 3, state=state)


def test_weights_that_a_callback_changes_are_used_from_the_next_token_on() -> None:
    model, other, x = build("mamba_small"), build("mamba_small"), prompt(1)

    @torch.no_grad()
    def halve(changed: seqblocks.SequenceModel) -> None:
        for parameter in changed.parameters():
            parameter.mul_(0.5)

    found = seqblocks.generate(model, x, 4, on_token=lambda *_: halve(model))
    expected = []
    with torch.no_grad():
        y, state = other(x, return_state=True)
        y = y[:, -1]
        for _ in range(4):
            expected.append(int(y.argmax()))
            halve(other)
            y, state = other.step(torch.tensor(expected[-1:]), state)
    assert found[0].tolist() == expected


def test_the_model_is_compared_with_its_plan_once_for_several_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model, count = build("mamba_small"), []
    find = type(model)._plan_for
    monkeypatch.setattr(type(model), "_plan_for", lambda self, x: count.append(1) or find(self, x))
    seqblocks.generate(model, prompt(), 2 * UNCHECKED + 2)
    assert len(count) == 4  # for the prompt, the first token, and twice more


def test_weights_that_another_thread_loads_are_used_within_a_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that a token reads in place would otherwise be new, and those that are prepared old, to the end."""
    model, other, x, calls = build("mamba_small"), build("mamba_small"), prompt(1), 0
    weights = {name: 1.5 * p for name, p in model.state_dict().items()}
    logits_of = generation._logits

    def logits_as_weights_are_loaded(y: Any, output: str | None) -> Any:
        nonlocal calls
        calls += 1
        if calls == UNCHECKED:  # those of the prompt are the first; the next token is compared
            model.load_state_dict(weights)
        return logits_of(y, output)

    monkeypatch.setattr(generation, "_logits", logits_as_weights_are_loaded)
    found = seqblocks.generate(model, x, 3 * UNCHECKED)
    with torch.no_grad():
        y, state = other(x, return_state=True)
        expected, y = [], y[:, -1]
        for count in range(1, 3 * UNCHECKED + 1):
            if count == UNCHECKED:
                other.load_state_dict(weights)
            expected.append(int(y.argmax()))
            y, state = other.step(torch.tensor(expected[-1:]), state)
    assert found[0].tolist() == expected


def test_moving_a_model_frees_its_old_weights() -> None:
    model = build("mamba_small")
    seqblocks.generate(model, prompt(), 3)
    assert model.token_plan is not None
    assert model.float().token_plan is None


# --- recorded steps, as on a CUDA device ------------------------------------------------------------------------------


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record steps on a CPU too: like a graph, the recording runs the same computation on the same memory again."""
    found: list[int] = []

    def record(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
        found.append(0)
        function()

        def replay() -> None:
            found[-1] += 1
            function()

        return replay

    monkeypatch.setitem(cuda_graph.RECORDERS, "cpu", record)
    return found


LONG = CAPTURE_MIN_TOKENS + 5


@pytest.mark.parametrize("name", SMALL)
def test_recorded_tokens_equal_others(name: str, recordings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build(name), prompt()
    _, cached = model(x, return_state=True)
    before = tree_map(torch.clone, cached)
    found = seqblocks.generate(model, x, LONG)
    after = seqblocks.generate(model, x[:, :1], LONG, state=cached, temperature=1.0, seed=3)
    assert recordings == [LONG - 1] * 2
    assert all(map(torch.equal, tree_leaves(cached), tree_leaves(before)))
    seqblocks.generate(model, x, CAPTURE_MIN_TOKENS)  # too few tokens
    assert len(recordings) == 2
    monkeypatch.delitem(cuda_graph.RECORDERS, "cpu")
    assert [*map(torch.Tensor.tolist, found)] == [row.tolist() for row in seqblocks.generate(model, x, LONG)]
    plain = seqblocks.generate(model, x[:, :1], LONG, state=cached, temperature=1.0, seed=3)
    assert [*map(torch.Tensor.tolist, after)] == [row.tolist() for row in plain]


def test_recorded_sequences_that_end_change_no_other(recordings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build("mamba_small"), prompt(8)
    found = seqblocks.generate(model, x, 40, stop=(1, 2), temperature=1.0, seed=2)
    assert len({len(row) for row in found}) > 3
    assert 2 <= len(recordings) <= 4  # at most for 8, 4, 2 and 1 sequences
    monkeypatch.delitem(cuda_graph.RECORDERS, "cpu")
    plain = seqblocks.generate(model, x, 40, stop=(1, 2), temperature=1.0, seed=2)
    assert [*map(torch.Tensor.tolist, found)] == [*map(torch.Tensor.tolist, plain)]


def test_a_sequence_that_ends_with_its_first_token_is_not_recorded(recordings: list[int]) -> None:
    model, x = build("mamba_small"), prompt(4)
    first = seqblocks.generate(model, x, 1)
    found = seqblocks.generate(model, x, LONG, stop=int(first[0]))
    assert found[0].tolist() == first[0].tolist()
    for row, tokens in zip(x[1:], found[1:], strict=True):
        assert tokens.tolist() == seqblocks.generate(model, row, LONG, stop=int(first[0]))[0].tolist()


@pytest.mark.parametrize("change", ["hook", "parameter", "module"])
def test_a_model_that_changes_is_no_longer_replayed(change: str, recordings: list[int]) -> None:
    model, x, calls = build("mamba_small"), prompt(1), []
    head = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
    owner = next(m for m in model.modules() if head in m.children())
    name = next(name for name, each in owner.named_children() if each is head)

    def on_token(_: int, token: int) -> None:
        calls.append(token)
        if len(calls) == 5:
            if change == "hook":
                head.register_forward_hook(lambda *given: -given[-1])
            elif change == "parameter":
                head.weight = torch.nn.Parameter(-head.weight.detach())
            else:
                setattr(owner, name, Negated(head))

    found = seqblocks.generate(model, x, LONG, on_token=on_token)[0].tolist()
    assert recordings == [4]
    other = build("mamba_small")
    _, state = other(torch.cat([x, torch.tensor([found[:3]])], 1), return_state=True)
    logits, state = other.step(torch.tensor(found[3:4]), state)
    assert found[4] == int(logits.argmax())
    logits, _ = other.step(torch.tensor(found[4:5]), state)
    assert found[5] == int(logits.argmin())


class Negated(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return -self.inner(x)  # type: ignore[no-any-return]


def test_a_step_that_cannot_be_recorded_runs_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
        function()
        raise RunError("a step of this model cannot be captured in a CUDA graph: a copy to the host")

    model, x = build("hybrid_small"), prompt()
    expected = seqblocks.generate(model, x, LONG)
    monkeypatch.setitem(cuda_graph.RECORDERS, "cpu", refuse)
    found = seqblocks.generate(model, x, LONG)
    assert [*map(torch.Tensor.tolist, found)] == [*map(torch.Tensor.tolist, expected)]
