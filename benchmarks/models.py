"""Measure time and memory of whole language models on a CPU, against other packages with the same weights.

    pip install 'seqblocks[peers]'        # missing packages are listed as not installed
    pip install llama-cpp-python gguf     # for llama.cpp, which it compiles for ten minutes
    python benchmarks/models.py [--case mamba_128] [--threads 1] [--out benchmarks/results]

A candidate is measured only if its logits are right: their error against the same model in float64 is at most MARGIN
times that of ours in float32. The page states the error of those that round weights to 16 or 8 bits. llama.cpp reads a
GGUF file of the same weights, whose f32 form is checked. Candidates take turns, and medians of the ratios of adjacent
runs are reported. On one thread, times are CPU times of the process, which do not include other programs; on several
threads, elapsed times.

Lower bounds are measured in the same run: the multiply-accumulates of the model at the speed of a large matrix product
(three times as many for a training step); reading the weights once at the speed of memory, or of torch's fastest
product of one token if that reads faster; and, if benchmarks/steps.py has the model, a token written by hand in torch.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf_models
import steps
import torch
from common import versions, write
from cpu import OURS, resident
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import seqblocks
from seqblocks.kernels.numerics import PROCESSOR_NAME

PEERS = ("transformers", "xlstm", "mlstm_kernels", "mambapy", "llama_cpp_python")
LIMIT = 8.0  # seconds that a candidate may take for one run of one kind of work
BUDGET = 5.0  # seconds that all runs of a candidate may take for one kind of work
ROUNDS = 15
MARGIN = 4  # rounding errors of float32 in different orders of summation: those of mamba-130m differ by a factor of 3
BATCHES = (8, 64)  # prompts for which tokens are generated together


class Candidate(NamedTuple):
    """A language model: token ids [batch, seq] -> logits. prefill does the same and returns a state as well.

    generate(ids, count) returns the greedy tokens [count] after the first prompt.
    """

    model: nn.Module
    logits: Callable[[Tensor], Tensor]
    prefill: Callable[[Tensor], Any] | None = None
    generate: Callable[[Tensor, int], Tensor] | None = None
    streams_only: bool = False  # it computes logits token by token only, so whole sequences are not measured
    batches: bool = False  # it generates for several prompts together
    trains: bool = True
    rounds: bool = False  # its weights, so that logits and tokens differ


class Case(NamedTuple):
    """A model and the sizes that are measured: [batch, seq] in training, number of new tokens."""

    about: str
    make: Callable[[], tuple[seqblocks.SequenceModel, dict[str, Callable[[], Candidate]]]]
    training: tuple[int, int]
    tokens: int


# --- candidates -----------------------------------------------------------------------------------------------------


def ours(model: seqblocks.SequenceModel) -> Candidate:
    return Candidate(
        model, model, lambda ids: model(ids, return_state=True),
        lambda ids, count: seqblocks.generate(model, ids, max_new_tokens=count)[0], batches=True,
    )  # fmt: skip


def continued(step: Callable[[Tensor, Any], tuple[Tensor, Any]], state: Any) -> Callable[[Tensor, int], Tensor]:
    """Return a `generate` of a step: token ids [batch], state -> logits [batch, vocabulary], state."""

    def generate(ids: Tensor, count: int) -> Tensor:
        now, found = state(), []
        for token in ids.unbind(1):
            logits, now = step(token, now)
        for _ in range(count):
            found.append(logits.argmax(-1))
            logits, now = step(found[-1], now)
        return torch.cat(found)

    return generate


def of_transformers(model: Any, generating: Any = None) -> Candidate:
    """generating: the model that generates and prefills, if it is a different one."""
    generating = generating or model
    generating.generation_config.eos_token_id = None
    options = {"do_sample": False, "use_cache": True, "pad_token_id": 0}
    return Candidate(
        model, lambda ids: model(ids, use_cache=False).logits, lambda ids: generating(ids, use_cache=True),
        lambda ids, count: generating.generate(ids, max_new_tokens=count, **options)[0, ids.shape[1] :], batches=True,
    )  # fmt: skip


def of_llama(model: seqblocks.SequenceModel, kind: str) -> Candidate:
    """llama.cpp with matrices of this type in its file."""
    import llama_cpp
    import numpy

    from seqblocks.checkpoint import to_gguf

    threads, vocabulary = torch.get_num_threads(), model.spec.input.features
    options = {"n_ctx": 1024, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
    if kind == "f32":  # keys and values as well
        options |= {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False}
    with tempfile.TemporaryDirectory() as folder:
        seqblocks.save(model, Path(folder) / "model")
        to_gguf(Path(folder) / "model", file := Path(folder) / "model.gguf", dtype=kind)
        every, last = (llama_cpp.Llama(str(file), logits_all=each, **options) for each in (True, False))

    def read(engine: Any, ids: Tensor) -> None:
        engine.reset()
        engine.eval(ids[0].tolist())

    def logits(ids: Tensor) -> Tensor:
        read(every, ids)
        return torch.from_numpy(every.scores[: ids.shape[1]].copy())[None]

    several: dict[int, Together] = {}  # by the number of prompts

    def generate(ids: Tensor, count: int) -> Tensor:
        if len(ids) > 1:
            if len(ids) not in several:
                several[len(ids)] = Together(last, len(ids), vocabulary)
            return several[len(ids)].generate(ids, count)
        read(last, ids)
        found: list[int] = []
        for _ in range(count):
            row = numpy.ctypeslib.as_array(last._ctx.get_logits_ith(-1), shape=(vocabulary,))
            found.append(int(row.argmax()))
            last.eval(found[-1:])
        return torch.tensor(found)

    return Candidate(
        nn.Module(), logits, lambda ids: read(last, ids), generate, batches=True, trains=False, rounds=kind != "f32"
    )  # fmt: skip


class Together:
    """Several sequences in one context of llama.cpp, each a sequence of its own in every batch."""

    def __init__(self, engine: Any, count: int, vocabulary: int) -> None:
        """engine: a Llama, whose model and options are used. count: of sequences, with 64 tokens each at most."""
        import llama_cpp

        self.lib, self.count, self.vocabulary, self.engine = llama_cpp, count, vocabulary, engine
        options = type(engine.context_params).from_buffer_copy(engine.context_params)
        options.n_seq_max, options.n_ctx = count, 64 * count
        self.context = llama_cpp.llama_init_from_model(engine._model.model, options)
        self.batch = llama_cpp.llama_batch_init(count, 0, 1)

    def read(self, tokens: Sequence[int], at: int) -> None:
        """Run one token of each sequence, the one at position `at`."""
        self.batch.n_tokens = self.count
        for row, token in enumerate(tokens):
            self.batch.token[row], self.batch.pos[row], self.batch.logits[row] = token, at, 1
            self.batch.n_seq_id[row], self.batch.seq_id[row][0] = 1, row
        if self.lib.llama_decode(self.context, self.batch):
            raise RuntimeError("llama.cpp could not run a batch")

    def generate(self, ids: Tensor, count: int) -> Tensor:
        """Return the greedy tokens [count] after the first prompt."""
        import numpy

        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        for at, tokens in enumerate(ids.unbind(1)):
            self.read(tokens.tolist(), at)
        found: list[int] = []
        for at in range(ids.shape[1], ids.shape[1] + count):
            logits = (self.lib.llama_get_logits_ith(self.context, row) for row in range(self.count))
            tokens = [int(numpy.ctypeslib.as_array(each, shape=(self.vocabulary,)).argmax()) for each in logits]
            found.append(tokens[0])
            self.read(tokens, at)
        return torch.tensor(found)


def smaller(model: seqblocks.SequenceModel) -> dict[str, Callable[[], Candidate]]:
    """Return llama.cpp, and what both packages have with smaller weights."""
    made = {f"llama.cpp {name}": lambda name=name: of_llama(model, name) for name in ("f32", "f16", "q8_0")}
    kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    halves = {name: lambda kind=kind: copy.deepcopy(model).to(kind) for name, kind in kinds.items()}
    rounded = {**halves, "int8": lambda: seqblocks.quantize(model)}
    for name, make in rounded.items():
        made[f"seqblocks {name}"] = lambda make=make: ours(make())._replace(trains=False, rounds=True)
    return made


def spec_and_model(peer: Any) -> seqblocks.SequenceModel:
    """Return our model with the configuration and weights of a transformers model."""
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        return seqblocks.from_pretrained(folder).eval()


def mamba(dim: int, depth: int, vocabulary: int, kind: str = "Mamba") -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        config = {"vocab_size": vocabulary, "hidden_size": dim, "num_hidden_layers": depth}
        if kind == "Mamba2":
            config |= {"num_heads": dim // 32, "head_dim": 64, "n_groups": 1}
        cls = getattr(transformers, f"{kind}ForCausalLM")
        torch.manual_seed(0)
        peer = cls(getattr(transformers, f"{kind}Config")(**config)).eval()
        model = spec_and_model(peer)

        def with_scan_of_mambapy() -> Candidate:
            import mambapy  # noqa: F401

            other = cls(getattr(transformers, f"{kind}Config")(**config, use_mambapy=True)).eval()
            other.load_state_dict(peer.state_dict())
            return of_transformers(other)._replace(generate=None)

        made = {OURS: lambda: ours(model), "transformers": lambda: of_transformers(peer)}
        if kind != "Mamba2":
            made["transformers, mambapy's scan"] = with_scan_of_mambapy
        if kind in ("Mamba", "Mamba2"):
            made |= smaller(model)
        if kind == "Mamba":
            made |= {"mambapy": lambda: of_mambapy(model), "by hand": lambda: by_hand(model)}
        return model, made

    return make


def by_hand(model: seqblocks.SequenceModel) -> Candidate:
    step, first = steps.by_hand(model, 1)

    def stepped(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        return step(tokens, state), state

    def logits(ids: Tensor) -> Tensor:
        state = [*first]
        return torch.stack([step(token, state) for token in ids[:1].unbind(1)], 1)

    return Candidate(model, logits, None, continued(stepped, lambda: [*first]), streams_only=True)


class OfMambapy(nn.Module):
    """mambapy's blocks between our embedding and norm, because its own language model imports mamba_ssm."""

    def __init__(self, dim: int, depth: int, vocabulary: int) -> None:
        from mambapy.mamba import Mamba, MambaConfig, RMSNorm

        super().__init__()
        self.embed, self.norm_f = nn.Embedding(vocabulary, dim), RMSNorm(dim)
        self.stack = Mamba(MambaConfig(d_model=dim, n_layers=depth))

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm_f(self.stack(self.embed(ids))) @ self.embed.weight.t()

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        x, state = self.stack.step(self.embed(tokens), [*state])
        return self.norm_f(x) @ self.embed.weight.t(), state


def of_mambapy(model: seqblocks.SequenceModel) -> Candidate:
    weights = {name.replace("ssm.", ""): x for name, x in model.state_dict().items() if name != "unembed.weight"}
    weights = {name.replace("mamba_block.residual.", ""): x for name, x in weights.items()}
    weights = {name.replace("layers.", "stack.layers."): x for name, x in weights.items()}
    vocabulary, dim = weights["embed.weight"].shape
    peer = OfMambapy(dim, len(model.layers), vocabulary).eval()  # type: ignore[arg-type]
    peer.load_state_dict(weights)
    block = peer.stack.config
    first = [(None, torch.zeros(1, block.d_inner, block.d_conv - 1)) for _ in range(block.n_layers)]
    return Candidate(peer, peer, None, continued(peer.step, lambda: first))


def xlstm_large() -> Any:
    """xLSTM-large in transformers. The keys of its heads have half the width of the values."""
    import transformers

    size = {"vocab_size": 1024, "hidden_size": 512, "embedding_dim": 512, "num_heads": 4, "num_hidden_layers": 6}
    torch.manual_seed(0)
    peer, generating = (
        transformers.xLSTMForCausalLM(transformers.xLSTMConfig(**size, num_blocks=None, mode=mode)).eval()
        for mode in ("train", "inference")
    )
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    generating.load_state_dict(peer.state_dict())
    model = spec_and_model(peer)
    return model, {OURS: lambda: ours(model), "transformers": lambda: of_transformers(peer, generating)}


def xlstm_language() -> Any:
    """xLSTM[1:0] in the authors' package, `xlstm`."""
    from xlstm import mLSTMBlockConfig, mLSTMLayerConfig, xLSTMLMModel, xLSTMLMModelConfig

    from seqblocks.checkpoint.official import load_official

    layer = mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=4)
    size = {"embedding_dim": 256, "num_blocks": 6, "vocab_size": 1024, "context_length": 1024}
    torch.manual_seed(0)
    peer = xLSTMLMModel(xLSTMLMModelConfig(mlstm_block=mLSTMBlockConfig(mlstm=layer), **size)).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    changes = {"dim": 256, "vocabulary": 1024, "model.blocks.pattern": "m*6"}
    model = seqblocks.build("xlstm_125m", set=changes).eval()
    load_official(model, {name: x for name, x in peer.state_dict().items() if "causal_mask" not in name})

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        logits, state = peer.step(tokens[:, None], state=state)
        return logits[:, 0], state

    theirs = Candidate(peer, peer, None, continued(step, dict))
    return model, {OURS: lambda: ours(model), "xlstm": lambda: theirs}


def rwkv(version: int) -> Callable[[], Any]:
    """RWKV, which transformers does not have in these versions."""

    def make() -> Any:
        if version == 7:
            model = seqblocks.build("rwkv7_0_4b", set={"dim": 512, "depth": 8, "vocabulary": 256}).eval()
        else:
            text = gguf_models.RWKV6
            for small, large in (("128", "512"), ("times: 3", "times: 8"), ("heads: 2", "heads: 8"), ("96", "256")):
                text = text.replace(small, large)
            model = seqblocks.build_text(text).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        return model, {OURS: lambda: ours(model), **smaller(model)}

    return make


def falcon_h1() -> Any:
    """A hybrid without experts: Mamba-2 and attention in each layer."""
    import transformers

    config = transformers.FalconH1Config(
        vocab_size=256, hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=2, mamba_d_ssm=1024, mamba_n_heads=16, mamba_d_head=64, mamba_d_state=64,
        mamba_rms_norm=False, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    peer = transformers.FalconH1ForCausalLM(config).eval()
    model = spec_and_model(peer)
    return model, {OURS: lambda: ours(model), "transformers": lambda: of_transformers(peer), **smaller(model)}


CASES = {
    "mamba_128": Case("Mamba, width 128, 5 layers, 256 tokens", mamba(128, 5, 256), (8, 128), 64),
    "mamba_512": Case("Mamba, width 512, 8 layers, 256 tokens", mamba(512, 8, 256), (2, 128), 48),
    "mamba_130m": Case("mamba-130m: width 768, 24 layers, 50,280 tokens", mamba(768, 24, 50280), (1, 128), 16),
    "mamba2": Case("Mamba-2, width 512, 8 layers, 256 tokens", mamba(512, 8, 256, "Mamba2"), (2, 128), 48),
    "falcon_mamba": Case(
        "FalconMamba, width 512, 8 layers, 256 tokens", mamba(512, 8, 256, "FalconMamba"), (2, 128), 48
    ),
    "rwkv6": Case("RWKV-6, width 512, 8 layers, 256 tokens", rwkv(6), (2, 128), 48),
    "rwkv7": Case("RWKV-7, width 512, 8 layers, 256 tokens", rwkv(7), (2, 128), 48),
    "falcon_h1": Case("Falcon-H1, width 512, 6 layers, 256 tokens", falcon_h1, (2, 128), 48),
    "xlstm_large": Case("xLSTM-large, width 512, 6 layers of 4 heads, 1,024 tokens", xlstm_large, (4, 128), 48),
    "xlstm": Case("xLSTM[1:0], width 256, 6 layers of 4 heads, 1,024 tokens", xlstm_language, (8, 128), 48),
}


# --- measuring ------------------------------------------------------------------------------------------------------


def train(candidate: Candidate, ids: Tensor) -> None:
    """Run one training step without the optimiser, which is the same for all."""
    loss = cross_entropy(candidate.logits(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    candidate.model.zero_grad()


def seconds(work: Callable[[], Any]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    work()
    return clock() - start


def drawn(vocabulary: int, batch: int, seq: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch, seq), generator=torch.Generator().manual_seed(seq))


def works(candidate: Candidate, case: Case, vocabulary: int) -> dict[str, tuple[Callable[[int], Any], int]]:
    """Return for each kind of work a function of a number of tokens, and the number that is measured."""
    eval_only, training = candidate.model.eval, candidate.model.train

    def run(call: Callable[..., Any], *arguments: Any) -> Any:
        eval_only()
        with torch.inference_mode():
            return call(*arguments)

    def trained(seq: int) -> None:
        training()
        train(candidate, drawn(vocabulary, case.training[0], seq + 1))

    found: dict[str, tuple[Callable[[int], Any], int]] = {}
    if not candidate.streams_only:
        found["forward"] = (lambda seq: run(candidate.logits, drawn(vocabulary, 1, seq)), 512)
        if candidate.trains:
            found["training"] = (trained, case.training[1])
    if prefill := candidate.prefill:
        found["prefill"] = (lambda seq: run(prefill, drawn(vocabulary, 1, seq)), 512)
    if generate := candidate.generate:
        for batch in (1, *BATCHES) if candidate.batches else (1,):
            prompts = drawn(vocabulary, batch, 8)
            count = new_tokens(batch, case)
            found[of_batch(batch)] = (lambda count, prompts=prompts: run(generate, prompts, count), count)
    return found


def of_batch(batch: int) -> str:
    return "generate" if batch == 1 else f"generate {batch}"


def generated(kind: str, case: Case) -> int:
    """Return how many tokens a run of this kind of work generates, 0 if none."""
    batch = next((each for each in (1, *BATCHES) if of_batch(each) == kind), 0)
    return batch * new_tokens(batch, case)


def new_tokens(batch: int, case: Case) -> int:
    """Return how many tokens are generated for each of several prompts."""
    return case.tokens if batch == 1 else max(case.tokens // 4, 4)


def measured(candidates: dict[str, Candidate], case: Case, vocabulary: int) -> dict[str, dict[str, Any]]:
    """Return for each candidate and kind of work {"ms", "ratio" to ours}, or {"left_out": reason}."""
    all_works = {name: works(candidate, case, vocabulary) for name, candidate in candidates.items()}
    found: dict[str, dict[str, Any]] = {name: {} for name in candidates}
    for kind in all_works[OURS]:
        able = {name: of[kind] for name, of in all_works.items() if kind in of}
        for name, (work, size) in [*able.items()]:
            few = 4 if generated(kind, case) else max(size // 8, min(size, 64))  # xLSTM computes 64 at a time
            work(few)  # the first run includes preparations
            expected = size / few * seconds(lambda work=work, few=few: work(few))  # type: ignore[misc]
            if expected > LIMIT:
                found[name][kind] = {"left_out": f"about {expected:.0f} s"}
                del able[name]
        found_here = compared({name: (lambda w=w, n=n: w(n)) for name, (w, n) in able.items()})  # type: ignore[misc]
        for name, record in found_here.items():
            found[name][kind] = record
    return found


def compared(runs: dict[str, Callable[[], Any]]) -> dict[str, dict[str, Any]]:
    """Return medians of times, and of ratios to our run in the same round."""
    times: dict[str, list[float]] = {name: [seconds(run)] for name, run in runs.items()}
    for _ in range(ROUNDS):
        if max(sum(each) for each in times.values()) > BUDGET and len(times[OURS]) > 2:
            break
        for name, run in runs.items():
            times[name].append(seconds(run))
    later = {name: each[1:] for name, each in times.items()}
    return {
        name: {
            "ms": 1e3 * statistics.median(each),
            "ratio": statistics.median(a / b for a, b in zip(each, later[OURS], strict=True)),
        }
        for name, each in later.items()
    }


def own_error(model: seqblocks.SequenceModel, expected: Tensor, ids: Tensor) -> float:
    """Return the smaller of the errors of our forward pass and of our steps in float32."""
    with torch.inference_mode():
        state, found = model.init_state(1), []
        for token in ids.unbind(1):
            y, state = model.step(token, state)
            found.append(y)
        return min(relative_error(model(ids), expected), relative_error(torch.stack(found, 1), expected))


def relative_error(logits: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest logit."""
    return float((logits - expected).abs().max() / expected.abs().max())


def checked(candidate: Candidate, expected: Tensor, allowed: float, tokens: Tensor, ids: Tensor) -> str:
    """Return "" if a candidate's logits and tokens are right, otherwise the difference."""
    with torch.inference_mode():
        off = relative_error(candidate.logits(ids), expected)
        if not off <= allowed:
            return f"other logits: {off:.0e}"
        if candidate.generate and not torch.equal(candidate.generate(ids[:, :8], len(tokens)), tokens):
            return "other tokens"
    return ""


def measure(key: str) -> list[dict[str, Any]]:
    """Return one record per candidate of a case, and per lower bound."""
    case = CASES[key]
    try:
        model, makers = case.make()
    except ImportError as error:
        return [{"case": key, "candidate": OURS, "left_out": f"needs {error.name}"}]
    vocabulary = model.spec.input.features
    ids = drawn(vocabulary, 1, 64)
    with torch.inference_mode():
        expected = copy.deepcopy(model).double()(ids)
        tokens = seqblocks.generate(model, ids[:, :8], max_new_tokens=8)[0]
    allowed = MARGIN * own_error(model, expected, ids)
    candidates, errors, records = {}, {}, []
    for name, make in makers.items():
        try:
            candidate = make()
            if candidate.rounds:
                with torch.inference_mode():
                    errors[name] = relative_error(candidate.logits(ids), expected)
            problem = "" if candidate.rounds else checked(candidate, expected, allowed, tokens, ids)
        except ImportError as error:
            problem = f"{error.name} is not installed"
        if problem:
            records.append({"case": key, "candidate": name, "left_out": problem})
        else:
            candidates[name] = candidate
    for name, found in measured(candidates, case, vocabulary).items():
        records.append({"case": key, "candidate": name, "work": found, "peak_mb": peak(key, name)})
        records[-1] |= {"error": errors[name]} if name in errors else {}
    return records + floors(key, model, case)


def floors(key: str, model: seqblocks.SequenceModel, case: Case) -> list[dict[str, Any]]:
    """Return the lower bounds: the arithmetic of a pass, and reading the weights for one token."""
    flops = seqblocks.summarise(model).flops_per_token or 0
    bytes_of_weights = sum(x.numel() * x.element_size() for x in model.parameters())
    passes, batch = 1e3 * flops / (2 * product_rate()), case.training[0] * case.training[1]
    arithmetic = {"forward": passes * 512, "prefill": passes * 512, "training": 3 * passes * batch}
    reading = {"generate": 1e3 * case.tokens * bytes_of_weights / reading_rate()}
    return [
        {"case": key, "candidate": name, "floor": {kind: {"ms": ms} for kind, ms in found.items()}}
        for name, found in (("floor: arithmetic", arithmetic), ("floor: weights read once", reading))
    ]


def product_rate() -> float:
    """Return the multiply-accumulates per second of a large matrix product."""
    a = torch.randn(1024, 1024)
    return 1024**3 / min(seconds(lambda: a @ a) for _ in range(9))


def reading_rate() -> float:
    """Return the bytes per second at which memory is read once: by a sum, or by one of torch's products of a token."""
    weight, x = torch.ones(1 << 14, 1 << 12), torch.ones(1, 1 << 12)
    reads = [weight.sum, lambda: nn.functional.linear(x, weight)]
    if torch.backends.mkldnn.is_available():
        reads.append(lambda: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""))
    with torch.inference_mode():
        return max(weight.numel() * 4 / min(seconds(read) for _ in range(9)) for read in reads)


def peak(key: str, name: str) -> float | None:
    """Return the MB of a training step, in a separate process; None if there is no step or the process failed."""
    command = [sys.executable, __file__, "--worker", key, name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(done.stdout.split()[-1]) if done.returncode == 0 and done.stdout.strip() else None


def worker(key: str, name: str) -> None:
    """Print the highest resident size during a step, minus that at its start, in MB (Linux)."""
    case = CASES[key]
    model, makers = case.make()
    candidate = makers[name]()
    found = works(candidate, case, model.spec.input.features)
    if "training" not in found:
        return
    work, size = found["training"]
    work(min(size, 64))
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    work(size)
    print((resident("VmHWM") - before) / 1024)


# --- the page -------------------------------------------------------------------------------------------------------

KINDS = ("forward", "training", "prefill", *(of_batch(batch) for batch in (1, *BATCHES)))


def table(records: list[dict[str, Any]]) -> str:
    """Return the records as a page."""
    where = f"{PROCESSOR_NAME} ({platform.machine()}), {torch.get_num_threads()} thread(s)"
    where += f", Python {platform.python_version()}"
    lines = [
        f"# Whole models on a CPU, {datetime.date.today()}",
        "",
        f"{where}, {', '.join(versions(PEERS))}; float32, the same weights. Written by `benchmarks/models.py`.",
        f"Load average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.",
        "",
        "Times in ms, medians of interleaved runs, and in parentheses the median ratio to ours: forward and prefill of",
        "512 tokens, a training step without the optimiser, tokens generated per second after prompts of 8, one or",
        "several at once, and the memory of the training step in addition to the weights.",
    ]
    for key in dict.fromkeys(r["case"] for r in records):
        case, of_case = CASES[key], [r for r in records if r["case"] == key]
        batch, seq = case.training
        lines += ["", f"## {case.about}", ""]
        several = " | ".join(f"of {each} prompts" for each in BATCHES)
        lines += [f"| | forward | training, {batch} x {seq} | prefill | tokens per second | {several} | peak MB |"]
        lines += ["|---" * (6 + len(BATCHES)) + "|", *(row(r, case) for r in of_case)]
    return "\n".join(lines)


def row(r: dict[str, Any], case: Case) -> str:
    if "left_out" in r:
        return f"| {r['candidate']} | {r['left_out']} {'| ' * (4 + len(BATCHES))}|"
    found = r.get("work") or r["floor"]
    memory = r.get("peak_mb")
    cells = [cell(found.get(kind), kind, case) for kind in KINDS]
    name = f"{r['candidate']}, logits off by {r['error']:.0e}" if "error" in r else r["candidate"]
    return f"| {name} | {' | '.join(cells)} | {'' if memory is None else f'{memory:,.0f}'} |"


def cell(found: dict[str, Any] | None, kind: str, case: Case) -> str:
    if not found or "left_out" in found:
        return found["left_out"] if found else ""
    tokens = generated(kind, case)
    value = f"{1e3 * tokens / found['ms']:,.1f}" if tokens else f"{found['ms']:,.1f}"
    ratio = found.get("ratio", 1.0)
    return value if abs(ratio - 1.0) < 1e-9 else f"{value} ({1 / ratio if tokens else ratio:.2f} x)"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure whole language models on a CPU, against other packages.")
    parser.add_argument("--case", action="append", choices=CASES, help="measure only this case; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the table")
    parser.add_argument("--keep", action="store_true", help="keep the cases that today's file in --out contains")
    parser.add_argument("--threads", type=int, default=1, help="of torch; 0: as many as torch takes by itself")
    parser.add_argument("--worker", nargs=2, metavar=("CASE", "CANDIDATE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")  # transformers warns about kernels that are not installed
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.worker:
        worker(*options.worker)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    threads = "" if torch.get_num_threads() == 1 else f"-{torch.get_num_threads()}-threads"
    page = options.out / f"{datetime.date.today()}-models{threads}.md"
    numbers = page.with_suffix(".json")
    records = json.loads(numbers.read_text(encoding="utf-8")) if options.keep and numbers.exists() else []
    for key in options.case or CASES:
        if not any(r["case"] == key for r in records):
            records += measure(key)
            write(numbers, json.dumps(records, indent=1))
            write(page, table(records))
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
