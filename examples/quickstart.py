"""Run an image through a Vision-LSTM, and a sequence token by token. Needs only seqblocks."""

import torch

import seqblocks

SEVEN = """
........
.######.
.....##.
....##..
...##...
..##....
..##....
........
"""

# A bundled spec for images of 8 x 8 pixels and ten classes. Its weights are random, so the result has no meaning;
# examples/digits.py trains it.
model = seqblocks.build("vil_digits", seed=0).eval()
pixels = [[float(c == "#") for c in line] for line in SEVEN.split()]
image = torch.tensor(pixels)[None, None]
with torch.no_grad():
    logits = model(image)
count = sum(p.numel() for p in model.parameters())
print(f"image {list(image.shape)} -> logits {list(logits.shape)}, {count:,} parameters")
print("logits " + " ".join(f"{value:.2f}" for value in logits[0].tolist()))

# Your own spec, as text. It reads only the past, so it can run step by step.
STREAM = """
seqblocks: 1
use: [vil]
model:
  input: {features: 16}
  steps:
    - repeat: {name: blocks, times: 2, steps: [{vil: {dim: 16}}]}
    - linear: {features: 1}
"""
stream = seqblocks.build_text(STREAM, seed=0).eval()
x = torch.randn(1, 12, 16)
with torch.no_grad():
    whole = stream(x)
    state, steps = stream.init_state(batch_size=1), []
    for t in range(12):
        y, state = stream.step(x[:, t], state)
        steps.append(y)
print(f"whole sequence = step by step, to {(torch.stack(steps, 1) - whole).abs().max():.0e}")
