"""Run models on several devices with torch's own engines: sharding, tensor, sequence and pipeline parallelism."""

from seqblocks.distributed.checkpoint import clip_gradients, load_weights, pieces
from seqblocks.distributed.fsdp import shard
from seqblocks.distributed.pipeline import pipeline_stage
from seqblocks.distributed.plan import tensor_plan
from seqblocks.distributed.sequence import SequenceParallel, sequence_parallel
from seqblocks.distributed.tensor import tensor_parallel

__all__ = [
    "SequenceParallel",
    "clip_gradients",
    "load_weights",
    "pieces",
    "pipeline_stage",
    "sequence_parallel",
    "shard",
    "tensor_parallel",
    "tensor_plan",
]
