"""Measure a streaming step of whole models, against the same arithmetic written by hand in torch.

    python benchmarks/steps.py [rounds]
    python benchmarks/steps.py compile [rounds] [models]

Both sides have the same weights, one thread and no gradients; their outputs are compared first. For each model and
batch size, this prints the median of the ratios of interleaved runs. The steps by hand are written for one model: they
check nothing, carry their state in a list, and prepare weights once. Times are CPU times of the process, which do not
include other programs.

`compile` measures the first calls of a step that `torch.compile` compiles, in separate processes, in turns and
without any cache: CPU time of the compiler and of the programs that it starts. The second call is measured too, because
some steps by hand are compiled again for it: the states that they return have other strides than their first ones.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import seqblocks

MODEL = """
seqblocks: 1
use: [xlstm, deltanet, gla, centaurus]
let: {dim: 128, depth: 3, vocabulary: 256}
model:
  input: {tokens: vocabulary}
  steps:
    - embed: {features: dim}
    - repeat: {name: layers, times: depth, steps: [LAYER]}
    - rms_norm: {name: norm}
    - unembed: {bias: false, tie: embed}
"""
SLSTM = MODEL.replace("LAYER", "slstm_block: {dim: dim, heads: 4}")
CENTAURUS = MODEL.replace("LAYER", "centaurus_block: {mode: neck, state: 64}")
LINEAR = MODEL.replace("LAYER", "residual: {name: residual_NAME, steps: [rms_norm, {NAME: {dim: dim, OPTIONS}}]}")
GATED_DELTANET = LINEAR.replace("NAME", "gated_deltanet_mixer").replace("OPTIONS", "heads: 4, head: 32, expand_v: 1")
GLA = LINEAR.replace("NAME", "gla_mixer").replace("OPTIONS", "heads: 4")
Weights = dict[str, Tensor]
Layer = Callable[[Tensor, list[Any]], Tensor]  # of a token x [batch, dim]; replaces its parts of the state


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def times(row: Tensor, matrix: Tensor) -> Tensor:
    """Return row [batch, heads, K] times matrix [batch, heads, K, V]: as `matmul`, in less time."""
    return torch.bmm(row.reshape(-1, 1, row.shape[-1]), matrix.flatten(0, 1)).view(*row.shape[:-1], -1)


def convolved(window: Tensor, x: Tensor, w: Weights, name: str) -> tuple[Tensor, Tensor]:
    """Return a causal convolution of one token after the window [batch, taps - 1, width], and the next window."""
    window = torch.cat([window, x.unsqueeze(1)], 1)
    y, bias = (window * w[f"{name}.taps"]).sum(1), w.get(f"{name}.bias")
    return F.silu(y if bias is None else y + bias), window[:, 1:]


def mamba(w: Weights, batch: int, state: list[Any]) -> Layer:
    width, size = w["mixer.ssm.A_log"].shape
    rank = w["mixer.dt_proj.weight"].shape[1]
    at = len(state)
    state += [torch.zeros(batch, 3, width), torch.zeros(batch, width, size)]
    A = -torch.exp(w["mixer.ssm.A_log"])

    def step(x: Tensor, state: list[Any]) -> Tensor:
        u, z = F.linear(rms_norm(x, w["norm.weight"], 1e-5), w["mixer.in_proj.weight"]).chunk(2, -1)
        u, state[at] = convolved(state[at], u, w, "mixer.conv1d")
        low, B, C = F.linear(u, w["mixer.x_proj.weight"]).split([rank, size, size], -1)
        dt = F.softplus(F.linear(low, w["mixer.dt_proj.weight"], w["mixer.dt_proj.bias"]))
        h = torch.exp(dt.unsqueeze(-1) * A) * state[at + 1] + (dt * u).unsqueeze(-1) * B.unsqueeze(1)
        state[at + 1] = h
        y = (torch.bmm(h, C.unsqueeze(-1)).squeeze(-1) + w["mixer.ssm.D"] * u) * F.silu(z)
        return x + F.linear(y, w["mixer.out_proj.weight"])

    return step


def mlstm(w: Weights, batch: int, state: list[Any], heads: int = 4) -> Layer:
    p = "mlstm_layer."
    width = w[p + "proj_down.weight"].shape[1]
    D = width // heads
    at = len(state)
    state += [torch.zeros(batch, 3, width), torch.zeros(batch, heads, D, D), torch.zeros(batch, heads, D)]
    state += [torch.zeros(batch, heads)]
    gates = torch.cat([w[p + "cell.i.weight"], w[p + "cell.f.weight"]])
    biases = torch.cat([w[p + "cell.i.bias"], w[p + "cell.f.bias"]])
    gain, out_gain = 1 + w["layer_norm.weight"], 1 + w[p + "cell.head_norm.weight"]
    # small blocks on the diagonal: one matrix is faster than a product for each block
    q_map, k_map, v_map = (torch.block_diag(*w[f"{p}{name}.weight"]) for name in "qkv")
    qk_map = torch.cat([q_map, k_map])

    def step(x: Tensor, state: list[Any]) -> Tensor:
        y = F.layer_norm(x, x.shape[-1:], gain, None, 1e-5)
        u, z = F.linear(y, w[p + "proj_up.weight"]).chunk(2, -1)
        c, state[at] = convolved(state[at], u, w, p + "c")
        q, k = F.linear(c, qk_map).chunk(2, -1)
        v = F.linear(u, v_map)
        i, f = F.linear(torch.cat([q, k, v], -1), gates, biases).chunk(2, -1)
        q, k, v = (t.view(-1, heads, D) for t in (q * D**-0.5, k, v))
        C, n, m = state[at + 1 : at + 4]
        decay = F.logsigmoid(f) + m
        m = torch.maximum(decay, i)
        keep, write = torch.exp(decay - m).unsqueeze(-1), torch.exp(i - m).unsqueeze(-1) * k
        C = torch.addcmul(keep.unsqueeze(-1) * C, write.unsqueeze(-1), v.unsqueeze(-2))
        n = keep * n + write
        state[at + 1 : at + 4] = C, n, m
        h = times(q, C)
        h = h / (torch.maximum((q * n).sum(-1, keepdim=True).abs(), torch.exp(-m).unsqueeze(-1)) + 1e-6)
        h = F.layer_norm(h, (D,), eps=1e-5).flatten(1) * out_gain + w[p + "learnable_skip.weight"] * c
        return x + F.linear(h * F.silu(z), w[p + "proj_down.weight"])

    return step


def slstm(w: Weights, batch: int, state: list[Any], heads: int = 4) -> Layer:
    p, dim = "mixer.layer.", w["mixer.x.weight"].shape[0]
    D = dim // heads
    at = len(state)
    state += [torch.zeros(batch, 3, dim), *(torch.zeros(batch, heads, D) for _ in range(4))]
    gain, out_gain = 1 + w["mixer.x.weight"], 1 + w[p + "head_norm.weight"]
    ffn_gain = 1 + w["ffn.layer_norm.weight"]
    # [heads, D, gates * D]: of the convolved input, of the input, and of the last output
    if_map = torch.cat([w[f"{p}{gate}.weight"].transpose(1, 2) for gate in "if"], -1)
    zo_map = torch.cat([w[f"{p}{gate}.weight"].transpose(1, 2) for gate in "zo"], -1)
    recurrent = w[p + "cell.recurrent"].flatten(2)
    bias = torch.cat([w[f"{p}cell.{gate}_bias"] for gate in "ifzo"], -1)

    def by_head(x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(x.view(-1, heads, D).transpose(0, 1), weight).transpose(0, 1)

    def step(x: Tensor, state: list[Any]) -> Tensor:
        normed = F.layer_norm(x, (dim,), gain, None, 1e-5)
        c, state[at] = convolved(state[at], normed, w, "mixer.c")
        y, cell, n, m = state[at + 1 : at + 5]
        gates = torch.cat([by_head(c, if_map), by_head(normed, zo_map)], -1) + by_head(y, recurrent) + bias
        i, f, z, o = gates.chunk(4, -1)
        through = m + F.logsigmoid(f)
        m = torch.where(n == 0, i, torch.maximum(i, through))
        write, keep = torch.exp(i - m).clamp(max=1.0), torch.exp((through - m).clamp(max=0.0))
        cell = keep * cell + write * torch.tanh(z)
        n = keep * n + write
        y = torch.sigmoid(o) * cell / n
        state[at + 1 : at + 5] = y, cell, n, m
        x = x + F.layer_norm(y, (D,), eps=1e-5).flatten(1) * out_gain
        g, u = F.linear(F.layer_norm(x, (dim,), ffn_gain, None, 1e-5), w["ffn.net.proj_up.weight"]).chunk(2, -1)
        return x + F.linear(u * F.gelu(g), w["ffn.net.proj_down.weight"])

    return step


def attention(w: Weights, batch: int, state: list[Any], heads: int = 4, window: int = 64, base: float = 1e4) -> Layer:
    D = w["out.weight"].shape[1] // heads
    at = len(state)
    state += [torch.zeros(batch, window - 1, D), torch.zeros(batch, window - 1, D), 0]
    frequency = base ** (-torch.arange(0, D // 2) * 2 / D)

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def step(x: Tensor, state: list[Any]) -> Tensor:
        q, k, v = F.linear(rms_norm(x, w["norm.weight"], 1e-5), w["qkv.weight"]).split([heads * D, D, D], -1)
        angle = state[at + 2] * frequency
        cos, sin = angle.cos(), angle.sin()
        keys = torch.cat([state[at], turned(k, cos, sin)[:, None]], 1)
        values = torch.cat([state[at + 1], v[:, None]], 1)
        state[at + 2] += 1
        seen = min(state[at + 2], window)
        q = turned(q.view(-1, heads, D), cos, sin)
        y = F.scaled_dot_product_attention(q, keys[:, -seen:], values[:, -seen:])
        state[at], state[at + 1] = keys[:, 1:], values[:, 1:]
        return x + F.linear(y.flatten(1), w["out.weight"])

    return step


def swiglu(w: Weights, batch: int, state: list[Any]) -> Layer:
    both = torch.cat([w["swiglu.gate_weight"], w["swiglu.up_weight"]])

    def step(x: Tensor, state: list[Any]) -> Tensor:
        g, u = F.linear(rms_norm(x, w["norm.weight"], 1e-5), both).chunk(2, -1)
        return x + F.linear(F.silu(g) * u, w["swiglu.down_weight"])

    return step


def gated_deltanet(w: Weights, batch: int, state: list[Any], heads: int = 4) -> Layer:
    p = "gated_deltanet_mixer."
    keys, values = w[p + "q_proj.weight"].shape[0], w[p + "v_proj.weight"].shape[0]
    K, V = keys // heads, values // heads
    at = len(state)
    state += [torch.zeros(batch, 3, 2 * keys + values), torch.zeros(batch, heads, K, V)]
    projections = torch.cat([w[f"{p}{name}_proj.weight"] for name in "qkvgab"])
    conv = {"conv.taps": torch.cat([w[f"{p}{name}_conv1d.taps"] for name in "qkv"], 1)}
    rate, dt_bias = -torch.exp(w[p + "decay.A_log"]), w[p + "decay.dt_bias"]

    def step(x: Tensor, state: list[Any]) -> Tensor:
        y = F.linear(rms_norm(x, w["rms_norm.weight"], 1e-6), projections)
        qkv, g, a, b = y.split([2 * keys + values, values, heads, heads], -1)
        qkv, state[at] = convolved(state[at], qkv, conv, "conv")
        qk, v = qkv.split([2 * keys, values], -1)
        qk = qk.view(-1, 2, heads, K)
        q, k = (qk * torch.rsqrt(qk.square().sum(-1, keepdim=True) + 1e-6)).unbind(1)
        S = state[at + 1] * torch.exp(rate * F.softplus(a + dt_bias)).unsqueeze(-1).unsqueeze(-1)
        write = torch.sigmoid(b).unsqueeze(-1) * (v.view(-1, heads, V) - times(k, S))
        S = torch.addcmul(S, k.unsqueeze(-1), write.unsqueeze(-2))
        state[at + 1] = S
        o = rms_norm(times(q * K**-0.5, S), w[p + "o_norm.weight"], 1e-5)
        return x + F.linear(o.flatten(1) * F.silu(g), w[p + "o_proj.weight"])

    return step


def gla(w: Weights, batch: int, state: list[Any], heads: int = 4) -> Layer:
    p = "gla_mixer."
    sizes = [w[f"{p}{name}.weight"].shape[0] for name in ("q_proj", "k_proj", "v_proj", "g_proj", "decay_in")]
    K, V = sizes[0] // heads, sizes[2] // heads
    at = len(state)
    state += [torch.zeros(batch, heads, K, V)]
    projections = torch.cat([w[f"{p}{name}.weight"] for name in ("q_proj", "k_proj", "v_proj", "g_proj", "decay_in")])

    def step(x: Tensor, state: list[Any]) -> Tensor:
        y = F.linear(rms_norm(x, w["rms_norm.weight"], 1e-6), projections)
        q, k, v, g, low = y.split(sizes, -1)
        decay = F.logsigmoid(F.linear(low, w[p + "decay_out.weight"], w[p + "decay_out.bias"])) / 16
        q, k, v, decay = (t.view(-1, heads, t.shape[1] // heads) for t in (q, k, v, decay))
        S = torch.addcmul(state[at] * torch.exp(decay).unsqueeze(-1), k.unsqueeze(-1), v.unsqueeze(-2))
        state[at] = S
        o = rms_norm(times(q * K**-0.5, S), w[p + "norm.weight"], 1e-5)
        return x + F.linear(o.flatten(1) * F.silu(g), w[p + "o_proj.weight"])

    return step


def centaurus(w: Weights, batch: int, state: list[Any]) -> Layer:
    p = "centaurus."
    dt = torch.exp(w[p + "log_dt"]).unsqueeze(-1)
    factor = torch.exp(dt * torch.complex(-F.softplus(w[p + "A_real"]), w[p + "A_imag"]))
    into = dt * w[p + "B"]
    at = len(state)
    state += [torch.zeros(batch, *factor.shape, dtype=torch.complex64)]

    def step(x: Tensor, state: list[Any]) -> Tensor:
        h = factor * state[at] + F.linear(x, into).unsqueeze(-1)
        state[at] = h
        y = F.linear((w[p + "E"] * h.real).sum(-1), w[p + "C"])
        return x + F.silu(rms_norm(y, w["rms_norm.weight"], 1e-6))

    return step


LAYERS: dict[str, Callable[..., Layer]] = {
    "mamba_block.residual.": mamba, "mlstm_block.residual.": mlstm, "slstm_block.": slstm,
    "attention_layer.residual.": attention, "swiglu_layer.residual.": swiglu,
    "residual_gated_deltanet_mixer.": gated_deltanet, "residual_gla_mixer.": gla,
    "centaurus_block.residual.": centaurus,
}  # fmt: skip


def by_hand(model: seqblocks.SequenceModel, batch: int) -> tuple[Callable[[Tensor, list[Any]], Tensor], list[Any]]:
    """Return the model's step, token ids [batch] -> logits [batch, vocabulary], and its first state."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    state: list[Any] = []
    layers = [
        make(_inside(weights, f"layers.{index}.{prefix}"), batch, state)
        for index in range(len(model.layers))  # type: ignore[arg-type]
        for prefix, make in LAYERS.items()
        if any(name.startswith(f"layers.{index}.{prefix}") for name in weights)
    ]

    norm = next(node for node in model.graph.nodes if node.verb == "rms_norm")
    eps: float = norm.op.eps  # type: ignore[union-attr]

    def step(tokens: Tensor, state: list[Any]) -> Tensor:
        x = F.embedding(tokens, weights["embed.weight"])
        for layer in layers:
            x = layer(x, state)
        return F.linear(rms_norm(x, weights[f"{norm.name}.weight"], eps), weights["embed.weight"])

    return step, state


def _inside(weights: Weights, prefix: str) -> Weights:
    """The weights of a layer by their names in it, and those of convolutions as [taps, width]."""
    found = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
    taps = {name.replace("weight", "taps"): x[:, 0].t().contiguous() for name, x in found.items() if x.dim() == 3}
    return found | {name: x for name, x in taps.items() if x.dim() == 2}


MODELS = {
    "mamba_small": "", "mlstm_small": "", "hybrid_small": "", "slstm": SLSTM,
    "gated_deltanet": GATED_DELTANET, "gla": GLA, "centaurus": CENTAURUS,
}  # fmt: skip


def build(name: str) -> seqblocks.SequenceModel:
    """Return a model with weights that no initialiser leaves at zero."""
    spec = seqblocks.load_model(name) if not MODELS[name] else seqblocks.load_text(MODELS[name])[1]
    model = seqblocks.build_model(spec, device="cpu", seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def largest_difference(name: str, batch: int = 2, tokens: int = 70) -> float:
    """Return the largest difference of the two sides over some tokens, relative to the largest output."""
    model = build(name)
    step, state = by_hand(model, batch)
    ours = model.init_state(batch)
    worst = scale = 0.0
    generator = torch.Generator().manual_seed(2)
    with torch.inference_mode():
        for _ in range(tokens):
            token = torch.randint(0, 256, (batch,), generator=generator)
            y, ours = model.step(token, ours)
            expected = step(token, state)
            worst, scale = max(worst, (y - expected).abs().max().item()), max(scale, expected.abs().max().item())
    return worst / scale


def compare(name: str, batch: int, rounds: int) -> tuple[float, float]:
    """Return the time of our step in milliseconds, and its median ratio to the step by hand."""
    model = build(name)
    step, state = by_hand(model, batch)
    ours, token = model.init_state(batch), torch.zeros(batch, dtype=torch.long)
    times, ratios = [], []
    with torch.inference_mode():
        for _ in range(rounds):
            start = time.process_time()
            for _ in range(5):
                _, ours = model.step(token, ours)
            middle = time.process_time()
            for _ in range(5):
                step(token, state)
            end = time.process_time()
            times.append((middle - start) / 5)
            ratios.append((middle - start) / (end - middle))
    return 1e3 * statistics.median(times), statistics.median(ratios)


def graphs_of(
    name: str, ours: bool, backend: Callable[[Any, Any], Any] | None = None, calls: int = 1,
    after: Callable[[], None] = lambda: None,
) -> list[Any]:  # fmt: skip
    """Compile a step at batch 1 and call it; return the graphs that were compiled. `after` runs after each call."""
    from torch._inductor.compile_fx import compile_fx

    found: list[Any] = []

    def compiled(graph: Any, inputs: Any) -> Any:
        found.append(graph)
        return (backend or compile_fx)(graph, inputs)

    torch._dynamo.reset()
    model, token = build(name), torch.zeros(1, dtype=torch.long)
    with torch.inference_mode():
        step, state = (model.step, model.init_state(1)) if ours else by_hand(model, 1)
        run = torch.compile(step, backend=compiled)
        for _ in range(calls):
            out = run(token, state)
            state = out[1] if ours else state
            after()
    return found


def first_calls(name: str, ours: bool) -> list[float]:
    """Return the seconds of CPU time until the first and second call of a compiled step end, without imports."""
    torch.compile(torch.sin)(torch.ones(3))

    def used() -> float:
        each = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(x.ru_utime + x.ru_stime for x in each)

    start, seconds = used(), list[float]()
    graphs_of(name, ours, calls=2, after=lambda: seconds.append(used() - start))
    return seconds


def compare_compilation(name: str, rounds: int) -> list[tuple[float, float]]:
    """Return the seconds until our first and second call end, and the ratios to those by hand; medians of processes."""
    settings = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    seconds: dict[str, list[list[float]]] = {"ours": [], "hand": []}
    for _ in range(rounds):
        for side, found in seconds.items():
            command = [sys.executable, __file__, "first_calls", name, side]
            done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True)
            found.append([float(number) for number in done.stdout.split()])
    ours, hand = ([statistics.median(each) for each in zip(*found, strict=True)] for found in seconds.values())
    return [(each, each / other) for each, other in zip(ours, hand, strict=True)]


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["first_calls"]:
        print(*first_calls(sys.argv[2], sys.argv[3] == "ours"))
        return
    if sys.argv[1:2] == ["compile"]:
        for name in sys.argv[3:] or MODELS:
            found = compare_compilation(name, int(sys.argv[2]) if len(sys.argv) > 2 else 5)
            (seconds, first), (_, both) = found
            ratios = f"{first:.2f} of the step by hand; two calls {both:.2f}"
            print(f"{name}: first call {seconds:.1f} s, {ratios}", flush=True)
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    for name in MODELS:
        print(f"{name}: largest difference {largest_difference(name):.1e}")
        for batch in (1, 64):
            milliseconds, ratio = compare(name, batch, rounds)
            print(f"  batch {batch}: {milliseconds:.2f} ms, {ratio:.2f} of the time by hand", flush=True)


if __name__ == "__main__":
    main()
