"""The routers of experts in a model of transformers: options in the config, balance losses, logits in the output."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import ImageClassifierOutput

from seqblocks.checkpoint.hf_config import ROUTERS
from seqblocks.errors import RunError, UsageError
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.experts import LOSSES, Experts, Routed
from seqblocks.runtime.repeat import has_checkpointed_layers

WEIGHTS = {"router_aux_loss_coef": "balance", "router_z_loss_coef": "router_z"}  # the loss that each entry multiplies


def complete(config: Any, model: SequenceModel) -> None:
    """Set the entries of a config that experts need to their defaults, if a model has experts.

    Raises UsageError for invalid entries, and if they are set for a model without experts.
    """
    given = {name: getattr(config, name) for name in ROUTERS if getattr(config, name, None) is not None}
    for name in WEIGHTS.keys() & given.keys():
        weight = given[name]
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
            raise UsageError(f"{name} must be a number, at least 0, not {weight!r}")
    if not model.has_experts:
        for name, value in given.items():
            if value:
                raise UsageError(f"{model.spec.name} has no `experts` step: omit {name}={value!r} from the config")
        return
    for name, default in ROUTERS.items():
        setattr(config, name, given.get(name, default))


@dataclass
class MoeImageClassifierOutput(ImageClassifierOutput):
    """The output of an image classifier with experts."""

    aux_loss: Tensor | None = None
    router_logits: tuple[Tensor, ...] | None = None


@contextlib.contextmanager
def recording(model: SequenceModel, records: bool) -> Iterator[None]:
    """If `records`, make a model keep the choices of its routers in any mode, as it does in training mode."""
    model.keeps_routing = records
    try:
        yield
    finally:
        model.keeps_routing = False


def results(model: SequenceModel, config: Any, mask: Any, shows_logits: bool) -> tuple[dict[str, Any], Tensor | None]:
    """Return what a call adds to its output, and what it adds to the loss, or None.

    The output has `aux_loss`, the sum of the balance losses of all `experts` steps, without its weight in the loss, and
    if `shows_logits` also `router_logits`: a tuple of tensors [tokens, experts]. mask: attention_mask [batch, seq];
    padding does not count. Raises RunError if the balance loss would have no gradient.
    """
    routed = model.latest_routing
    if not routed:
        return {}, None
    weights = {kind: getattr(config, name) for name, kind in WEIGHTS.items()}
    totals = {kind: _total(routed, kind, mask) for kind, weight in weights.items() if weight or shows_logits}
    added = [weights[kind] * total for kind, total in totals.items() if weights[kind]]
    if added:
        _check_gradient(model, routed)
    found: dict[str, Any] = {"aux_loss": totals["balance"]} if "balance" in totals else {}
    if shows_logits:
        found["router_logits"] = tuple(each.logits for calls in routed.values() for each in calls)
    return found, sum(added[1:], added[0]) if added else None


def _total(routed: dict[str, list[Routed]], kind: str, mask: Any) -> Tensor:
    losses = [LOSSES[kind](calls, _real(calls, mask)) for calls in routed.values()]
    return torch.stack(losses).sum()


def _real(calls: list[Routed], mask: Any) -> Tensor | None:
    """Return which of the routed tokens are not padding, or None if all count, or if they are not those of the mask."""
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    counts = {len(each.logits) // len(mask) for each in calls}
    columns = max(counts)
    if len(counts) > 1 or columns > mask.shape[1] or any(len(each.logits) % len(mask) for each in calls):
        return None
    return mask[:, mask.shape[1] - columns :].bool().flatten().repeat(len(calls))


def _check_gradient(model: SequenceModel, routed: dict[str, list[Routed]]) -> None:
    """Raise RunError if checkpointing hides the routers' computation from the losses."""
    if not torch.is_grad_enabled() or not has_checkpointed_layers(model):
        return
    routers = [module._modules["router"] for module in model.modules() if isinstance(module, Experts)]
    trained = any(p.requires_grad for router in routers if router for p in router.parameters())
    if trained and not all(each.logits.requires_grad for calls in routed.values() for each in calls):
        how = "pass gradient_checkpointing_kwargs={'use_reentrant': False}, or set router_aux_loss_coef=0 in the config"
        raise RunError(f"reentrant checkpointing gives the balance losses of experts no gradient: {how}")


def with_penalty(loss: Tensor, penalty: Tensor | None, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Add weighted balance losses to a loss.

    The Trainer divides the loss of each call by the number of all labels in its batch, `num_items_in_batch`. The
    balance losses of the calls are then averaged with the same weights. labels: those that count unless -100.
    """
    if penalty is None:
        return loss
    share = 1 if num_items_in_batch is None else (labels != -100).sum() / num_items_in_batch
    return loss + (penalty * share).to(loss.dtype)
