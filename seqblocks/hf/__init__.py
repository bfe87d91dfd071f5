"""Models of specs in transformers. Importing this module registers them with AutoConfig, AutoModel etc.

A folder that `seqblocks.save` wrote is then what `AutoModelForCausalLM.from_pretrained` reads, and `seqblocks.load`
reads what `save_pretrained` wrote. Needs the extra `hub`.
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
