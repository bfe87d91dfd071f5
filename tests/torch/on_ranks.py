"""Functions that tests/torch/test_distributed.py runs on each of two ranks; see tests/torch/ranks.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import seqblocks
from seqblocks.distributed import (
    clip_gradients,
    load_weights,
    pieces,
    pipeline_stage,
    sequence_parallel,
    shard,
    tensor_parallel,
)

WORDS = 32
SPECS = {
    # nested repeats, ties, parameters in two precisions in one step
    "nested": """
seqblocks: 1
use: [xlstm, mamba]
model:
  input: {tokens: 32}
  steps:
    - embed: 16
    - repeat:
        name: outer
        times: 1
        steps:
          - mamba_block: {dim: 16, layers: 4, state: 4}
          - repeat: {name: inner, times: 2, steps: [{mlstm_block: {dim: 16, heads: 2}}]}
          - residual: [rms_norm, {centaurus: {mode: neck, state: 4, sub_states: 2}}]
    - rms_norm
    - unembed: {tie: embed, bias: false}
""",
    # layers that share parameters of others, inside and outside their repeat; a scan of two directions
    "shared": """
seqblocks: 1
use: [mamba]
model:
  input: {tokens: 32}
  steps:
    - embed: 16
    - linear: {features: 16, name: mix}
    - repeat:
        name: loop
        times: 3
        share: [residual.mixer]
        steps: [{residual: [rms_norm, {mamba_mixer: {dim: 16, state: 4, name: mixer}}, {linear: 16}]}]
    - repeat:
        name: last
        times: 2
        steps:
          - residual:
              - rms_norm
              - linear: {features: 16, share: mix}
              - scan:
                  order: [forward, reverse]
                  own: [log_decay.A_log]
                  merge: sum
                  steps: [{linear: {features: 16, name: gates}}, {log_decay: {kind: softplus}}]
    - unembed: {bias: false}
""",
    # a value besides the stream that later layers read
    "stages": """
seqblocks: 1
use: [mamba]
model:
  input: {tokens: 32}
  steps:
    - embed: {features: 16, as: embedded}
    - repeat:
        name: layers
        times: 4
        steps:
          - add: {with: embedded, when: layer > 0}
          - mamba_block: {dim: 16, state: 4}
    - unembed: {bias: false}
""",
    # heads, channels, hidden features; one key head for all queries; splits along joined wires; experts
    "split": """
seqblocks: 1
use: [xlstm, mamba, transformer]
model:
  input: {tokens: 32}
  steps:
    - embed: 16
    - repeat:
        name: layers
        pattern: m s a e
        m: [{mlstm_block: {dim: 16, heads: 2}}]
        s: [{mamba_block: {dim: 16, state: 4}}]
        a:
          - attention_layer: {dim: 16, heads: 4, kv_heads: 1}
          - residual: [rms_norm, {swiglu: {hidden: 8, bias: true}}]
        e:
          - residual:
              - rms_norm
              - experts: {count: 2, top: 1, steps: [{linear: 8}, gelu, {linear: {features: 16, name: down}}]}
    - unembed: {tie: embed, bias: false}
""",
}


FEATURES = "seqblocks: 1\nmodel: {input: {features: 4}, steps: [{linear: 4}]}"


def tokens(count: int = 4, length: int = 12) -> torch.Tensor:
    return torch.randint(0, WORDS, (count, length), generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x).double().flatten(0, 1), x.flatten())


def _part(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x[2 * rank : 2 * rank + 2]


def _mean(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


def _whole_gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def _sharded(text: str, built: str, **options: Any) -> Any:
    model = shard(seqblocks.build_text(text, dtype=built, device="meta"), **options)
    model.to_empty(device="cpu")
    model.reset_parameters(0)
    return model


def _compare(text: str, rank: int, dtype: str, **options: Any) -> dict[str, Any]:
    model = _sharded(text, dtype, **options)
    one = seqblocks.build_text(text, dtype=dtype)
    drawn = [name for name, p in one.named_parameters() if not torch.equal(p, model.get_parameter(name).full_tensor())]
    loss = loss_of(model, _part(tokens(), rank))
    loss.backward()
    return {"drawn otherwise": drawn, "loss": _mean(loss), "gradients": _whole_gradients(model)}


def nested_float32(rank: int, folder: Path) -> Any:
    return _compare(SPECS["nested"], rank, "float32", checkpointing=True)


def nested_bfloat16(rank: int, folder: Path) -> Any:
    return _compare(SPECS["nested"], rank, "bfloat16")


def shared_float32(rank: int, folder: Path) -> Any:
    found = _compare(SPECS["shared"], rank, "float32", reduce="sum")
    return {**found, "gradients": {name: x / 2 for name, x in found["gradients"].items()}}


def master_weights(rank: int, folder: Path) -> Any:
    """Train with float32 masters of bfloat16 layer parameters. Parameters that are float32 in the layers stay so."""
    model = _sharded(SPECS["nested"], "float32", dtype="bf16", checkpointing=True)
    seen = {}
    step = model.outer[0].mamba_block.residual.mixer.ssm
    step.register_forward_pre_hook(lambda module, args: seen.update(A_log=module.A_log.dtype, x=args[0].dtype))
    optimizer = torch.optim.AdamW(model.parameter_groups(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = loss_of(model, _part(tokens(), rank))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_mean(loss))
    features = shard(seqblocks.build_text(FEATURES), dtype="bf16")
    seen["output"] = features(torch.ones(1, 2, 4)).dtype
    return losses, seen, {str(p.dtype) for p in model.parameters()}


EXPERTS = """
seqblocks: 1
model:
  input: {features: 4}
  steps:
    - experts: {count: 4, top: 1, normalize: false, steps: [{repeat: {times: 1, steps: [{linear: 4}]}}]}
"""


def experts_without_tokens(rank: int, folder: Path) -> Any:
    """Run experts in eval mode, where one has no tokens on a rank: sharded, and with DDP, which reduces twice.

    Return the gradients of the sharded model, and the errors of its output without gradients and of DDP's gradients.
    """
    x = routed_tokens([[0, 1, 2], [0, 1, 3]][rank])
    model = shard(with_chosen_experts(seqblocks.build_text(EXPERTS, dtype="float64"))).eval()
    model(x).square().mean().backward()
    found = _whole_gradients(model)
    one = with_chosen_experts(seqblocks.build_text(EXPERTS, dtype="float64"))
    with torch.no_grad():
        wrong = {"output": float((model(x) - one(x)).abs().max())}
        wrong["stream"] = float((model.step(x[:, 2])[0] - one.step(x[:, 2])[0]).abs().max())
    replicated = DistributedDataParallel(one.eval())
    for _ in range(2):
        one.zero_grad()
        replicated(x).square().mean().backward()
    return found, wrong | {name: float((p.grad - found[name]).abs().max()) for name, p in one.named_parameters()}


def routed_tokens(experts: list[int]) -> torch.Tensor:
    """Return one sequence, each of whose tokens goes to the expert of this number."""
    return torch.eye(4, dtype=torch.float64)[experts].unsqueeze(0)


def with_chosen_experts(model: Any) -> Any:
    torch.nn.init.eye_(model.experts.router.weight)
    return model


def disagreements(rank: int, folder: Path) -> Any:
    """Return the errors of ranks whose weights, seeds or inputs differ."""

    def built(seed: int = 0, text: str = FEATURES) -> Any:
        return seqblocks.build_text(text, seed=seed)

    def frozen() -> Any:
        model = built()
        model.linear.bias.requires_grad_(rank == 0)
        return model

    meta = seqblocks.build_text(SPECS["split"], device="meta")  # without weights, which would differ
    split, x, ids = tensor_parallel(built(text=SPECS["split"])), torch.full((1, 2, 4), 1.0 + rank), tokens(1, 4)
    turned = ids.roll(rank, 1)
    with torch.no_grad():
        split.eval().step(ids[:, 0])  # plans the next steps
    cases = {
        "split": lambda: tensor_parallel(built(rank)),
        "sharded": lambda: shard(built(rank)),
        "parts of a sequence": lambda: sequence_parallel(built(rank)),
        "8 bits": lambda: shard(seqblocks.quantize(built(rank).eval(), smallest=1)),
        "one is frozen": lambda: shard(frozen()),
        "another model": lambda: shard(built(text=FEATURES if rank else FEATURES.replace("linear: 4", "layer_norm"))),
        "sharded over the ranks of its parts": lambda: shard(tensor_parallel(meta)),
        "parts of a sequence for parts of a model": lambda: sequence_parallel(split),
        "stage of a part": lambda: pipeline_stage(split, 0, 2),
        "stage of a shard": lambda: pipeline_stage(shard(built()), 0, 1),
        "seed": lambda: _sharded(FEATURES, "float32").reset_parameters(rank),
        "tokens": lambda: split(turned),
        "lengths": lambda: split(ids[:, : 2 + rank]),
        "resets": lambda: split(ids, resets=torch.arange(4)[None] == 1 + rank),
        "one token": lambda: torch.no_grad()(split.step)(turned[:, 0]),
        "samples": lambda: seqblocks.generate(split, ids, 20, temperature=100.0, seed=rank),
        "features": lambda: tensor_parallel(built(text=FEATURES.replace("linear: 4", "swiglu: {hidden: 4}")))(x),
        "context": lambda: tensor_parallel(built(text=CONTEXT)).init_state(1, context=x),
        "bounds": lambda: sequence_parallel(built())(x, cu_seqlens=torch.tensor([0, 1 + rank, 4])),
    }
    return {name: _message(case) for name, case in cases.items()}


CONTEXT = """
seqblocks: 1
model:
  inputs: {x: {features: 4}, context: {features: 4, length: 2}}
  steps: [{cross_attention: {q: x, k: context, v: context, heads: 2}}, {swiglu: {hidden: 4}}]
"""


def _message(case: Any) -> str:
    try:
        case()
    except seqblocks.SeqblocksError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def checkpoints(rank: int, folder: Path) -> Any:
    """Train a step, save with DCP and with `save`; then load on one rank, save again, and load on two."""
    text = SPECS["nested"]
    model = _sharded(text, "bfloat16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, _part(tokens(), rank)).backward()
    optimizer.step()
    stored = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(stored, checkpoint_id=folder / "two")
    seqblocks.save(model, folder / "saved")
    before = {name: p.full_tensor() for name, p in model.state_dict().items()}
    dist.barrier()
    if rank == 0:
        _through_one_rank(text, folder, before)
    dist.barrier()

    again = _sharded(text, "bfloat16")
    other = torch.optim.AdamW(again.parameters(), lr=1e-2)
    loaded = {"model": get_model_state_dict(again), "optimizer": get_optimizer_state_dict(again, other)}
    dcp.load(loaded, checkpoint_id=folder / "one")
    set_model_state_dict(again, loaded["model"])
    set_optimizer_state_dict(again, other, loaded["optimizer"])
    wrong = [name for name, p in again.state_dict().items() if not torch.equal(p.full_tensor(), before[name])]
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        first, second = (o.state[p]["exp_avg"].full_tensor() for o, p in ((optimizer, a), (other, b)))
        wrong += [] if torch.equal(first, second) else [f"{name}: exp_avg"]
    return wrong


def refused_folder(rank: int, folder: Path) -> Any:
    """Save to a folder that the first rank cannot write: no rank hangs, and each raises an error."""
    (folder / "file").touch()
    try:
        seqblocks.save(_sharded(SPECS["shared"], "float32"), folder / "file" / "model")
    except seqblocks.SeqblocksError as error:
        return type(error).__name__, str(error).replace(str(folder), "")


def refused_weights(rank: int, folder: Path) -> Any:
    """Load weights that only the first rank can read, from a missing or a damaged folder: the others raise, too."""
    found: list[Any] = []
    for model in (_sharded(SPECS["shared"], "float32"), tensor_parallel(seqblocks.build_text(SPECS["split"]))):
        whole = folder / f"whole{len(found)}"
        seqblocks.save(model, whole, extra={"rank": rank})
        found.append([torch.load(whole / "seqblocks.extra.pt")["rank"]])
        if rank:
            shutil.copytree(whole, folder / "damaged", dirs_exist_ok=True)
            data = bytearray((whole / "model.safetensors").read_bytes())
            data[-1] ^= 1
            (folder / "damaged" / "model.safetensors").write_bytes(data)
        for place in ("missing", "damaged"):
            try:
                load_weights(model, folder / place if rank else whole)
            except seqblocks.SeqblocksError as error:
                found[-1].append((type(error).__name__, str(error).replace(f"{folder}/", "")))
        load_weights(model, whole)
    return found


def split_model(rank: int, folder: Path) -> Any:
    """Split a model: check outputs, gradients and a stream, and weights on their way to a checkpoint and back."""
    text = SPECS["split"]
    one = seqblocks.build_text(text, dtype="float64")
    model = tensor_parallel(one)
    x = tokens()
    loss_of(one, x).backward()
    loss_of(model, x).backward()
    gradients = {name: model.tensor_shards.join(name, p.grad) for name, p in model.named_parameters()}
    wrong = {
        name: float((gradients[name] - p.grad).abs().max() / p.grad.abs().max()) for name, p in one.named_parameters()
    }
    norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
    wrong["the norm of all gradients"] = abs(float(norm) - clip_gradients(model, 0.5)) / float(norm)
    wrong |= {
        name: float((model.tensor_shards.take(name, p.grad) - model.get_parameter(name).grad).abs().max())
        for name, p in one.named_parameters()
    }

    one.eval(), model.eval()
    with torch.no_grad():
        expected = one(x)
        wrong["output"] = float((model(x) - expected).abs().max())
        state, outputs = None, []
        for t in range(x.shape[1]):
            y, state = model.step(x[:, t], state)
            outputs.append(y)
        wrong["stream"] = float((torch.stack(outputs, 1) - expected).abs().max())
    return wrong, _split_checkpoint(model, one, folder)


def _split_checkpoint(model: Any, one: Any, folder: Path) -> list[str]:
    """Save in parts, load whole, load in parts again, and save as one folder. Return the names that differ."""
    weights = get_model_state_dict(model)
    dcp.save(pieces(model, weights), checkpoint_id=folder / "pieces")
    seqblocks.save(model, folder / "whole")
    other = seqblocks.build_text(SPECS["split"], dtype="float64", seed=1)
    again = tensor_parallel(other)
    load_weights(again, folder / "whole")
    wrong = [f"{name} of a folder" for name, p in again.state_dict().items() if not torch.equal(p, weights[name])]
    again.reset_parameters(2)
    loaded = get_model_state_dict(again)
    dcp.load(pieces(again, loaded), checkpoint_id=folder / "pieces")
    set_model_state_dict(again, loaded)
    whole = get_model_state_dict(other)
    dcp.load(whole, checkpoint_id=folder / "pieces", no_dist=True)
    saved = seqblocks.load(folder / "whole")
    meta = tensor_parallel(seqblocks.build_text(SPECS["split"], dtype="float64", device="meta")).to_empty(device="cpu")
    meta.reset_parameters(0)
    wrong += [
        name
        for name, p in one.state_dict().items()
        if not (torch.equal(p, whole[name]) and torch.equal(p, saved.state_dict()[name]))
    ]
    own = model.state_dict()
    return wrong + [
        name
        for name, p in own.items()
        if not torch.equal(p, again.state_dict()[name]) or not torch.equal(p, meta.state_dict()[name])
    ]


def both_ways(rank: int, folder: Path) -> Any:
    """Shard the parts of a split model, on a mesh of 1 x 2."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = tensor_parallel(seqblocks.build_text(SPECS["split"], device="meta"), mesh["tensor"])
    shard(model, mesh["data"])
    model.to_empty(device="cpu")
    model.reset_parameters(0)
    loss = loss_of(model, tokens())
    loss.backward()
    gradients = {name: model.tensor_shards.join(name, p.grad.full_tensor()) for name, p in model.named_parameters()}
    dcp.save(pieces(model, get_model_state_dict(model)), checkpoint_id=folder / "both")
    one = seqblocks.build_text(SPECS["split"], seed=1)
    whole = get_model_state_dict(one)
    dcp.load(whole, checkpoint_id=folder / "both", no_dist=True)
    expected = seqblocks.build_text(SPECS["split"]).state_dict()
    return loss.item(), gradients, [name for name, p in expected.items() if not torch.equal(p, whole[name])]


def parts_of_sequences(rank: int, folder: Path) -> Any:
    """Shard parameters over data and split the sequence over other ranks, on a mesh of 1 x 2. Return the gradients, and
    the error where both are the same ranks."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "sequence"))
    found: list[Any] = []
    for axis in ("data", "sequence"):
        model = shard(seqblocks.build_text(SPECS["stages"]), mesh[axis])
        parallel = sequence_parallel(model, mesh["sequence"])
        losses = cross_entropy(parallel(parallel.part(tokens())).mT, parallel.part(tokens()), reduction="none")
        parallel.mean(losses).backward()
        try:
            parallel.sum_gradients()
            found.append(_whole_gradients(model))
        except seqblocks.UsageError as error:
            found.append(str(error))
    return found


def pipelined(rank: int, folder: Path) -> Any:
    """Run two stages, each sharded on its own mesh, with two micro-batches. Return the losses and gradients."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "data"))
    stage = pipeline_stage(seqblocks.build_text(SPECS["stages"], dtype="float64", device="meta"), rank, 2)
    shard(stage, mesh["data"])
    stage.to_empty(device="cpu")
    stage.reset_parameters(0)
    runner = PipelineStage(stage, rank, 2, torch.device("cpu"), group=mesh.get_group("stage"))
    schedule = ScheduleGPipe(runner, 2, lambda y, target: cross_entropy(y.flatten(0, 1), target.flatten()))
    losses: list[torch.Tensor] = []
    inputs = [tokens()] if rank == 0 else []
    schedule.step(*inputs, target=tokens() if rank else None, losses=losses)
    return [float(loss.detach()) for loss in losses], _whole_gradients(stage)


# Bundled models at small sizes: all those that have a plan, except those with inputs by name.
BUNDLED: dict[str, dict[str, Any]] = {
    "mlstm_small": {}, "hybrid_small": {}, "mamba_small": {}, "transformer_small": {}, "vil_digits": {},
    "samba_small": {}, "looped_small": {}, "zamba_small": {}, "mingru_small": {}, "minlstm_small": {},
    "xlstm_deltanet_small": {},
    "memoroid_agent": {}, "centaurus_mlstm": {}, "caduceus_small": {}, "jamba_small": {}, "kimi_linear_small": {},
    "qwen3_next_small": {}, "vil2_tiny": {"depth": 2, "dim": 32}, "mamba3_130m": {"dim": 64, "depth": 2},
    "rwkv7_0_4b": {"dim": 128, "depth": 2}, "gla_1_3b": {"dim": 64, "depth": 2}, "rwkv6_1_4b": {"dim": 128, "depth": 2},
    "gated_deltanet_1_3b": {"dim": 256, "depth": 1}, "transformer_125m": {"dim": 48, "depth": 1, "heads": 4},
}  # fmt: skip


def bundled_models(rank: int, folder: Path) -> Any:
    """Split bundled models in float64. Return by name the errors of outputs, gradients and streams."""
    wrong: dict[str, float] = {}
    for name, values in BUNDLED.items():
        one = seqblocks.build(name, set=values, dtype="float64").eval()
        model = tensor_parallel(one)
        wire, generator = one.spec.input, torch.Generator().manual_seed(2)
        axes = (2, wire.features, *wire.grid) if wire.kind == "image" else (2, 6, wire.features)
        x = torch.randn(axes, dtype=torch.float64, generator=generator)
        if wire.kind == "tokens":
            x = torch.randint(0, wire.features, (2, 6), generator=generator)
        expected, y = one(x), model(x)
        weight = torch.randn(y.shape, dtype=torch.float64, generator=generator)
        (expected * weight).sum().backward()
        (y * weight).sum().backward()
        wrong[name] = float(((y - expected).abs().max() / expected.abs().max()).detach())
        largest = max(float(p.grad.abs().max()) for p in one.parameters() if p.grad is not None)
        for path, p in model.named_parameters():
            whole = one.get_parameter(path).grad
            if whole is not None:
                wrong[f"{name}: {path}"] = float((p.grad - model.tensor_shards.take(path, whole)).abs().max()) / largest
    return wrong


def _through_one_rank(text: str, folder: Path, before: dict[str, torch.Tensor]) -> None:
    one = seqblocks.build_text(text, dtype="bfloat16", seed=1)
    optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
    loaded = {"model": get_model_state_dict(one), "optimizer": get_optimizer_state_dict(one, optimizer)}
    dcp.load(loaded, checkpoint_id=folder / "two", no_dist=True)
    set_model_state_dict(one, loaded["model"])
    set_optimizer_state_dict(one, optimizer, loaded["optimizer"])
    stored = {"model": get_model_state_dict(one), "optimizer": get_optimizer_state_dict(one, optimizer)}
    dcp.save(stored, checkpoint_id=folder / "one", no_dist=True)
    saved = seqblocks.load(folder / "saved")
    for name, p in one.state_dict().items():
        assert torch.equal(p, before[name]), name
        assert torch.equal(saved.state_dict()[name], p), name
