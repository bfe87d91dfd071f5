"""Calls of transformers models: losses, masks, packed sequences, and caches that are rewound."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import seqblocks
import seqblocks.hf as hf
from seqblocks.errors import RunError
from tests.torch.test_hf import built, ids


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    seqblocks.save(built(), tmp_path / "m")
    return tmp_path / "m"


def test_losses_are_shifted_once(saved: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    x = ids(2, 6)
    labels = x.clone()
    labels[0, :3] = -100
    out = model(x, labels=labels)
    logits = out.logits[:, :-1].flatten(0, 1).float()
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten()))
    assert out.past_key_values is None
    share = model(x, labels=labels, num_items_in_batch=4).loss
    torch.testing.assert_close(share, out.loss * 8 / 4)
    assert model(x, return_dict=False)[0].shape == (2, 6, 16)
    assert model(x, logits_to_keep=2).logits.shape == (2, 2, 16)
    assert torch.equal(model(x, logits_to_keep=torch.tensor([1, 4])).logits, model(x).logits[:, [1, 4]])
    with torch.no_grad():
        part = model(x, labels=labels, logits_to_keep=2, use_cache=True)
    assert (part.logits.shape, part.past_key_values.get_seq_length()) == ((2, 2, 16), 6)
    torch.testing.assert_close(part.loss, out.loss)


def test_gradients_flow_through_a_cache(saved: Path) -> None:
    """Truncated backpropagation needs the cache that was passed in training to be returned."""
    model = AutoModelForCausalLM.from_pretrained(saved).train()
    x = ids(2, 6)
    first = model(x[:, :3], use_cache=True)
    second = model(x[:, 3:], past_key_values=first.past_key_values)
    assert second.past_key_values.get_seq_length() == 6
    second.logits.square().sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).logits[:, 3:].square().sum().backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])


def test_packed_sequences_by_position_ids(saved: Path) -> None:
    """Position ids are those of DataCollatorWithFlattening."""
    model = AutoModelForCausalLM.from_pretrained(saved)
    x = ids(1, 9)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]])
    y = model(x, position_ids=positions, cu_seq_lens_q=torch.tensor([0, 3, 7, 9]), max_length_q=4).logits
    for start, stop in [(0, 3), (3, 7), (7, 9)]:
        torch.testing.assert_close(y[:, start:stop], model(x[:, start:stop]).logits)
    with pytest.raises(RunError, match="position_ids must increase by one from 0"):
        model(x, position_ids=2 * positions)
    with pytest.raises(RunError, match=r"position_ids is \[1, 4\], and the tokens are \[1, 9\]"):
        model(x, position_ids=positions[:, :4])
    with pytest.raises(RunError, match="takes no cu_seq_lens_q"):
        model(x, cu_seq_lens_q=torch.tensor([0, 9]))


def test_masks(saved: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    x = ids(3, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]])
    y = model(x, attention_mask=mask, use_cache=False).logits
    for row, (start, stop) in enumerate([(2, 6), (0, 6), (1, 4)]):
        alone = model(x[row : row + 1, start:stop]).logits[0]
        torch.testing.assert_close(y[row, start:stop], alone)
    assert model(x, attention_mask=mask).past_key_values is None, "the state should include the padding"
    for wrong, message in [
        (mask[:, :4], r"attention_mask is \[3, 4\], and there are 6 tokens of 3 sequences"),
        (mask[:, None, None], "the steps of the spec decide which tokens a token reads"),
        (mask * 0.5, r"must contain only 1 \(token\) and 0 \(padding\)"),
        (torch.tensor([[1, 0, 1, 1, 1, 1]]).expand(3, 6), "padding between tokens, which a state cannot skip"),
    ]:
        with pytest.raises(RunError, match=message):
            model(x, attention_mask=wrong)
    with pytest.raises(RunError, match="padding after the last token, which would change the state or the output: "):
        model(x, attention_mask=mask, use_cache=True)


def test_a_cache_is_a_value(saved: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    x = ids(2, 8)
    whole = model(x).logits
    first = model(x[:, :3], use_cache=True).past_key_values
    for _ in range(2):  # a call does not change the cache passed to it
        out = model(x[:, 3:7], past_key_values=first)
        torch.testing.assert_close(out.logits, whole[:, 3:7])
        assert (first.get_seq_length(), out.past_key_values.get_seq_length()) == (3, 7)
    torch.testing.assert_close(model(x[:, 7:], past_key_values=out.past_key_values).logits, whole[:, 7:])
    with pytest.raises(RunError, match="holds 2 sequences and the input 1"):
        model(x[:1], past_key_values=first)
    first.batch_repeat_interleave(2)
    with torch.no_grad():
        torch.testing.assert_close(model(x[[0, 0, 1, 1], 3:4], past_key_values=first).logits, whole[[0, 0, 1, 1], 3:4])
    with pytest.raises(RunError, match="must be a StateCache from an earlier call, not DynamicCache"):
        model(x, past_key_values=transformers.DynamicCache())


def test_rewinding_a_cache(saved: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    x = ids(2, 12)
    whole = model(x).logits
    with torch.no_grad():
        cache = model(x[:, :4], use_cache=True).past_key_values
        with pytest.raises(RunError, match="cannot remove 2 tokens from a state: only 0"):
            copy.deepcopy(cache).crop(-2)
        cache.activate_past_recording()
        for start, stop, back in [(4, 8, -3), (5, 6, 0), (6, 9, -3), (6, 7, -1), (6, 8, 7), (7, 12, 0)]:
            out = model(x[:, start:stop], past_key_values=cache)
            torch.testing.assert_close(out.logits, whole[:, start:stop])
            cache = out.past_key_values
            cache.crop(back)
            assert cache.get_seq_length() == (back if back > 0 else stop + back)
        with pytest.raises(RunError, match="cannot remove 13 tokens from a state: only 0"):
            cache.crop(-13)


def test_sequences_are_repeated_and_reordered_after_rewinding(saved: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    x, rows = ids(2, 8), torch.tensor([0, 0, 1, 1])
    whole = model(x).logits
    with torch.no_grad():
        for prefix in (0, 4):  # the record starts with the sequence, or after a prefix
            cache = model(x[:, :prefix], use_cache=True).past_key_values if prefix else hf.StateCache()
            cache.activate_past_recording()
            cache = model(x[:, prefix:7], past_key_values=cache).past_key_values
            cache.crop(-2)
            cache.batch_repeat_interleave(2)
            torch.testing.assert_close(model(x[rows, 5:], past_key_values=cache).logits, whole[rows, 5:])
            cache.batch_select_indices(torch.tensor([3, 0]))
            torch.testing.assert_close(model(x.flip(0)[:, 5:], past_key_values=cache).logits, whole.flip(0)[:, 5:])
    wrong: Any
    for wrong in (None, 1.5, torch.ones(2), [1]):
        with pytest.raises(RunError, match="crop needs a number of tokens, not"):
            cache.crop(wrong)
        with pytest.raises(RunError, match="repeats must be a whole number of at least 1, not"):
            cache.batch_repeat_interleave(wrong)
    empty = hf.StateCache()
    empty.batch_repeat_interleave(3)
    assert empty.get_seq_length() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs_embeds": torch.zeros(1, 2, 8)}, "takes no inputs_embeds: it reads token ids"),
        ({"output_attentions": True}, "takes no output_attentions: no step stores"),
        ({"token_type_ids": torch.ones(1, 2, dtype=torch.long)}, "a single token type"),
        ({"input_ids": None}, "needs its input, input_ids"),
        ({"input_ids": torch.zeros(1, 2)}, "reads token ids"),
        ({"input_ids": ids(1, 0)}, "input_ids is empty: pass at least one token"),
        ({"input_ids": torch.tensor(3)}, "reads token ids"),
        ({"labels": ids(1, 3)}, r"labels must be token ids \[1, 2\], or -100 .*, not torch.int64 \[1, 3\]"),
        ({"labels": torch.zeros(1, 2)}, r"labels must be token ids \[1, 2\], .*, not torch.float32 \[1, 2\]"),
        ({"labels": [[1, 2]]}, "labels must be token ids .* not list"),
        ({"logits_to_keep": "x"}, "logits_to_keep must be a number of tokens or a tensor .n. of positions, not 'x'"),
        ({"logits_to_keep": -1}, "logits_to_keep must be a number of tokens .*, not -1"),
        ({"logits_to_keep": torch.ones(1)}, "logits_to_keep must be a number of tokens .*, not torch.float32"),
        ({"nonsense": 3}, "takes no nonsense"),
    ],
)
def test_invalid_arguments(arguments: dict[str, Any], message: str) -> None:
    model = hf.wrap(built())
    with pytest.raises(RunError, match=message):
        model(**{"input_ids": ids(1, 2), **arguments})
    model(ids(1, 2), token_type_ids=torch.zeros(1, 2), output_attentions=False, inputs_embeds=None)
