"""Use specs as models of transformers. Importing this module registers them with AutoConfig, AutoModel etc.

`AutoModelForCausalLM.from_pretrained` then reads folders written by `seqblocks.save`, and `seqblocks.load` reads
folders written by `save_pretrained`. Requires the extra `hub`.
"""

from seqblocks.hf.cache import StateCache
from seqblocks.hf.config import SeqblocksConfig
from seqblocks.hf.library import transformers
from seqblocks.hf.modeling import (
    SeqblocksForCausalLM,
    SeqblocksForImageClassification,
    SeqblocksModel,
    SeqblocksPreTrainedModel,
    wrap,
)
from seqblocks.hf.training import register_class_names, use_decay_rules

__all__ = [
    "SeqblocksConfig",
    "SeqblocksForCausalLM",
    "SeqblocksForImageClassification",
    "SeqblocksModel",
    "SeqblocksPreTrainedModel",
    "StateCache",
    "wrap",
]

transformers.AutoConfig.register(SeqblocksConfig.model_type, SeqblocksConfig, exist_ok=True)
transformers.AutoModel.register(SeqblocksConfig, SeqblocksModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(SeqblocksConfig, SeqblocksForCausalLM, exist_ok=True)
transformers.AutoModelForImageClassification.register(
    SeqblocksConfig, SeqblocksForImageClassification, exist_ok=True
)
register_class_names()
use_decay_rules()
