"""The typed graph of a model, with all numbers, names and shapes resolved.

A graph is a list of nodes in execution order. Values are numbered across the whole model; a node with bodies (a block,
a combinator) may read outer values, its captures. Graphs can be printed and counted without torch.
"""

from seqblocks.graph.model import ModelSpec, SpecSource
from seqblocks.graph.names import (
    Named, buffers, children, count, count_node, directed, node_parameters, owner_of, parameters,
)  # fmt: skip
from seqblocks.graph.nodes import (
    DIRECTION_NAMES, SHARED, BlockNode, CellNode, ChooseNode, EachNode, Entry, ExpertsNode, Graph, Node, OpNode,
    ParallelNode, PrimitiveNode, RepeatNode, ResidualNode, ScanNode, SeparateNode, Source, UnknownNode, bodies,
    direction_name, is_context, is_exact, is_prefix_join, is_prefixed, is_reversible, join, moves_tokens,
    spent_values, walk, walk_named,
)  # fmt: skip
from seqblocks.graph.streams import (
    begins, frame_size, has_prefix, is_ordered, resets_obstacle, stream_obstacle, streamed, takes_frames,
)  # fmt: skip
