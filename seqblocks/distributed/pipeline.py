"""Pipeline stages: consecutive parts of a model, each on its own ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks import graph
from seqblocks.errors import RunError, UsageError
from seqblocks.graph import Graph, ModelSpec, Node, RepeatNode
from seqblocks.model.quantize import check_not_quantized
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.body import Body
from seqblocks.runtime.call import Call, Grid, Gridded
from seqblocks.runtime.grids import grid_sources, has_grid
from seqblocks.runtime.initialise import draw_all
from seqblocks.runtime.modules import Place, take_buffers, take_modes
from seqblocks.runtime.primitive import Primitive
from seqblocks.runtime.shards import is_sharded
from seqblocks.runtime.shared_parameters import connect, tie


class Stage(Body):
    """A stage: some steps of a model and some layers of its repeats, with their names in the model.

    Its inputs are the outputs of the previous stage, and the first stage takes the model's inputs, in order. The last
    stage returns the model's output, or a tuple of several. This is the interface that
    `torch.distributed.pipelining.PipelineStage` requires.
    """

    def __init__(self, part: Graph, spec: ModelSpec, types: dict[int, Any], is_followed: bool) -> None:
        shared = [item for item in graph.parameters(part, shared=True) if item.shared]
        sources = grid_sources(part, types)
        place = Place(types, sources, "", frozenset(item.name for item in shared), exact=graph.is_exact(spec.graph))
        super().__init__(part, place, spec.name)
        connect(self, shared)
        self.graph = part
        self._grids = {value: types[value].grid for value in part.reads if has_grid(types[value])}
        passed = {name: value for name, value in part.outputs.items() if is_followed and value in sources}
        self._passed = {name: Gridded(types[value].grid, sources[value], None) for name, value in passed.items()}

    def forward(self, *tensors: Tensor) -> Any:  # type: ignore[override]
        grid = Grid(next(iter(self._grids.values()), None), tuple(self._grids.values()), dict(self._grids))
        values, _ = self._run(dict(zip(self._reads, tensors, strict=True)), Call(self.training, grid=grid))
        self._check_grids(values, grid)
        results = tuple(values.values())
        return results[0] if len(results) == 1 else results

    def _check_grids(self, values: Mapping[str, Tensor], grid: Grid) -> None:
        """Raise RunError if the next stage, which receives only tensors, would read rows and columns that are wrong."""
        for name, read in self._passed.items():
            grid.step = read
            tokens = values[name].shape[1]
            found, expected = grid.of(tokens), read.expected
            if found and expected and found != expected and tokens == expected[0] * expected[1]:
                raise RunError(
                    f"the next stage of the pipeline expects tokens of {expected[0]} rows and {expected[1]} columns, "
                    f"as in the spec, not of {found[0]} and {found[1]}: build the model for images of this size"
                )

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Initialise all parameters to the values that the whole model has with this seed."""
        draw_all(self, self.graph, seed)
        for step in self.modules():
            if isinstance(step, Primitive):
                step.reset_buffers()
        self.tie()

    def tie(self) -> None:
        """Restore shared parameters of tied names."""
        tie(self, self.graph)


def pipeline_stage(model: SequenceModel, index: int, stages: int) -> Stage:
    """Return a stage of a model, which uses the model's own parameters and buffers. It stays on "meta" if the model is.

    The model is cut between its steps and between the layers of its repeats, so that the stages have about as many
    multiply-accumulates each. Raises UsageError if it cannot be cut into that many stages, if it is divided over
    ranks already, or if steps of two stages share parameters, since each stage would train its own copy.
    """
    if not isinstance(model, SequenceModel):
        raise UsageError(f"pipeline_stage needs a model from seqblocks.build, not {type(model).__name__}")
    check_not_quantized(model, "pipeline_stage")
    if model.tensor_shards or any(is_sharded(p) for p in model.parameters()):
        raise UsageError("the model is split or sharded already: cut it into stages first, then shard a stage")
    if type(index) is not int or type(stages) is not int:
        raise UsageError(f"index and stages must be whole numbers, not {index!r} and {stages!r}")
    if not 0 <= index < stages:
        raise UsageError(f"there is no stage {index} among {stages} stages")
    parts, types = stage_graphs(model.spec, stages)
    with torch.device("meta"):
        stage = Stage(parts[index], model.spec, types, is_followed=index < stages - 1)
    for name, _ in list(stage.named_parameters()):
        path, _, leaf = name.rpartition(".")
        stage.get_submodule(path).register_parameter(leaf, model.get_parameter(name))
    take_buffers(stage, model, shared=True)
    stage.tie()
    take_modes(stage, model)
    return stage


class Segment(NamedTuple):
    """An indivisible part of a model: a step, or a layer of a repeat."""

    node: Node
    label: str
    work: int


def stage_graphs(spec: ModelSpec, stages: int) -> tuple[list[Graph], dict[int, Any]]:
    """Return the graphs of a model's stages, and the types of all values, including new ones between stages."""
    segments = list(_segments(spec.graph))
    if len(segments) < stages:
        raise UsageError(f"{spec.name} has {len(segments)} steps and layers, too few for {stages} stages")
    types = dict(spec.types)
    bounds = _bounds([segment.work for segment in segments], stages)
    nodes = [list(_nodes(segments[a:b])) for a, b in pairwise(bounds)]
    _link(nodes, types)
    reads = (spec.graph.input, *spec.graph.ports.values())
    results = dict(spec.graph.outputs) or {"output": spec.graph.result}
    parts: list[Graph] = []
    for at, inside in enumerate(nodes):
        inputs = reads if at == 0 else tuple(parts[-1].outputs.values())
        later = {value for group in nodes[at + 1 :] for node in group for value in node.reads} | set(results.values())
        known = dict.fromkeys((*inputs, *(value for node in inside for value in node.made)))
        crossing = {f"value {value}": value for value in known if value in later}
        outputs = results if at == stages - 1 else crossing
        parts.append(Graph(inputs[0], inside, next(iter(outputs.values())), inputs[1:], outputs=outputs))
    _check_shared(spec, parts)
    return parts, types


def _segments(body: Graph) -> Iterator[Segment]:
    for node in body.nodes:
        if isinstance(node, RepeatNode) and node.bodies:
            for label, layer in node.bodies.items():
                yield Segment(node, label, _work(layer.nodes))
        else:
            yield Segment(node, "", _work([node]))


def _work(nodes: list[Node]) -> int:
    return sum(node.macs + _work([n for body in node.active.values() for n in body.nodes]) for node in nodes)


def _bounds(work: list[int], stages: int) -> list[int]:
    """Return the bounds of the stages that minimise the work of the largest one."""
    best: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {(0, 0): (0, (0,))}
    sums = [0]
    for each in work:
        sums.append(sums[-1] + each)
    for stage in range(1, stages + 1):
        for end in range(stage, len(work) + 1):
            options = ((at, best[stage - 1, at]) for at in range(stage - 1, end) if (stage - 1, at) in best)
            best[stage, end] = min((max(most, sums[end] - sums[at]), (*bounds, end)) for at, (most, bounds) in options)
    return list(best[stages, len(work)][1])


def _nodes(segments: list[Segment]) -> Iterator[Node]:
    """Yield the nodes of a stage; a repeat keeps only the layers in this stage."""
    at = 0
    while at < len(segments):
        node = segments[at].node
        labels = [segment.label for segment in segments[at:] if segment.node is node]
        at += len(labels)
        whole = not isinstance(node, RepeatNode) or not node.bodies or len(labels) == len(node.bodies)
        yield node if whole else _with_layers(node, labels)


def _with_layers(node: Node, labels: list[str]) -> Node:
    """Return a repeat with some of its layers. What they export, layers of later stages may read."""
    bodies = {label: node.bodies[label] for label in labels}
    exports = {value: value for body in bodies.values() for value in body.exports}
    return node._replace(bodies=bodies, exports=exports)


def _link(nodes: list[list[Node]], types: dict[int, Any]) -> None:
    """Give each repeat that continues in the next stage a new output value."""
    for group, following in pairwise(nodes):
        last, first = group[-1], following[0]
        if isinstance(last, RepeatNode) and first.name == last.name:
            fresh = max(types) + 1
            types[fresh] = last.type
            group[-1] = last._replace(outputs=(fresh,), split=())
            following[0] = first._replace(inputs={**first.inputs, "x": (fresh,)})


def _check_shared(spec: ModelSpec, parts: list[Graph]) -> None:
    places = {item.name: at for at, part in enumerate(parts) for item in graph.parameters(part, shared=True)}
    for item in graph.parameters(spec.graph, shared=True):
        if item.tied and places[item.name] != places[item.tied]:
            where = f"stages {places[item.tied]} and {places[item.name]}"
            raise UsageError(f"{item.name} and {item.tied} share a parameter, but would be in {where}: untie them")


