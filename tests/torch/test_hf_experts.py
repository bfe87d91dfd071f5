"""Experts in transformers: balance losses in the loss and the output, routers' logits, options of the config."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments

import seqblocks
import seqblocks.hf as hf
from seqblocks.errors import RunError, UsageError

transformers.utils.logging.set_verbosity_error()

TEXT = """
seqblocks: 1
let: {vocabulary: 16, depth: 2}
model:
  input: {tokens: vocabulary}
  steps:
    - embed: {features: 8}
    - repeat:
        name: layers
        times: depth
        steps:
          - causal_conv: {kernel: 2}
          - residual: {steps: [rms_norm, {experts: {count: 4, top: 2, steps: [linear: 8]}}]}
    - unembed: {bias: false}
"""
X = torch.randint(0, 16, (3, 7), generator=torch.Generator().manual_seed(1))


def wrapped(**config: Any) -> Any:
    return hf.wrap(seqblocks.build_text(TEXT, dtype="float64", seed=0), **config)


def cross_entropy(out: Any, x: Tensor) -> Tensor:
    """Return the loss of the next tokens, in float32 as in transformers."""
    return torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())


def test_training_adds_the_balance_losses() -> None:
    model = wrapped().train()
    out = model(X, labels=X)
    torch.testing.assert_close(out.aux_loss, sum(model.model.auxiliary_losses().values()))
    torch.testing.assert_close(out.loss, cross_entropy(out, X) + 0.001 * out.aux_loss.float())
    assert out.router_logits is None
    assert torch.equal(model(X).aux_loss, out.aux_loss)
    model = wrapped(router_aux_loss_coef=0.5, router_z_loss_coef=0.25).train()
    out = model(X, labels=X)
    z = sum(model.model.auxiliary_losses("router_z").values())
    torch.testing.assert_close(out.loss, cross_entropy(out, X) + (0.5 * out.aux_loss + 0.25 * z).float())
    out = wrapped(router_aux_loss_coef=0).train()(X, labels=X)
    torch.testing.assert_close(out.loss, cross_entropy(out, X))
    assert "aux_loss" not in out


def test_logits_of_routers_are_returned_on_request() -> None:
    model = wrapped().eval()
    plain = model(X, labels=X)
    assert {"aux_loss", "router_logits"}.isdisjoint(plain)
    torch.testing.assert_close(plain.loss, cross_entropy(plain, X))
    out = model(X, labels=X, output_router_logits=True)
    assert [each.shape for each in out.router_logits] == [(21, 4)] * 2
    torch.testing.assert_close(out.loss, cross_entropy(out, X) + 0.001 * out.aux_loss.float())
    trained = model.train()(X)
    torch.testing.assert_close(out.aux_loss, trained.aux_loss)
    assert model.train()(X, output_router_logits=False).router_logits is None
    by_config = wrapped(output_router_logits=True).eval()
    torch.testing.assert_close(by_config(X).router_logits, out.router_logits)
    assert model.model.eval()(X) is not None
    with pytest.raises(RunError, match="auxiliary losses need a call in training mode"):
        model.model.auxiliary_losses()


def test_logits_of_routers_come_with_a_cache() -> None:
    model = wrapped().eval()
    whole = model(X, output_router_logits=True)
    cache = None
    with torch.no_grad():
        for at in range(X.shape[1]):
            out = model(X[:, at : at + 1], cache=cache, use_cache=True, output_router_logits=True, logits_to_keep=1)
            cache = out.past_key_values
            for one, all_ in zip(out.router_logits, whole.router_logits, strict=True):
                torch.testing.assert_close(one, all_.unflatten(0, X.shape)[:, at])
        made = model.generate(X, max_new_tokens=3, do_sample=False, output_router_logits=True)
    assert torch.equal(made, model.generate(X, max_new_tokens=3, do_sample=False))


def test_padding_does_not_count() -> None:
    model = wrapped(router_z_loss_coef=1.0).train()
    alone = model(X[:1, :4], labels=X[:1, :4])
    zeros = torch.zeros(1, 3, dtype=torch.long)
    ignored = torch.full((1, 3), -100)
    for padded, labels, mask in (
        ([zeros, X[:1, :4]], [ignored, X[:1, :4]], [0, 0, 0, 1, 1, 1, 1]),
        ([X[:1, :4], zeros], [X[:1, :4], ignored], [1, 1, 1, 1, 0, 0, 0]),
    ):
        if mask[0] == 0:
            labels = [torch.full((1, 4), -100), X[:1, 1:4]]  # the first token is not predicted from padding
        out = model(torch.cat(padded, 1), labels=torch.cat(labels, 1), attention_mask=torch.tensor([mask]))
        torch.testing.assert_close(out.aux_loss, alone.aux_loss)
        torch.testing.assert_close(out.loss, alone.loss)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_keeps_the_gradients_of_balance_losses(reentrant: bool) -> None:
    gradients = []
    for checkpoints in (False, True):
        model = wrapped(router_aux_loss_coef=1.0).train()
        if checkpoints:
            model._set_gradient_checkpointing(gradient_checkpointing_func=partial(checkpoint, use_reentrant=reentrant))
        if checkpoints and reentrant:
            with pytest.raises(RunError, match="gives the balance losses of experts no gradient: pass gradient_checkp"):
                model(X, labels=X)
            model.config.router_aux_loss_coef = 0.0
            model(X, labels=X).loss.backward()
            return
        model(X, labels=X).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_the_trainer_weighs_balance_losses_like_the_loss(tmp_path: Path) -> None:
    """A batch in two parts, of which one has fewer labels: the gradient is that of the weighted mean of both."""
    labels = X[:2].clone()
    labels[0, 3:] = -100
    data = [{"input_ids": x, "labels": y} for x, y in zip(X, labels, strict=False)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=2, learning_rate=1.0,
        optim="sgd", max_grad_norm=0, lr_scheduler_type="constant", report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    model, same = wrapped(router_aux_loss_coef=1.0).train(), wrapped(router_aux_loss_coef=1.0).train()
    Trainer(model, arguments, train_dataset=data).train()
    counts = (labels[:, 1:] != -100).sum(1)
    for x, y, count in zip(X, labels, counts, strict=False):
        (same(x[None], labels=y[None]).loss * count / counts.sum()).backward()
    with torch.no_grad():
        for p, trained in zip(same.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(trained, p - p.grad)


def test_options_are_saved_and_checked(tmp_path: Path) -> None:
    wrapped(router_aux_loss_coef=0.5).save_pretrained(tmp_path)
    config = AutoModelForCausalLM.from_pretrained(tmp_path).config
    found = (config.router_aux_loss_coef, config.router_z_loss_coef, config.output_router_logits)
    assert found == (0.5, 0.0, False)
    seqblocks.save(wrapped().model, tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", router_aux_loss_coef=0.25)
    assert model.config.router_aux_loss_coef == 0.25
    for wrong in (-1, "x", float("nan"), True):
        with pytest.raises(UsageError, match="router_aux_loss_coef must be a number, at least 0, not"):
            wrapped(router_aux_loss_coef=wrong)
    dense = seqblocks.build("mamba_small", set={"dim": 16, "depth": 1})
    for name, value in (("router_aux_loss_coef", 0.1), ("output_router_logits", True)):
        with pytest.raises(UsageError, match=f"has no `experts` step: omit {name}={value}"):
            hf.wrap(dense, **{name: value})
    model = hf.wrap(dense)
    assert not hasattr(model.config, "output_router_logits"), "TRL would take it for a mixture of experts"
    with pytest.raises(RunError, match="takes no output_router_logits"):
        model(X, output_router_logits=True)


def test_features_and_images(tmp_path: Path) -> None:
    wrapped().save_pretrained(tmp_path)
    features = AutoModel.from_pretrained(tmp_path).eval()
    assert len(features(X, output_router_logits=True).router_logits) == 2
    assert "aux_loss" not in features(X)
    text = """
    seqblocks: 1
    model:
      input: {image: {size: 8, channels: 1}}
      steps: [patch_embed: {patch: 4, features: 8}, experts: {count: 2, steps: [linear: 8]}, pool, classifier: 3]
    """
    model = hf.wrap(seqblocks.build_text(text, seed=0), router_aux_loss_coef=0.5).train()
    out = model(torch.randn(2, 1, 8, 8), labels=torch.tensor([0, 2]))
    expected = torch.nn.functional.cross_entropy(out.logits, torch.tensor([0, 2]))
    torch.testing.assert_close(out.loss, expected + 0.5 * out.aux_loss)
    assert len(model.eval()(torch.randn(2, 1, 8, 8), output_router_logits=True).router_logits) == 1


@pytest.mark.slow
def test_a_compiled_training_step_adds_them_too() -> None:
    model = hf.wrap(seqblocks.build_text(TEXT, set={"depth": 1}, seed=0)).train()
    out = torch.compile(model, backend="eager", fullgraph=True)(X, labels=X, attention_mask=torch.ones_like(X))
    torch.testing.assert_close(out.loss, model(X, labels=X).loss)
