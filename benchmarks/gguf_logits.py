"""Compare the logits of seqblocks with those of llama.cpp, which reads the same weights from a GGUF file.

    pip install llama-cpp-python gguf     # compiles llama.cpp, which takes about ten minutes
    python benchmarks/gguf_logits.py [mamba_130m mamba2_130m rwkv7_0_4b]

Prints, for each model and type of its matrices, the largest error of the logits relative to the largest logit. In f32
it must be below LIMIT. In f16 and q8_0 it is only reported: llama.cpp rounds weights and activations there.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import llama_cpp
import numpy
import torch

import seqblocks
from seqblocks.checkpoint import to_gguf
from seqblocks.checkpoint.gguf_file import TYPES

# In f32, sums of up to 1,536 products are in another order, in each of 24 layers: 24 * sqrt(1536) * 2^-24 = 6e-5.
LIMIT = 1e-4


def randomise(model: torch.nn.Module) -> None:
    """Add noise to all parameters, so that no norm, bias or skip is trivial."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)


def llama_logits(file: Path, ids: list[int]) -> numpy.ndarray:
    """Return the logits that llama.cpp computes for each token."""
    engine = llama_cpp.Llama(str(file), n_ctx=len(ids), logits_all=True, n_threads=1, verbose=False)
    engine.eval(ids)
    return numpy.array(engine.scores[: len(ids)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["mamba_130m", "mamba2_130m", "rwkv7_0_4b"])
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    failed = False
    for name in options.models:
        model = seqblocks.build(name)
        randomise(model)
        ids = torch.randint(0, model.spec.input.features, (options.tokens,), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            expected = model(ids[None])[0].numpy()
        with tempfile.TemporaryDirectory() as folder:
            seqblocks.save(model, Path(folder) / "model")
            for kind in TYPES:
                file = Path(folder) / f"{kind}.gguf"
                to_gguf(Path(folder) / "model", file, dtype=kind)
                found = llama_logits(file, ids.tolist())
                error = float(numpy.abs(found - expected).max() / numpy.abs(expected).max())
                wrong = kind == "f32" and not error <= LIMIT
                failed |= wrong
                verdict = ": too large" if wrong else ""
                print(f"{name:12} {kind:5} largest error {error:.1e} of the largest logit{verdict}")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
