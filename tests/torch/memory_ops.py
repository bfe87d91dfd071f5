"""Short lists of steps, one for each verb and its main variants, on an input x of 64 features."""

from __future__ import annotations

ATTENTION = "attention: {q: x, k: x, v: x, heads: 4"
LINEAR_ATTENTION = "linear_attention: {q: x, k: x, v: x, heads: 4"
GATES = ["linear: {features: 4, as: i}", "linear: {from: x, features: 4, as: f}"]
BETA = ["linear: {from: x, features: 4, name: to_beta}", "sigmoid: {as: beta}"]
PER_HEAD = ["linear: {from: x, features: 4, name: to_decay}", "log_decay: {kind: logsigmoid, as: d}"]
PER_KEY = ["log_decay: {from: x, kind: logsigmoid, as: d}"]
WIDE = [f"linear: {{from: x, features: 64, as: {name}}}" for name in ("i", "f", "z")]
Z = WIDE[2]

OPS: dict[str, list[str]] = {
    **{verb: [verb] for verb in (
        "silu", "gelu", "gelu_tanh", "relu", "leaky_relu", "squared_relu", "elu", "selu", "sigmoid", "tanh", "softplus",
        "exp", "positive", "one_minus_exp", "rational_exp", "elu_plus_one", "layer_norm", "rms_norm", "layer_scale",
        "token_shift", "causal_conv", "sinusoids", "time_step", "phase", "identity",
    )},
    "linear": ["linear: 64"],
    "swiglu": ["swiglu: {hidden: 128}"],
    "headwise_linear": ["headwise_linear: {block: 4}"],
    "headwise_linear, shared": ["headwise_linear: {block: 4, shared: true}"],
    "rms_norm, groups": ["rms_norm: {groups: 4}"],
    "rms_norm, gate": [Z, "rms_norm: {from: x, z: z}"],
    "head_norm": ["head_norm: {heads: 4}"],
    "l2_norm": ["l2_norm: {heads: 4}"],
    "softmax": ["softmax: {heads: 4}"],
    "sum_norm": ["softplus", "sum_norm: {heads: 4}"],
    "soft_cap": ["soft_cap: 5"],
    "scale": ["scale: 2"],
    "select": ["select: 32"],
    "repeat_heads": ["repeat_heads: {heads: 4, times: 2}"],
    "roll_heads": ["roll_heads: {by: 2}"],
    "gate": [Z, "gate: {from: x, by: z}"],
    "add": [Z, "add: {from: x, with: z}"],
    "multiply": [Z, "multiply: {from: x, by: z}"],
    "divide": [Z, "divide: {from: x, by: z}"],
    "lerp": [Z, "lerp: {from: x, to: z}"],
    "calc": [Z, "calc: {y: x - s * z / 8 + sigmoid(z) * tanh(x), learned: {s: 0.5}}"],
    "calc, functions": [Z, 'calc: {y: "max(z, 0) * exp(-abs(z)) + softplus(x)", u: sqrt(2 + y * y) - log(3 + abs(x))}'],
    "calc, quotients": [Z, "calc: {y: x / (1 + z ** 2) + 2 ** x, u: sin(y) + cos(z) - 1 / y}"],
    "calc, powers": [Z, "calc: {y: abs(x) ** z}"],
    "calc, least": [Z, 'calc: {y: "min(x, z, 1)"}'],
    "constant, kept": [
        "constant: {features: 64, learned: false, persistent: true, as: c}", "multiply: {from: x, by: c}",
    ],
    "constant, formula": [
        "constant: {features: 64, learned: false, formula: feature, as: c}", "multiply: {from: x, by: c}",
    ],
    "learnable_skip": [Z, "learnable_skip: {from: x, with: z}"],
    "join_heads": [Z, "join_heads: {from: x, with: z, heads: 4}"],
    "outer_product": [Z, "outer_product: {from: x, with: z, heads: 16}"],
    "matrix_product": [
        "linear: {features: 128, as: m}", "matrix_product: {from: x, matrix: m, heads: 32}",
        "matrix_product: {matrix: m, heads: 32, transposed: true}",
    ],
    "choose": [
        "linear: {features: 1, as: r}",
        "choose: {from: x, by: r, top: 0.25, steps: [{linear: {features: 64, as: y}}, {calc: r * y}]}",
    ],
    "choose, other wires": [
        Z, "linear: {from: x, features: 1, as: r}",
        "choose: {from: x, by: r, top: 0.5, steps: [{swiglu: 128}, {multiply: {by: z, as: y}}, {calc: r * y}]}",
    ],
    "cell, linear": [Z, 'cell: {from: x, state: {s: 64}, steps: [{calc: {s: "sigmoid(z) * s + x"}}]}'],
    "cell, pair": [
        Z, 'cell: {from: x, state: {s: 64, t: 64}, steps: [{calc: {s: "tanh(z) * s + x - 0.1 * t", t: "t + s / 9"}}]}',
    ],
    "cell, parts of a scan": [
        "cell: {chunk: 16, state: {s: {features: 64, learned: true}}, steps: [{calc: {s: sigmoid(x) * s + x}}]}"
    ],
    "cell, old state": [
        'cell: {state: {s: 64}, steps: [{calc: {y: "s * x", s: "0.9 * s + a * x", learned: {a: 0.1}}}]}',
    ],
    "cell, loop": ["cell: {state: {s: 64}, steps: [{linear: {from: [input, s], features: 64}}, {tanh: {as: s}}]}"],
    "cell, every token kept": [
        "cell: {chunk: 0, state: {s: 64}, steps: [{linear: {from: [input, s], features: 64}}, {tanh: {as: s}}]}",
    ],
    "shift": ["shift: 3"],
    "causal_conv, silu": ["causal_conv: {activation: silu}"],
    "causal_conv, mixing": ["causal_conv: {mixing: true}"],
    "conv1d": ["conv1d: {features: 64, kernel: 3}"],
    "conv1d, stride": ["conv1d: {features: 64, kernel: 8, stride: 4}"],
    "conv_transpose1d": ["downsample: 4", "conv_transpose1d: {features: 64, kernel: 8, stride: 4}"],
    "downsample": ["downsample: 4"],
    "upsample": ["downsample: 4", "upsample: 4"],
    "rearrange": ["rearrange: {pattern: 'seq (h d) -> seq (d h)', h: 4}"],
    "rotary": ["rotary: {heads: 4}"],
    "rotary, partly": ["rotary: {heads: 4, features: 8}"],
    "rotate": ["linear: {features: 32, as: a}", "rotate: {from: x, by: a, heads: 4}"],
    "attention": [f"{ATTENTION}}}"],
    "attention, rotary": [f"{ATTENTION}, rotary: 10000}}"],
    "each, features": ["each: {axis: features, size: 16, steps: [causal_conv, {linear: 24}]}"],
    "each, frames": ["each: {axis: frames, size: 16, steps: [{linear: 24}]}"],
    "each, places": ["each: {axis: places, size: 16, steps: [{linear: 24}]}"],
    "attention, window": [f"{ATTENTION}, window: 16}}"],
    "attention, first tokens": [f"{ATTENTION}, window: 16, keep_first: 2, bias: alibi}}"],
    "attention, merged keys": ["downsample: {factor: 4, as: k}", "attention: {q: x, k: k, v: k, heads: 4}"],
    "attention, merged queries": [
        "downsample: {factor: 4, as: q}", "attention: {q: q, k: x, v: x, heads: 4, window: 8, sinks: true}",
    ],
    "attention, logsumexp": [f"{ATTENTION}, logsumexp: true}}"],
    "attention, soft cap": [f"{ATTENTION}, soft_cap: 5}}"],
    "selected_attention": [
        "downsample: {factor: 4, as: block}",
        "selected_attention: {q: x, k: x, v: x, index_q: x, index_k: block, heads: 4, block: 4, top: 6, last: 2}",
    ],
    "selected_attention, logsumexp": [
        "selected_attention: {q: x, k: x, v: x, index_q: x, index_k: x, heads: 4, groups: 1, top: 9, logsumexp: true}",
    ],
    "merge_attention": [
        f"{ATTENTION}, window: 16, logsumexp: true, as: a}}", "downsample: {factor: 4, from: x, as: k}",
        "attention: {q: x, k: k, v: k, heads: 4, sinks: true, logsumexp: true}", "merge_attention: {with: a, heads: 4}",
    ],
    "attention, shared keys": ["linear: {features: 32, as: k}", "attention: {q: x, k: k, v: k, heads: 4, kv_heads: 2}"],
    "gated_recurrence": [*PER_KEY, "gated_recurrence: {from: x, decay: d}"],
    "gated_recurrence, complement": [*PER_KEY, "gated_recurrence: {from: x, decay: d, factor: complement}"],
    "gated_recurrence, unit variance": [
        "log_decay: {kind: rg_lru, as: d}",
        "gated_recurrence: {from: x, decay: d, factor: unit_variance, first_full: true}",
    ],
    "log_decay, softplus": ["log_decay: {kind: softplus}"],
    "log_decay, bounded": ["log_decay: {kind: bounded}"],
    "log_decay, lower": [
        "lower_decays: {layers: 2, features: 64}", "select: {features: 64, as: low}",
        "log_decay: {from: x, kind: logsigmoid, lower: low}",
    ],
    "mlstm": [*GATES, "mlstm: {q: x, k: x, v: x, i: i, f: f, heads: 4}"],
    "mlstm_memoroid": [*GATES, "mlstm_memoroid: {q: x, k: x, v: x, i: i, f: f, heads: 4}"],
    "slstm": [*WIDE, "slstm: {i: i, f: f, z: z, o: x, heads: 4}"],
    "ssm": [
        "linear: {features: 64, as: dt}", "linear: {from: x, features: 16, as: b}",
        "linear: {from: x, features: 16, as: c}", "ssm: {x: x, dt: dt, B: b, C: c}",
    ],
    "ssm, groups, z": [
        "linear: {features: 64, as: dt}", "linear: {from: x, features: 64, as: b}",
        "linear: {from: x, features: 64, as: c}", "ssm: {x: x, dt: dt, B: b, C: c, groups: 4, z: x}",
    ],
    "linear_attention": [f"{LINEAR_ATTENTION}}}"],
    "linear_attention, decay of a head": [*PER_HEAD, f"{LINEAR_ATTENTION}, decay: d}}"],
    "linear_attention, decay of a key": [*PER_KEY, f"{LINEAR_ATTENTION}, decay: d}}"],
    "linear_attention, heads that share keys": [
        "linear: {from: x, features: 128, as: v}", f"{LINEAR_ATTENTION.replace('v: x', 'v: v')}, value_heads: 8}}",
    ],
    "linear_attention, dplr": [
        *WIDE[:2], *PER_HEAD, f"{LINEAR_ATTENTION}, a: i, b: f, decay: d, rule: dplr}}",
    ],
    "linear_attention, delta": [*BETA, f"{LINEAR_ATTENTION}, beta: beta, rule: delta, qk_norm: l2}}"],
    "linear_attention, delta, decay": [
        *BETA, *PER_HEAD, f"{LINEAR_ATTENTION}, beta: beta, decay: d, rule: delta, qk_norm: l2}}"
    ],
    "centaurus, neck": ["centaurus: {mode: neck, state: 32, sub_states: 4}"],
    "centaurus, dws": ["centaurus: {mode: dws, sub_states: 4}"],
    "centaurus, pointwise": ["centaurus: {mode: pointwise, state: 32, sub_states: 4}"],
    "centaurus, full": ["centaurus: {mode: full, features: 8, sub_states: 4}"],
}


GRID_OPS: dict[str, list[str]] = {  # on the tokens of an image
    "attention, relative": [f"{ATTENTION}, causal: false, bias: relative}}"],
    "each, windows": ["each: {axis: windows, size: 4, steps: [{linear: 24}]}"],
    "each, shifted windows": ["each: {axis: windows, size: 4, shift: 2, steps: [silu, {linear: 24}]}"],
    "each, padded windows": ["each: {axis: windows, size: 5, shift: 2, pad: true, steps: [silu, {linear: 24}]}"],
    "each, columns": ["each: {axis: columns, steps: [{linear: 24}]}"],
    "conv2d, depthwise": ["conv2d"],
    "conv2d, depthwise, 5 rows": ["conv2d: {kernel: 5}"],
    "conv2d, groups": ["conv2d: {features: 64, groups: 16}"],
    "conv2d, strided": ["conv2d: {features: 32, stride: 2, activation: silu}"],
    "conv2d, even": ["conv2d: {features: 64, kernel: 2, stride: 2, padding: 0}"],
    "conv_transpose2d": ["pool2d", "conv_transpose2d: {features: 64, kernel: 2, stride: 2}"],
    "pool2d": ["pool2d: {kernel: 3, stride: 2, padding: 1}"],
    "batch_norm": ["batch_norm"],
    "resize": ["resize: {rows: 8, columns: 16, mode: bilinear}"],
    "pool2d, mean": ["pool2d: {mode: mean}"],
}
OPS |= GRID_OPS


def text_of(steps: list[str], entering: str = "{features: 64}") -> str:
    """Return a spec with a linear map before these steps, so that their input needs a gradient."""
    lines = ["seqblocks: 1", "model:", f"  input: {entering}", "  steps:", "    - linear: {features: 64, as: x}"]
    return "\n".join([*lines, *(f"    - {step}" for step in steps)]) + "\n"
