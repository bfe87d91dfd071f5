"""The architectures of llama.cpp that GGUF files are written for: their steps, tensors and metadata.

Names, shapes and metadata are those that `src/models/<name>.cpp` of ggml-org/llama.cpp read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from seqblocks.checkpoint.gguf_steps import Step
from seqblocks.errors import RunError
from seqblocks.graph import ModelSpec, walk

Rows = tuple[tuple[str, dict[str, str]], ...]
"""The verbs of consecutive steps, each with the tensors of its parameters. Parameters of one tensor are stacked."""


class Sizes(NamedTuple):
    """The sizes of a model: the config.json of transformers that describes it, and the metadata of llama.cpp.

    text: if `families` has no such model, the spec to format with `config` and the sizes of all models.
    """

    config: dict[str, Any]
    metadata: dict[str, int]
    groups: int = 1
    text: str = ""


class Architecture(NamedTuple):
    """An architecture of llama.cpp: the steps before the repeated layers, those of a layer, and those after them.

    The tensors of `layer` are named without `blk.N.`; N is `earlier` in the first of the repeated layers. sizes: reads
    the steps of this layer, and the width of the model. epsilon: the name of that of the norms. copies: tensors that
    llama.cpp requires and that may be absent here, with those that it gets instead.
    """

    name: str
    first: Rows
    layer: Rows
    last: Rows
    sizes: Callable[[list[Step], int], Sizes]
    epsilon: str = "attention.layer_norm_rms_epsilon"
    earlier: int = 0
    copies: Mapping[str, str] = {}


def tensor_shape(rows: Rows, steps: list[Step], tensor: str) -> tuple[int, ...]:
    """Return the shape of the first parameter of a tensor. Raises RunError if the steps have none."""
    for step, (_, tensors) in zip(steps, rows, strict=True):
        for own, name in tensors.items():
            if name == tensor and own in step.node.parameters:
                return step.node.parameters[own].shape
    raise RunError(f"there is no parameter for {tensor}")


# --- Mamba -------------------------------------------------------------------------------------------------------


def _mamba(layer: list[Step], dim: int) -> Sizes:
    op: Any = layer[5].node.op
    inner, rank = layer[4].node.parameters["weight"].shape
    kernel = _kernel(layer)
    if inner != 2 * dim:
        raise RunError(f"llama.cpp's mamba has {2 * dim} inner features at width {dim}")
    return Sizes(
        {"state_size": op.state_size, "conv_kernel": kernel, "time_step_rank": rank},
        {
            "feed_forward_length": 0,
            "ssm.inner_size": inner,
            "ssm.state_size": op.state_size,
            "ssm.conv_kernel": kernel,
            "ssm.time_step_rank": rank,
        },
    )


def _mamba2(layer: list[Step], dim: int) -> Sizes:
    op: Any = layer[6].node.op
    inner = layer[9].node.parameters["weight"].shape[1]
    heads, groups, kernel = layer[3].node.parameters["bias"].shape[0], op.heads, _kernel(layer)
    state = (layer[2].node.parameters["weight"].shape[0] - inner) // (2 * groups)
    sizes = {"state_size": state, "n_groups": groups, "num_heads": heads, "head_dim": inner // heads}
    metadata = {
        "feed_forward_length": 0,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.conv_kernel": kernel,
        "ssm.time_step_rank": heads,
        "ssm.group_count": groups,
    }
    return Sizes({**sizes, "conv_kernel": kernel, "expand": inner / dim}, metadata, groups)


def _kernel(layer: list[Step]) -> int:
    return layer[2].node.parameters["weight"].shape[-1]


EMBED: Rows = (("embed", {"weight": "token_embd.weight"}),)
UNEMBED: Rows = (("unembed", {"weight": "output.weight"}),)
RMS_LAST: Rows = (("rms_norm", {"weight": "output_norm.weight"}), *UNEMBED)
CONV = {"weight": "ssm_conv1d.weight", "bias": "ssm_conv1d.bias"}
MAMBA: Rows = (
    ("rms_norm", {"weight": "attn_norm.weight"}),
    ("linear", {"weight": "ssm_in.weight"}),
    ("causal_conv", CONV),
    ("linear", {"weight": "ssm_x.weight"}),
    ("linear", {"weight": "ssm_dt.weight", "bias": "ssm_dt.bias"}),
    ("ssm", {"A_log": "ssm_a", "D": "ssm_d"}),
    ("linear", {"weight": "ssm_out.weight"}),
    ("residual", {}),
)
MAMBA2: Rows = (
    ("rms_norm", {"weight": "attn_norm.weight"}),
    ("linear", {"weight": "ssm_in.weight"}),
    ("causal_conv", CONV),
    ("time_step", {"bias": "ssm_dt.bias"}),
    ("log_decay", {"A_log": "ssm_a"}),
    ("gate", {}),
    ("linear_attention", {}),
    ("learnable_skip", {"weight": "ssm_d"}),
    ("rms_norm", {"weight": "ssm_norm.weight"}),
    ("linear", {"weight": "ssm_out.weight"}),
    ("residual", {}),
)


# --- RWKV --------------------------------------------------------------------------------------------------------


def _norm(tensor: str) -> tuple[str, dict[str, str]]:
    return ("layer_norm", {"weight": f"{tensor}.weight", "bias": f"{tensor}.bias"})


def _linear(tensor: str, bias: str = "") -> tuple[str, dict[str, str]]:
    return ("linear", {"weight": f"{tensor}.weight"} | ({"bias": f"{bias}.weight"} if bias else {}))


LERP = ("lerp", {"weight": "time_mix_lerp_fused.weight"})  # six in a layer, stacked in the order r, w, k, v, a, g
VALUES: Rows = (_linear("time_mix_v1"), _linear("time_mix_v2", "time_mix_v0"), ("sigmoid", {}), ("lerp", {}))
CONCAT: Rows = (("parallel", {}), ("block", {}))  # the first layer's result is followed by its values


def _rwkv7_layer(values: Rows, concat: Rows) -> Rows:
    return (
        _norm("attn_norm"), ("shift", {}),
        LERP, _linear("time_mix_receptance"),
        LERP, _linear("time_mix_w1"), ("tanh", {}), _linear("time_mix_w2", "time_mix_w0"), ("log_decay", {}),
        LERP, _linear("time_mix_key"),
        LERP, _linear("time_mix_value"), *values,
        LERP, _linear("time_mix_a1"), _linear("time_mix_a2", "time_mix_a0"), ("sigmoid", {}),
        LERP, _linear("time_mix_g1"), ("sigmoid", {}), _linear("time_mix_g2"),
        ("layer_scale", {"weight": "time_mix_k_k.weight"}), ("l2_norm", {}), ("scale", {}), ("multiply", {}),
        ("multiply", {}), ("lerp", {"weight": "time_mix_k_a.weight"}), ("linear_attention", {}),
        ("head_norm", {"weight": "time_mix_ln.weight", "bias": "time_mix_ln.bias"}), ("multiply", {}),
        ("layer_scale", {"weight": "time_mix_r_k.weight"}), ("reduce", {}), ("gate", {}), ("add", {}),
        ("multiply", {}), _linear("time_mix_output"), *concat, ("add", {}),
        _norm("attn_norm_2"), ("shift", {}), ("lerp", {"weight": "channel_mix_lerp_k.weight"}),
        _linear("channel_mix_key"), ("squared_relu", {}), _linear("channel_mix_value"), ("residual", {}),
    )  # fmt: skip


RWKV7 = _rwkv7_layer(VALUES, ())
RWKV7_FIRST: Rows = tuple(
    (verb, {own: f"blk.0.{tensor}" for own, tensor in tensors.items()}) for verb, tensors in _rwkv7_layer((), CONCAT)
)
HEAD_EPSILON = 64e-5  # of the norm of the heads; a constant in llama.cpp
KEY_EPSILONS = {1e-24: False, 1e-6: True}  # added to a key's sum of squares -> `fuse_norm`. llama.cpp: the former


def _check_heads(layer: list[Step]) -> None:
    for step in layer:
        op: Any = step.node.op
        if step.verb == "head_norm" and abs(op.eps / HEAD_EPSILON - 1) > 1e-6:
            what = f"eps is {op.eps}, not the {HEAD_EPSILON} of all heads in llama.cpp"
            raise RunError(f"{step.name} ({step.node.span}): {what}")


def _rwkv7(layer: list[Step], dim: int) -> Sizes:
    ops: dict[str, Any] = {step.verb: step.node.op for step in layer}
    where = {step.verb: f"{step.name} ({step.node.span})" for step in layer}
    ranks = {name: tensor_shape(RWKV7, layer, f"time_mix_{name}1.weight")[0] for name in "wavg"}
    hidden, head = tensor_shape(RWKV7, layer, "channel_mix_key.weight")[0], dim // ops["l2_norm"].heads
    _check_heads(layer)
    if ops["l2_norm"].eps not in KEY_EPSILONS:
        raise RunError(f"{where['l2_norm']}: eps is {ops['l2_norm'].eps}, not {' or '.join(map(str, KEY_EPSILONS))}")
    config = {
        "head_dim": head, "intermediate_size": hidden, "decay_low_rank_dim": ranks["w"], "a_low_rank_dim": ranks["a"],
        "v_low_rank_dim": ranks["v"], "gate_low_rank_dim": ranks["g"], "norm_eps": float(ops["layer_norm"].eps),
        "fuse_norm": KEY_EPSILONS[ops["l2_norm"].eps], "hidden_act": "sqrelu",
    }  # fmt: skip
    metadata = {
        "feed_forward_length": hidden, "wkv.head_size": head, "token_shift_count": 2,
        "attention.decay_lora_rank": ranks["w"], "attention.iclr_lora_rank": ranks["a"],
        "attention.value_residual_mix_lora_rank": ranks["v"], "attention.gate_lora_rank": ranks["g"],
    }  # fmt: skip
    return Sizes(config, metadata)


ORDER = (1, 2, 3, 0, 4)  # of the five mixes of RWKV-6: w, k, v, r, g in llama.cpp, here r, w, k, v, g
MIX: Rows = tuple(_linear("time_mix_w2", f"time_mix_lerp_{part}") for part in "rwkvg")
BARE: tuple[str, dict[str, str]] = ("lerp", {})
RWKV6: Rows = (
    _norm("attn_norm"), ("shift", {}), ("lerp", {"weight": "time_mix_lerp_x.weight"}), _linear("time_mix_w1"),
    ("tanh", {}), *MIX,
    BARE, _linear("time_mix_receptance"),
    BARE, _linear("time_mix_decay_w1"), ("tanh", {}), _linear("time_mix_decay_w2", "time_mix_decay"), ("log_decay", {}),
    BARE, _linear("time_mix_key"),
    BARE, _linear("time_mix_value"),
    BARE, _linear("time_mix_gate"),
    ("linear_attention", {"u": "time_mix_first.weight"}),
    ("head_norm", {"weight": "time_mix_ln.weight", "bias": "time_mix_ln.bias"}), ("gate", {}),
    _linear("time_mix_output"), ("residual", {}),
    _norm("attn_norm_2"), ("shift", {}), ("lerp", {"weight": "channel_mix_lerp_k.weight"}), _linear("channel_mix_key"),
    ("squared_relu", {}), _linear("channel_mix_value"), ("lerp", {"weight": "channel_mix_lerp_r.weight"}),
    _linear("channel_mix_receptance"), ("gate", {}), ("residual", {}),
)  # fmt: skip
RWKV6_TEXT = """seqblocks: 1
use: [rwkv6]
model:
  input: {{tokens: {vocabulary}}}
  steps:
    - embed: {{features: {dim}}}
    - layer_norm: {{name: pre_norm, eps: {eps}}}
    - repeat:
        name: layers
        times: {depth}
        steps:
          - residual:
              name: token
              steps:
                - layer_norm: {{name: norm, eps: {eps}}}
                - rwkv6_mixer:
                    dim: {dim}
                    heads: {heads}
                    expand_k: 1
                    mix_rank: {mix}
                    decay_rank: {decay}
                    eps: {of_heads}
          - residual:
              name: channel
              steps:
                - layer_norm: {{name: norm, eps: {eps}}}
                - rwkv6_channel_mixer: {{dim: {dim}, ratio: {ratio}}}
    - layer_norm: {{name: norm, eps: {eps}}}
    - unembed: {{bias: false{tie}}}
"""


def _rwkv6(layer: list[Step], dim: int) -> Sizes:
    _check_heads(layer)
    ops: dict[str, Any] = {step.verb: step.node.op for step in layer}
    mix = tensor_shape(RWKV6, layer, "time_mix_w1.weight")[0] // 5
    decay = tensor_shape(RWKV6, layer, "time_mix_decay_w1.weight")[0]
    hidden, heads = tensor_shape(RWKV6, layer, "channel_mix_key.weight")[0], ops["linear_attention"].heads
    config = {
        "heads": heads, "mix": mix, "decay": decay, "of_heads": ops["head_norm"].eps, "ratio": hidden / dim,
    }  # fmt: skip
    metadata = {
        "feed_forward_length": hidden, "wkv.head_size": dim // heads, "token_shift_count": 2,
        "time_mix_extra_dim": mix, "time_decay_extra_dim": decay, "rescale_every_n_layers": 0,
    }  # fmt: skip
    return Sizes(config, metadata, text=RWKV6_TEXT)


# --- the table ---------------------------------------------------------------------------------------------------


KNOWN = (
    Architecture("mamba", EMBED, MAMBA, RMS_LAST, _mamba),
    Architecture("mamba2", EMBED, MAMBA2, RMS_LAST, _mamba2),
    Architecture(
        "rwkv6",
        (*EMBED, _norm("token_embd_norm")),
        RWKV6,
        (_norm("output_norm"), *UNEMBED),
        _rwkv6,
        epsilon="attention.layer_norm_epsilon",
        copies={"output.weight": "token_embd.weight"},
    ),
    Architecture(
        "rwkv7",
        (*EMBED, _norm("token_embd_norm"), *RWKV7_FIRST),
        RWKV7,
        (_norm("output_norm"), *UNEMBED),
        _rwkv7,
        epsilon="attention.layer_norm_epsilon",
        earlier=1,
        copies={  # llama.cpp reads values' tensors in the first layer too, but does not use them
            "output.weight": "token_embd.weight",
            **{f"blk.0.time_mix_v{n}.weight": f"blk.0.time_mix_a{n}.weight" for n in range(3)},
        },
    ),
)
NO_ATTENTION = "seqblocks writes attention and experts only with the config.json of a family of transformers it knows"
ABSENT = {  # verb -> why no model with it can be written
    "mlstm": "llama.cpp has no xLSTM",
    "slstm": "llama.cpp has no xLSTM",
    "gated_recurrence": "llama.cpp has no RecurrentGemma, minGRU or minLSTM",
    "attention": NO_ATTENTION,
    "latent_attention": NO_ATTENTION,
    "experts": NO_ATTENTION,
    "cell": "llama.cpp has no steps given by formulas, and of RWKV only versions 6 and 7",
}


def reason(model: ModelSpec) -> str:
    """Return why a model with other steps cannot be written, or "" if its verbs do not tell."""
    nodes = list(walk(model.graph))
    verbs = {node.verb for node in nodes}
    for verb, why in ABSENT.items():
        if verb in verbs:
            return why
    memories: list[Any] = [node.op for node in nodes if node.verb == "linear_attention"]
    if not memories or "time_step" in verbs:
        return ""
    if any(op.rule == "delta" for op in memories):
        return "llama.cpp has delta rules only beside attention (Qwen3-Next, Kimi Linear)"
    return "llama.cpp has no GLA, RetNet or HGRN2"
