"""Tell transformers what it otherwise derives from names of classes and parameters: labels to shift, weight decay."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import nn
from transformers.models.auto import modeling_auto
from transformers.trainer import Trainer

from seqblocks.checkpoint.hf_config import CAUSAL_LM, IMAGE_CLASSIFICATION, MODEL_TYPE
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.weight_decay import decay_rules


def register_class_names() -> None:
    """Add our classes to the tables by which the Trainer shifts labels that it smooths, and names tasks in cards."""
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MODEL_TYPE] = CAUSAL_LM
    modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES[MODEL_TYPE] = IMAGE_CLASSIFICATION


def use_decay_rules() -> None:
    """Make the Trainer group the parameters of our models as `parameter_groups` does, and all others by their names.

    The Trainer asks only itself which names decay, so its method is extended.
    """
    by_names = Trainer.get_decay_parameter_names

    @wraps(by_names)
    def get_decay_parameter_names(trainer: Any, model: nn.Module) -> list[str]:
        rules: dict[int, bool] = {}
        for module in model.modules():
            if isinstance(module, SequenceModel):
                rules |= decay_rules(module, module.graph)
        found: list[str] = by_names(trainer, model)
        if not rules:
            return found
        others = {*found}
        return [name for name, p in model.named_parameters(remove_duplicate=False) if rules.get(id(p), name in others)]

    Trainer.get_decay_parameter_names = get_decay_parameter_names
