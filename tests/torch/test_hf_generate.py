"""`generate` of transformers on the state of a model: every mode against seqblocks.generate, or an explicit loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import seqblocks
import seqblocks.hf as hf
from seqblocks.errors import RunError, UsageError
from seqblocks.hf.library import CACHE

transformers.utils.logging.set_verbosity_error()

# Together these have all kinds of state, windows of attention and of convolutions, experts, loops.
MODELS: dict[str, dict[str, Any]] = {
    "hybrid_small": {"dim": 16, "window": 5, "vocabulary": 24},
    "jamba_small": {"dim": 16, "hidden": 24, "vocabulary": 24},
    "kimi_linear_small": {"dim": 16, "rounds": 1, "heads": 2, "head": 8, "rank": 8, "vocabulary": 24},
    "mamba_small": {"dim": 16, "depth": 2, "vocabulary": 24},
    "rwkv7_0_4b": {
        "dim": 16, "depth": 2, "head": 8, "decay_rank": 4, "erase_rank": 4, "value_rank": 4, "gate_rank": 4,
        "vocabulary": 24,
    },
    "zamba2_small": {"dim": 16, "vocabulary": 24},
}  # fmt: skip
GREEDY = {"do_sample": False, "max_new_tokens": 6}


def built(name: str, seed: int = 4) -> Any:
    """Return a small model with uneven output distributions, so that beams cross."""
    model = seqblocks.build(name, set=MODELS[name], dtype="float64", seed=seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
        model.embed.weight.copy_(3 * torch.randn(24, 16, generator=generator, dtype=torch.float64))
        model.unembed.weight.copy_(torch.randn(24, 16, generator=generator, dtype=torch.float64))
    return model


BY_HAND = ("jamba_small", "kimi_linear_small", "zamba2_small")
NAMES = [pytest.param(name, marks=pytest.mark.long) if name in BY_HAND else name for name in MODELS]


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return hf.wrap(built(request.param))


@pytest.fixture(scope="module")
def small() -> Any:
    return hf.wrap(built("hybrid_small"))


def prompt(*shape: int, seed: int = 9) -> Tensor:
    return torch.randint(0, 24, shape, generator=torch.Generator().manual_seed(seed))


def new_tokens(model: Any, x: Tensor, **options: Any) -> Any:
    return model.generate(x, **{**GREEDY, **options})[:, x.shape[1] :].tolist()


def test_greedy_is_the_likeliest_token_of_the_whole_sequence(model: Any) -> None:
    x = prompt(3, 7)
    made = new_tokens(model, x)
    assert made == [tokens.tolist() for tokens in seqblocks.generate(model.model, x, 6)]
    assert made == new_tokens(model, x, use_cache=False)
    assert made == new_tokens(model, x, prefill_chunk_size=3)
    whole = x
    for at in range(6):
        whole = torch.cat([whole, model.model(whole)[:, -1:].argmax(-1)], 1)
        assert whole[:, -1].tolist() == [row[at] for row in made]


def beam_search(model: Any, x: Tensor, beams: int, count: int) -> list[list[int]]:
    """Return the most likely continuation of each sequence among `beams`, each scored by the whole forward pass."""
    found = []
    for row in x:
        rows: list[tuple[float, list[int]]] = [(0.0, row.tolist())]
        for _ in range(count):
            scores = model(torch.tensor([tokens for _, tokens in rows]))[:, -1].log_softmax(-1)
            total = torch.tensor([score for score, _ in rows], dtype=torch.float64)[:, None] + scores
            values, places = total.flatten().topk(beams)
            width = scores.shape[1]
            rows = [
                (float(value), [*rows[at // width][1], at % width])
                for value, at in zip(values, places.tolist(), strict=True)
            ]
        found.append(rows[0][1][len(row) :])
    return found


def test_beams(model: Any) -> None:
    x = prompt(2, 5)
    with torch.no_grad():
        expected = beam_search(model.model, x, 4, 6)
    assert new_tokens(model, x, num_beams=4) == expected
    assert new_tokens(model, x, num_beams=4, num_return_sequences=2)[::2] == expected


def test_padding_on_the_left_changes_nothing(model: Any) -> None:
    rows = [prompt(1, length, seed=length) for length in (7, 3, 1)]
    x = torch.zeros(3, 7, dtype=torch.long)  # 0 also occurs as a token of the prompts
    mask = torch.zeros(3, 7, dtype=torch.long)
    for at, row in enumerate(rows):
        x[at, 7 - row.shape[1] :], mask[at, 7 - row.shape[1] :] = row, 1
    alone = [new_tokens(model, row)[0] for row in rows]
    for options in ({}, {"use_cache": False}, {"prefill_chunk_size": 2}, {"pad_token_id": 0}):
        assert new_tokens(model, x, attention_mask=mask, **options) == alone, options
    beams = [new_tokens(model, row, num_beams=3)[0] for row in rows]
    assert new_tokens(model, x, attention_mask=mask, num_beams=3) == beams
    out = model(x, attention_mask=mask, use_cache=True)
    for at, row in enumerate(rows):
        torch.testing.assert_close(out.logits[at, -row.shape[1] :], model(row).logits[0])


@pytest.mark.slow
def test_rejected_drafts_are_removed(model: Any) -> None:
    x = prompt(1, 7)
    expected = new_tokens(model, x, max_new_tokens=14)
    assert new_tokens(model, x, max_new_tokens=14, assistant_model=hf.wrap(built("mamba_small", 5))) == expected
    assert new_tokens(model, x, max_new_tokens=14, prompt_lookup_num_tokens=3) == expected
    near = hf.wrap(seqblocks.build_model(model.model.spec, dtype="float64"))
    near.load_state_dict(model.state_dict())
    with torch.no_grad():
        near.model.unembed.weight.mul_(0.7).add_(0.05 * torch.randn(near.model.unembed.weight.shape))
    calls: list[None] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(None))
    assert new_tokens(model, x, max_new_tokens=14, assistant_model=near) == expected
    handle.remove()
    assert len(calls) < 14, "some drafts should be accepted"


def test_drafts_take_pad_tokens_in_a_prompt_with_a_mask_for_tokens(small: Any) -> None:
    x = torch.tensor([[5, 0, 7, 9, 0, 3, 0]])
    options = {"pad_token_id": 0, "attention_mask": torch.ones_like(x), "max_new_tokens": 14}
    expected = new_tokens(small, x, **options)
    assert new_tokens(small, x, assistant_model=hf.wrap(built("mamba_small", 5)), **options) == expected
    assert new_tokens(small, x, prompt_lookup_num_tokens=3, **options) == expected
    padded = torch.cat([torch.zeros(1, 2, dtype=torch.long), x], 1)
    options["attention_mask"] = torch.tensor([[0] * 2 + [1] * 7])
    assert new_tokens(small, padded, assistant_model=hf.wrap(built("mamba_small", 5)), **options) == expected


def test_draws(small: Any) -> None:
    x = prompt(2, 5)
    drawn = []
    for use_cache in (True, False):
        transformers.set_seed(3)
        drawn.append(new_tokens(small, x, do_sample=True, temperature=0.8, top_k=9, use_cache=use_cache))
    assert drawn[0] == drawn[1]
    many = new_tokens(small, x[:1], do_sample=True, num_return_sequences=3)
    assert len(many) == 3
    assert many[0] != many[1]


def test_a_cache_is_continued_and_not_changed(small: Any) -> None:
    x = prompt(1, 12)
    with torch.no_grad():
        cache = small(x[:, :8], use_cache=True).past_key_values
    for end in (9, 12, 12):
        tail = torch.cat([x[:, :8], prompt(1, end - 8, seed=end)], 1)
        assert new_tokens(small, tail, **{CACHE: cache}) == new_tokens(small, tail)
    first = small.generate(x, **GREEDY, return_dict_in_generate=True)
    assert first.past_key_values.get_seq_length() == 17
    more = new_tokens(small, first.sequences, **{CACHE: first.past_key_values})
    assert new_tokens(small, x, max_new_tokens=12)[0][6:] == more[0]


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # as of transformers 5.24
@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_the_cache_has_the_names_of_old_and_new_versions(small: Any, name: str) -> None:
    x = prompt(1, 9)
    with torch.no_grad():
        cache = getattr(small(x[:, :8], use_cache=True), CACHE)
        torch.testing.assert_close(small(x[:, 8:], **{name: cache}).logits, small(x).logits[:, 8:])
    assert new_tokens(small, x, **{name: cache}) == new_tokens(small, x)
    with pytest.raises(RunError, match="past_key_values and cache are two names of one argument"):
        small(x[:, 8:], past_key_values=cache, cache=cache)


def test_long_prompts_are_read_in_chunks(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqblocks.hf.modeling.CHUNK", 8)
    x, mask = prompt(2, 21), torch.ones(2, 21, dtype=torch.long)
    mask[0, :9] = 0
    lengths: list[int] = []
    handle = small.model.embed.register_forward_hook(lambda module, inputs, y: lengths.append(inputs[0].shape[1]))
    made = new_tokens(small, x, attention_mask=mask)
    handle.remove()
    assert max(lengths) == 8
    assert made == [new_tokens(small, x[:1, 9:])[0], new_tokens(small, x[1:])[0]]


def test_inputs_that_do_not_stream() -> None:
    """The captioner reads an image once; the image's features are part of the state."""
    sizes = {"dim": 16, "heads": 2, "encoder_depth": 2, "decoder_depth": 1, "vocabulary": 24}
    captioner = seqblocks.build("captioner", set=sizes, dtype="float64", seed=2).eval()
    model, x = hf.wrap(captioner), prompt(2, 4)
    image = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    made = new_tokens(model, x, image=image)
    assert made == [tokens.tolist() for tokens in seqblocks.generate(captioner, x, 6, image=image)]
    assert made == new_tokens(model, x, image=image, use_cache=False)
    assert new_tokens(model, x, image=image, num_beams=2)
    with pytest.raises(RunError, match="the input image is missing"):
        new_tokens(model, x)


def test_a_streamer_and_stopping(small: Any) -> None:
    x = prompt(1, 5)
    expected = new_tokens(small, x)[0]
    seen: list[int] = []

    class Streamer(transformers.generation.BaseStreamer):
        def put(self, value: Tensor) -> None:
            seen.extend(value.flatten().tolist())

        def end(self) -> None:
            pass

    stopped = new_tokens(small, x, eos_token_id=expected[2], pad_token_id=0, streamer=Streamer())[0]
    assert stopped == expected[:3]
    assert len(set(expected[:3])) == 3
    assert seen == [*x[0].tolist(), *expected[:3]]
    two = torch.cat([x, prompt(1, 5, seed=1)])
    padded = new_tokens(small, two, eos_token_id=expected[2], pad_token_id=0)
    assert padded[0][:3] == expected[:3]
    assert not any(padded[0][3:])


def test_faults(small: Any) -> None:
    x = prompt(2, 6)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, 4:] = 0
    for use_cache in (True, False):
        with pytest.raises(RunError, match="padding after the last token, which would change the state or"):
            small.generate(x, attention_mask=mask, use_cache=use_cache, **GREEDY)
    x[1, 3] = 0
    with pytest.raises(RunError, match="`generate` treats pad_token_id as padding: pass attention_mask"):
        small.generate(x, pad_token_id=0, **GREEDY)
    with pytest.raises(UsageError, match="cache_implementation='static' is a cache of keys and values"):
        small.generate(x, cache_implementation="static", **GREEDY)
    with pytest.raises(RunError, match=f"{CACHE} must be a StateCache from an earlier call, not DynamicCache"):
        small.generate(x, **{CACHE: transformers.DynamicCache()}, **GREEDY)
    with pytest.raises(RunError, match="continuous batching needs a paged cache of keys and values"):
        small.generate_batch([[1, 2]])
    with pytest.raises(UsageError, match="generate takes a model from build, not SeqblocksForCausalLM"):
        seqblocks.generate(small, x, 3)
    with pytest.raises(ValueError, match="nonsense"):
        small.generate(x, nonsense=3, **GREEDY)
    with pytest.raises(RunError, match="holds 1 sequences and the input 2"):
        small.generate(x, **{CACHE: small(x[:1, :3], use_cache=True).past_key_values}, **GREEDY)
