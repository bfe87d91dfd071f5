"""Small synthetic tasks that tell mixers apart: what they can remember, recall and keep track of."""

from seqblocks.probes.tasks import TASKS, Batch, Task
from seqblocks.probes.training import Result, probe

__all__ = ["TASKS", "Batch", "Result", "Task", "probe"]
