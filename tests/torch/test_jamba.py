"""A stack like Jamba: the layout of its layers, Mamba with norms of dt, B and C, and training with balanced experts."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, silu, softplus

import seqblocks
from seqblocks.descriptions.summary import summarise


def test_attention_is_the_fifth_of_eight_and_experts_are_in_odd_layers() -> None:
    model = seqblocks.build("jamba_small", set={"depth": 2}, device="meta")
    names = [name for name, _ in model.named_parameters()]
    layers = [{name.split(".", 2)[2] for name in names if name.startswith(f"layers.{at}.")} for at in range(16)]
    attention = [any("attention_mixer" in name for name in layer) for layer in layers]
    assert attention == [at % 8 == 4 for at in range(16)]
    assert [any("mamba_mixer" in name for name in layer) for layer in layers] == [not each for each in attention]
    assert [any("router" in name for name in layer) for layer in layers] == [at % 2 == 1 for at in range(16)]


def test_active_parameters_are_those_of_two_experts_of_four() -> None:
    found = summarise(seqblocks.build("jamba_small", device="meta"))
    expert = 3 * 64 * 160
    assert found.params - found.active_params == 4 * 2 * expert


def test_mamba_with_norms() -> None:
    text = """
seqblocks: 1
use: [mamba]
model: {input: {features: 6}, steps: [{mamba_mixer: {dim: 6, state: 3, rank: 2, norms: true, name: m}}]}
"""
    model = seqblocks.build_text(text, dtype=torch.float64)
    p = {name.removeprefix("m."): weight.detach() for name, weight in model.named_parameters()}
    p |= {name: 1 + torch.rand_like(p[name]) for name in p if "norm" in name}
    model.load_state_dict({f"m.{name}": weight for name, weight in p.items()})

    def normed(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * p[f"{name}.weight"]

    x = torch.randn(7, 6, dtype=torch.float64)
    u, z = (x @ p["in_proj.weight"].T).chunk(2, -1)
    before = torch.cat([torch.zeros(3, 12, dtype=torch.float64), u])
    taps = p["conv1d.weight"][:, 0].T
    u = silu(sum(taps[k] * before[k : k + 7] for k in range(4)) + p["conv1d.bias"])
    low, b, c = (u @ p["x_proj.weight"].T).split([2, 3, 3], -1)
    dt = softplus(normed(low, "dt_norm") @ p["dt_proj.weight"].T + p["dt_proj.bias"])
    b, c = normed(b, "B_norm"), normed(c, "C_norm")
    h, rows = torch.zeros(12, 3, dtype=torch.float64), []
    for t in range(7):
        h = torch.exp(-dt[t, :, None] * p["ssm.A_log"].exp()) * h + (dt[t] * u[t])[:, None] * b[t]
        rows.append((h * c[t]).sum(-1) + p["ssm.D"] * u[t])
    expected = (torch.stack(rows) * silu(z)) @ p["out_proj.weight"].T
    torch.testing.assert_close(model(x[None])[0], expected, rtol=1e-10, atol=1e-12)


def test_it_trains_with_balanced_experts() -> None:
    model = seqblocks.build("jamba_small", set={"dim": 16, "hidden": 16, "vocabulary": 11})
    tokens = torch.randint(11, (2, 24), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameter_groups(0.01), lr=1e-2)
    seen = []
    for _ in range(12):
        logits = model(tokens[:, :-1])
        losses = model.auxiliary_losses()
        assert {*losses} == {f"layers.{at}.layer.feed_forward.residual.mixer.network.experts" for at in (1, 3, 5, 7)}
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss + 0.01 * sum(losses.values())).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    assert seen[-1] < 0.8 * seen[0]
