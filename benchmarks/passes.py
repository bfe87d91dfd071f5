"""Measure forward passes and training steps of small models, against the same arithmetic written by hand in torch.

    python benchmarks/passes.py [rounds]

Both sides have the same weights and one thread; their outputs and gradients are compared first. For each model and
length, in batches of 8, this prints our time and the median of the ratios of interleaved runs. A training step is
forward, loss and backward, first without and then with AdamW. The code by hand is written for these sizes and checks
nothing: a loop over tokens for recurrences, chunks of 64 tokens for the mLSTM, torch's attention with a mask, and
derivatives by autograd. Times are CPU times of the process, which do not include other programs.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from steps import MODELS, Weights, build, rms_norm
from torch import Tensor

import seqblocks

BATCH, CHUNK = 8, 64
LENGTHS = (64, 256, 512)
Layer = Callable[[Tensor, Weights], Tensor]  # of x [batch, seq, dim]


def convolved(x: Tensor, w: Weights, name: str) -> Tensor:
    weight = w[f"{name}.weight"]
    y = F.conv1d(F.pad(x.transpose(1, 2), (weight.shape[2] - 1, 0)), weight, w[f"{name}.bias"], groups=x.shape[2])
    return F.silu(y).transpose(1, 2)


def mamba(x: Tensor, w: Weights) -> Tensor:
    size = w["mixer.ssm.A_log"].shape[1]
    rank = w["mixer.dt_proj.weight"].shape[1]
    u, z = F.linear(rms_norm(x, w["norm.weight"], 1e-5), w["mixer.in_proj.weight"]).chunk(2, -1)
    u = convolved(u, w, "mixer.conv1d")
    low, B, C = F.linear(u, w["mixer.x_proj.weight"]).split([rank, size, size], -1)
    dt = F.softplus(F.linear(low, w["mixer.dt_proj.weight"], w["mixer.dt_proj.bias"]))
    decay = torch.exp(dt[..., None] * -torch.exp(w["mixer.ssm.A_log"]))
    new = (dt * u)[..., None] * B[:, :, None]
    states = [new[:, 0]]
    for kept, written in zip(decay.unbind(1)[1:], new.unbind(1)[1:], strict=True):
        states.append(torch.addcmul(written, kept, states[-1]))
    y = torch.matmul(torch.stack(states, 1), C[..., None]).squeeze(-1) + w["mixer.ssm.D"] * u
    return x + F.linear(y * F.silu(z), w["mixer.out_proj.weight"])


def mlstm(x: Tensor, w: Weights, heads: int = 4) -> Tensor:
    p = "mlstm_layer."
    y = F.layer_norm(x, x.shape[-1:], 1 + w["layer_norm.weight"], None, 1e-5)
    u, z = F.linear(y, w[p + "proj_up.weight"]).chunk(2, -1)
    c = convolved(u, w, p + "c")
    q, k, v = (
        torch.einsum("bsgi,goi->bsgo", t.unflatten(-1, (-1, 4)), w[f"{p}{name}.weight"]).flatten(2)
        for t, name in ((c, "q"), (c, "k"), (u, "v"))
    )
    gates = torch.cat([w[p + "cell.i.weight"], w[p + "cell.f.weight"]])
    biases = torch.cat([w[p + "cell.i.bias"], w[p + "cell.f.bias"]])
    i, f = F.linear(torch.cat([q, k, v], -1), gates, biases).transpose(1, 2).chunk(2, 1)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    h = torch.cat(mlstm_chunks(q * q.shape[-1] ** -0.5, k, v, i, F.logsigmoid(f)), 2).transpose(1, 2)
    h = F.layer_norm(h, h.shape[-1:], eps=1e-5).flatten(2) * (1 + w[p + "cell.head_norm.weight"])
    h = h + w[p + "learnable_skip.weight"] * c
    return x + F.linear(h * F.silu(z), w[p + "proj_down.weight"])


def mlstm_chunks(*inputs: Tensor) -> list[Tensor]:
    """h of each chunk [batch, heads, tokens, width], of q, k, v, i and log f [batch, heads, seq, ...]."""
    C = n = m = inputs[0].new_zeros(())
    out: list[Tensor] = []
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    for q, k, v, i, log_f in zip(*(x.split(CHUNK, 2) for x in inputs), strict=True):
        b = log_f.cumsum(-1)
        before = causal[: b.shape[-1], : b.shape[-1]]
        log_d = (b[..., :, None] - b[..., None, :] + i[..., None, :]).masked_fill(~before, -torch.inf)
        inter = b + (m[..., None] if out else m)
        top = torch.maximum(log_d.amax(-1), inter)
        weights = (q @ k.transpose(-1, -2)) * torch.exp(log_d - top[..., None])
        num, den = weights @ v, weights.sum(-1)
        if out:
            seen = q * torch.exp(inter - top)[..., None]
            num, den = num + seen @ C, den + (seen @ n[..., None]).squeeze(-1)
        out.append(num / (torch.maximum(den.abs(), torch.exp(-top)) + 1e-6)[..., None])
        total = b[..., -1:]
        written = total - b + i
        last = torch.maximum(written.amax(-1, keepdim=True), inter[..., -1:])
        keys = k * torch.exp(written - last)[..., None]
        kept = torch.exp(inter[..., -1:] - last)
        C, n, m = kept[..., None] * C + keys.transpose(-1, -2) @ v, kept * n + keys.sum(2), last[..., 0]
    return out


def slstm(x: Tensor, w: Weights, heads: int = 4) -> Tensor:
    p, dim = "mixer.layer.", x.shape[-1]
    normed = F.layer_norm(x, (dim,), 1 + w["mixer.x.weight"], None, 1e-5)
    c = convolved(normed, w, "mixer.c")
    gates = torch.cat(
        [
            torch.einsum("bshd,hod->sbho", t.unflatten(-1, (heads, -1)), w[f"{p}{gate}.weight"])
            for gate, t in zip("ifzo", (c, c, normed, normed), strict=True)
        ],
        -1,
    ) + torch.cat([w[f"{p}cell.{gate}_bias"] for gate in "ifzo"], -1)
    recurrent = w[p + "cell.recurrent"].flatten(2)
    y = cell = n = m = gates.new_zeros(x.shape[0], heads, dim // heads)
    ys = []
    for gate in gates.unbind(0):
        i, f, z, o = (gate + torch.einsum("bhd,hdo->bho", y, recurrent) if ys else gate).chunk(4, -1)
        through = m + F.logsigmoid(f)
        m = torch.maximum(i, through) if ys else i
        write, keep = torch.exp(i - m), torch.exp(through - m) if ys else torch.zeros_like(m)
        cell, n = keep * cell + write * torch.tanh(z), keep * n + write
        y = torch.sigmoid(o) * cell / n
        ys.append(y)
    y = F.layer_norm(torch.stack(ys, 1), (dim // heads,), eps=1e-5).flatten(2)
    x = x + y * (1 + w[p + "head_norm.weight"])
    normed = F.layer_norm(x, (dim,), 1 + w["ffn.layer_norm.weight"], None, 1e-5)
    g, u = F.linear(normed, w["ffn.net.proj_up.weight"]).chunk(2, -1)
    return x + F.linear(u * F.gelu(g), w["ffn.net.proj_down.weight"])


def attention(x: Tensor, w: Weights, heads: int = 4, window: int = 64, base: float = 1e4) -> Tensor:
    D, S = w["out.weight"].shape[1] // heads, x.shape[1]
    q, k, v = F.linear(rms_norm(x, w["norm.weight"], 1e-5), w["qkv.weight"]).split([heads * D, D, D], -1)
    place = torch.arange(S)
    angle = place[:, None] * base ** (-torch.arange(0, D // 2) * 2 / D)
    cos, sin = angle.cos(), angle.sin()

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    age = place[:, None] - place
    q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(turned(q), turned(k), v, (age >= 0) & (age < window), enable_gqa=True)
    return x + F.linear(y.transpose(1, 2).flatten(2), w["out.weight"])


def swiglu(x: Tensor, w: Weights) -> Tensor:
    y = rms_norm(x, w["norm.weight"], 1e-5)
    return x + F.linear(
        F.silu(F.linear(y, w["swiglu.gate_weight"])) * F.linear(y, w["swiglu.up_weight"]), w["swiglu.down_weight"]
    )


LAYERS: dict[str, Layer] = {
    "mamba_block.residual.": mamba, "mlstm_block.residual.": mlstm, "slstm_block.": slstm,
    "attention_layer.residual.": attention, "swiglu_layer.residual.": swiglu,
}  # fmt: skip


def by_hand(model: seqblocks.SequenceModel) -> Callable[[Tensor], Tensor]:
    """Return a function with the model's parameters, token ids [batch, seq] -> logits."""
    weights = dict(model.named_parameters())
    layers: list[tuple[Layer, Weights]] = []
    for index in range(len(model.layers)):  # type: ignore[arg-type]
        for prefix, layer in LAYERS.items():
            begin = f"layers.{index}.{prefix}"
            own = {name.removeprefix(begin): x for name, x in weights.items() if name.startswith(begin)}
            if own:
                layers.append((layer, own))

    def run(tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, weights["embed.weight"])
        for layer, own in layers:
            x = layer(x, own)
        return F.linear(rms_norm(x, weights["norm.weight"], 1e-6), weights["embed.weight"])

    return run


def tokens_of(length: int) -> Tensor:
    return torch.randint(0, 256, (BATCH, length + 1), generator=torch.Generator().manual_seed(length))


def loss_of(run: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(run(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def largest_difference(name: str, length: int = 130) -> float:
    """Return the largest difference of outputs, and of gradients, relative to the largest of all of them."""
    model = build(name).train()
    tokens, parameters = tokens_of(length), [*model.parameters()]
    outputs = [run(tokens[:, :-1]) for run in (model, by_hand(model))]
    grads = [
        torch.cat([x.flatten() for x in torch.autograd.grad(loss_of(run, tokens), parameters)])
        for run in (model, by_hand(model))
    ]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in (outputs, grads))


def passes(model: seqblocks.SequenceModel, tokens: Tensor) -> dict[str, Callable[[Callable[[Tensor], Tensor]], Any]]:
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0)

    def forward(run: Callable[[Tensor], Tensor]) -> None:
        with torch.no_grad():
            run(tokens[:, :-1])

    def training(run: Callable[[Tensor], Tensor]) -> None:
        loss_of(run, tokens).backward()
        optimiser.zero_grad()

    def with_optimiser(run: Callable[[Tensor], Tensor]) -> None:
        loss_of(run, tokens).backward()
        optimiser.step()
        optimiser.zero_grad()

    return {"forward": forward, "training": training, "with AdamW": with_optimiser}


def compare(work: Callable[[Any], Any], ours: Any, theirs: Any, rounds: int) -> tuple[float, float]:
    """Return our time in milliseconds, and its median ratio to theirs."""
    work(ours)
    work(theirs)
    times, ratios = [], []
    for _ in range(rounds):
        start = time.process_time()
        work(ours)
        middle = time.process_time()
        work(theirs)
        times.append(middle - start)
        ratios.append((middle - start) / (time.process_time() - middle))
    return 1e3 * statistics.median(times), statistics.median(ratios)


def main() -> None:
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    for name in sys.argv[2:] or MODELS:
        model = build(name).train()
        print(f"{name}: largest difference {largest_difference(name):.1e}")
        for length in LENGTHS:
            found = []
            for what, work in passes(model, tokens_of(length)).items():
                milliseconds, ratio = compare(work, model, by_hand(model), rounds)
                found.append(f"{what} {milliseconds:.1f} ms, {ratio:.2f}")
            print(f"  {length} tokens: {'; '.join(found)} of the time by hand", flush=True)


if __name__ == "__main__":
    main()
