"""Arguments of calls as transformers passes them: which are accepted, what they must be, and what they select."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqblocks.errors import RunError
from seqblocks.graph import ModelSpec

# Accepted arguments without an effect: for the loss; positions, which transformers 5.0 passes although the cache has
# them; and bounds of packed sequences, which position_ids contain, too.
OF_THE_LOSS = {"num_items_in_batch"}
OF_THE_CACHE = {"cache_position"}
OF_PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
OPTIONS = {"output_hidden_states", "output_router_logits", "return_dict"}
IN_KWARGS = OPTIONS | OF_THE_LOSS | OF_THE_CACHE | OF_PACKED  # accepted in `kwargs`


def reason(name: str) -> str:
    """Return why an argument of other models is not supported."""
    reasons = {
        "inputs_embeds": ": it reads token ids, and its embedding is a step of the spec",
        "output_attentions": ": no step stores its attention weights",
    }
    return reasons.get(name, "")


def one_cache(first: Any, second: Any) -> Any:
    """Return the cache that was passed under one of its two names, or None. Raises RunError for two of them."""
    if first is not None and second is not None:
        raise RunError("past_key_values and cache are two names of one argument: pass one of them")
    return second if first is None else first


def check_tokens(x: Any, spec: ModelSpec) -> None:
    if spec.input.kind not in ("tokens", "sequence") or not isinstance(x, Tensor):
        raise RunError(f"attention_mask and position_ids need tokens, and {spec.name} reads {spec.input}")


def without_packing(given: dict[str, Any], positions: Any, token_types: Any) -> dict[str, Any]:
    """Remove arguments that only repeat position_ids, and token types that are all 0."""
    if isinstance(token_types, Tensor) and bool(token_types.any()):
        raise RunError("token_type_ids must all be 0: the model has a single token type")
    known = OF_THE_CACHE if positions is None else OF_THE_CACHE | OF_PACKED
    return {name: value for name, value in given.items() if name not in known}


def check_labels(labels: Any, y: Tensor) -> None:
    """Raise RunError unless there is one label per token."""
    found = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
    if not isinstance(labels, Tensor) or labels.shape != y.shape[:2] or labels.is_floating_point():
        raise RunError(f"labels must be token ids {list(y.shape[:2])}, or -100 to ignore a position, not {found}")


def check_logits_to_keep(value: Any) -> None:
    """Raise RunError unless the argument is a number of tokens, or a tensor of their positions."""
    if isinstance(value, Tensor) and value.ndim == 1 and value.dtype in (torch.int64, torch.int32, torch.bool):
        return
    if not isinstance(value, int | torch.SymInt) or value < 0:
        found = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise RunError(f"logits_to_keep must be a number of tokens or a tensor [n] of positions, not {found}")


def last(y: Tensor, positions: int | Tensor) -> Tensor:
    """Return the outputs of this number of last tokens, of all for 0, or of the positions in a tensor."""
    if isinstance(positions, Tensor):
        return y[:, positions]
    return y[:, -positions:] if positions else y


def cast(x: Any, dtype: torch.dtype) -> Any:
    """Return floating-point inputs in the model's dtype, as other models in transformers do."""
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
