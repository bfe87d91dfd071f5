"""Record the features between the layers of a model, for `output_hidden_states`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from seqblocks.errors import RunError
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.repeat import outer_repeats


@contextlib.contextmanager
def record_layers(model: SequenceModel) -> Iterator[dict[int, Tensor]]:
    """Yield the features of the latest call inside: the input of the first layer, then the output of each layer.

    The layers are those of the outermost repeats. Raises RunError if there are none.
    """
    layers = [layer for repeat in outer_repeats(model) for layer in repeat if layer is not None]
    if not layers:
        raise RunError(f"{model.spec.name} has no `repeat`, so it has no hidden states between layers")
    features: dict[int, Tensor] = {}
    handles = [layers[0].register_forward_pre_hook(partial(_record_input, features))]
    for at, layer in enumerate(layers, 1):
        handles.append(layer.register_forward_hook(partial(_record_output, features, at)))
    try:
        yield features
    finally:
        for handle in handles:
            handle.remove()


def _record_input(features: dict[int, Tensor], layer: Any, inputs: Any) -> None:
    features[0] = inputs[0]


def _record_output(features: dict[int, Tensor], at: int, layer: Any, inputs: Any, output: Tensor) -> None:
    features[at] = output
