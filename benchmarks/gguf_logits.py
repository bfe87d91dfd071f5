"""Compare the logits of seqblocks with those of llama.cpp, which reads the same weights from a GGUF file.

    pip install llama-cpp-python gguf     # compiles llama.cpp, which takes about ten minutes
    python benchmarks/gguf_logits.py [mamba_130m jamba …]

The models are bundled ones and those of gguf_models.py, by default all. Prints, for each type of matrices, the largest
error of the logits relative to the largest logit, and whether it is above the bound.

f32: sums of up to 1,536 products are in another order, in each of up to 24 layers: 24 * sqrt(1536) * 2^-24 = 6e-5.
llama.cpp looks GELU up in a table of float16, so activations then have the error of f16. f16 rounds weights and
activations to 11 bits, and q8_0 to 127 steps of the largest of 32 values: relative to a value of the usual size, the
root mean square of both errors is STEP. Errors of the products on the way to a logit add up like random numbers. A
bound is 4 times that, since norms and gates amplify them. Experts are chosen by a threshold, so that an error can
choose another one: for these, the two errors are only reported.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import gguf_models
import llama_cpp
import numpy
import torch

import seqblocks
from seqblocks.checkpoint import to_gguf
from seqblocks.checkpoint.gguf_file import TYPES

LIMIT = 1e-4
STEP = {"f16": math.sqrt(2 / 3) * 2**-11, "q8_0": math.sqrt(2 / 12) * 2.1 / 127}  # the largest of 32 is 2.1 times usual
BUNDLED = ("mamba_130m", "mamba2_130m", "rwkv7_0_4b", "rwkv6")


def randomise(model: torch.nn.Module) -> None:
    """Add noise to all parameters, so that no norm, bias or skip is trivial."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)


def saved(name: str, folder: Path) -> seqblocks.SequenceModel:
    """Save a model to a folder, and return it."""
    if name in gguf_models.CASES:
        gguf_models.built(gguf_models.CASES[name]).save_pretrained(folder)
        return seqblocks.from_pretrained(folder).eval()
    model = seqblocks.build_text(gguf_models.RWKV6) if name == "rwkv6" else seqblocks.build(name)
    randomise(model)
    seqblocks.save(model, folder)
    return model.eval()


def llama_logits(file: Path, ids: list[int]) -> numpy.ndarray:
    """Return the logits that llama.cpp computes for each token, with keys and values in float32."""
    options: dict[str, Any] = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    context = {"n_ctx": 128, "logits_all": True, "flash_attn": False}
    engine = llama_cpp.Llama(str(file), n_threads=1, verbose=False, **context, **options)
    engine.eval(ids)
    found = numpy.array(engine.scores[: len(ids)])
    engine.close()
    return found


def bound(name: str, model: seqblocks.SequenceModel, kind: str) -> float | None:
    """Return the largest error that is explained, or None."""
    case = gguf_models.CASES.get(name)
    nodes = list(seqblocks.graph.walk(model.spec.graph))
    products = sum(node.verb in ("linear", "swiglu", "unembed") for node in nodes)
    if kind == "f32" and not (case and case.gelu):
        return LIMIT
    if kind != "f32" and any(node.verb == "experts" for node in nodes):
        return None
    return 4 * math.sqrt(products) * STEP["f16" if kind == "f32" else kind]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*gguf_models.CASES, *BUNDLED])
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    failed = False
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            model = saved(name, Path(folder) / "model")
            generator = torch.Generator().manual_seed(1)
            ids = torch.randint(0, model.spec.input.features, (options.tokens,), generator=generator)
            with torch.no_grad():
                expected = model(ids[None])[0].numpy()
            for kind in TYPES:
                file = Path(folder) / f"{kind}.gguf"
                to_gguf(Path(folder) / "model", file, dtype=kind)
                found = llama_logits(file, ids.tolist())
                error = float(numpy.abs(found - expected).max() / numpy.abs(expected).max())
                most = bound(name, model, kind)
                wrong = not (most is None or error <= most)
                failed |= wrong
                verdict = f"{': too large, at most' if wrong else ', below'} {most:.1e}" if most else ""
                print(f"{name:26} {kind:5} largest error {error:.1e} of the largest logit{verdict}", flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
