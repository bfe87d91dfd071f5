"""Models on several devices, by torch's own engines: sharded parameters (FSDP2), checkpoints on any number of ranks."""

from seqblocks.distributed.fsdp import shard
from seqblocks.distributed.sequence import SequenceParallel, sequence_parallel

__all__ = ["SequenceParallel", "sequence_parallel", "shard"]
