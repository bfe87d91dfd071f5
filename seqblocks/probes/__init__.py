"""Small synthetic tasks that tell mixers apart: what they can remember, recall and keep track of."""

from seqblocks.probes.batches import Batch, Published, Task
from seqblocks.probes.model import fit_task
from seqblocks.probes.paper import PAPER
from seqblocks.probes.tasks import TASKS
from seqblocks.probes.training import Result, probe

__all__ = ["PAPER", "TASKS", "Batch", "Published", "Result", "Task", "fit_task", "probe"]
