"""Language models of this package and of others with the same weights, which `models.py` compares."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf_models
import steps
import torch
from cpu import OURS
from torch import Tensor, nn

import seqblocks


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
