"""A plug-in for torchtitan (0.3): create its `ModelSpec` from a spec, to train the model with its trainer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from seqblocks import cost, graph
from seqblocks.analysis import check
from seqblocks.distributed.fsdp import layer_paths, outermost, shard
from seqblocks.errors import UnavailableError, UsageError
from seqblocks.graph import ModelSpec
from seqblocks.model.builder import build_model
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.weight_decay import decay_rules

# For these, torchtitan's trainer would clip gradients by the norm of one rank's part, and save that part as the
# whole parameter.
UNSUPPORTED = {
    "tp_enabled": "tensor parallelism", "cp_enabled": "context parallelism", "pp_enabled": "pipelines",
    "ep_enabled": "expert parallelism",
}  # fmt: skip


def model_spec(spec: str | os.PathLike[str], *, set: Mapping[str, Any] | None = None, seed: int = 0) -> Any:
    """Return torchtitan's `ModelSpec` for a spec given by path or bundled name, to pass to `Trainer.Config`.

    set: overrides, as `build` takes them. seed: of the weights, which are the same on any number of ranks. The trainer
    may shard parameters and checkpoint activations per layer; its other parallelisms raise UsageError. Raises SpecError
    for an invalid spec, UnavailableError without torchtitan.
    """
    try:
        from torchtitan.protocols.model_spec import ModelSpec as Titan
    except ImportError as error:
        raise UnavailableError(f"this needs torchtitan ({error}): pip install 'seqblocks[torchtitan]'") from None
    loaded = check.load_model(spec, set)
    config = _model_class().Config(spec=os.fspath(spec), set=dict(set or {}), seed=seed)
    return Titan(
        name="seqblocks", flavor=loaded.name, model=config, parallelize_fn=parallelize, pipelining_fn=None,
        post_optimizer_build_fn=exempt_from_decay, state_dict_adapter=None,
    )  # fmt: skip


@cache
def _model_class() -> Any:
    """Return the class of models that torchtitan builds, defined on first use because it requires torchtitan."""
    from torchtitan.protocols.model import BaseModel

    class Model(SequenceModel, BaseModel):
        """A built spec that follows torchtitan's model protocol, with unchanged parameter names."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseModel.Config):
            spec: str
            set: dict[str, Any] = field(default_factory=dict)
            seed: int = 0

            def load(self) -> ModelSpec:
                return check.load_model(self.spec, self.set)

            def update_from_config(self, *, config: Any, **_: Any) -> None:
                """Do nothing: the spec alone defines the model."""

            def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
                """Return the number of parameters, and the FLOPs per token in training (2 forward, 4 backward)."""
                spec = self.load()
                return graph.count(spec.graph), int(6 * (cost.macs(spec.graph, seq_len) or 0))

        def __init__(self, config: Any) -> None:
            built = build_model(config.load(), device="meta", dtype=torch.get_default_dtype())
            self.__dict__.update(built.__dict__)
            self._seed = config.seed

        def forward(  # type: ignore[override]
            self, x: torch.Tensor, positions: torch.Tensor | None = None, **inputs: Any
        ) -> Any:
            """Run the model. positions [batch, seq]: within packed documents; 0 begins a document."""
            if positions is not None and self.resets_obstacle is None:
                inputs["resets"] = (positions == 0).expand(x.shape[:2])
            return super().forward(x, **inputs)

        def init_states(self, *, buffer_device: Any = None) -> None:
            self.reset_parameters(self._seed)

        def verify_module_protocol(self) -> None:
            """Accept all modules: the spec initialises the parameters of steps."""

    return Model


def parallelize(
    model: Any, *, parallel_dims: Any, training: Any, parallelism: Any, compile_config: Any, ac_config: Any,
    dump_folder: str,
) -> Any:  # fmt: skip
    """Apply the parallelism of torchtitan's job. Gradients are summed, as its trainer divides by all tokens."""
    for name, what in UNSUPPORTED.items():
        if getattr(parallel_dims, name):
            raise UsageError(f"the plug-in for torchtitan does not support {what}: set its degree to 1")
    if training.enable_cpu_offload:
        raise UsageError("the plug-in for torchtitan does not offload parameters (training.enable_cpu_offload)")
    if compile_config.enable and "model" in compile_config.components:
        for path in outermost(list(layer_paths(model.graph))):
            model.get_submodule(path).compile(backend=compile_config.backend)
    names = ["fsdp" if parallel_dims.spmd_backend == "partial_dtensor" else "dp_shard"]
    if parallel_dims.dp_replicate_enabled:
        names.insert(0, "dp_replicate")
    return shard(
        model, parallel_dims.get_mesh(names), dtype=training.mixed_precision_param, reduce="sum",
        checkpointing=ac_config is not None,
        reshard_after_forward=parallelism.fsdp_reshard_after_forward != "never",
    )  # fmt: skip


def exempt_from_decay(optimizers: Iterable[torch.optim.Optimizer], model_parts: Iterable[Any], *others: Any) -> None:
    """Split the groups of built optimisers, so that weight decay spares the parameters that the spec exempts."""
    exempt = {key for part in model_parts for key, decays in decay_rules(part, part.graph).items() if not decays}
    for optimizer in optimizers:
        for group in [*optimizer.param_groups]:
            if group.get("weight_decay"):
                _split(optimizer, group, exempt)


def _split(optimizer: torch.optim.Optimizer, group: dict[str, Any], exempt: set[int]) -> None:
    """Move the exempt parameters of a group, with their names, to a new group without weight decay."""
    spared = [id(parameter) in exempt for parameter in group["params"]]
    if all(spared):
        group["weight_decay"] = 0.0
    elif any(spared):
        moved = {**group, "weight_decay": 0.0}
        for key in {"params", "param_names"} & group.keys():
            moved[key] = [each for each, is_spared in zip(group[key], spared, strict=True) if is_spared]
            group[key] = [each for each, is_spared in zip(group[key], spared, strict=True) if not is_spared]
        optimizer.add_param_group(moved)
