"""Generate tokens with a language model: read the prompt in chunks, then sample one token at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any, Protocol

import torch
from torch import Tensor

from seqblocks.errors import RunError, UsageError, listing, quote
from seqblocks.graph import ModelSpec
from seqblocks.runtime import arguments
from seqblocks.state import States
from seqblocks.streaming.advance import advance_of, is_compiled
from seqblocks.streaming.token_rows import has_tokens

CHUNK = 512  # tokens per chunk of a prompt, so that memory does not grow with its length
COLDEST = 1e-30  # at this temperature, only the largest logits have a probability; divided by less, they overflow

BYTES = 256  # tokens of a model whose token ids are bytes

Prompt = Tensor | bytes | Sequence[int] | Sequence[bytes] | Sequence[Sequence[int]] | Sequence[Tensor]


class Generates(Protocol):
    """The interface of a model that `generate` uses, `SequenceModel`."""

    spec: ModelSpec
    frame_size: int
    takes_frames: bool

    def step(self, x: Tensor, state: States | None = None) -> tuple[Any, States]: ...

    def init_state(self, batch_size: int, device: Any, dtype: Any, **inputs: Tensor) -> States: ...

    def _start_stream(self) -> None: ...

    def some_tensor(self) -> Tensor: ...


def generate(
    model: Generates,
    prompt: Prompt,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | Iterable[int] = (),
    seed: int | None = None,
    state: States | None = None,
    on_token: Callable[[int, int], Any] | None = None,
    output: str | None = None,
    **inputs: Tensor,
) -> list[Tensor]:
    """Generate tokens after each prompt. Returns only the new tokens, int64.

    prompt: token ids [batch, seq], one sequence, or a list of sequences of any length; at least one token each. For a
    model of 256 tokens, a sequence may be bytes.
    state: the state before the prompts (a cached prefix), for the same number of sequences; it is not modified.
    temperature: 0 selects the most likely token; otherwise tokens are sampled from softmax(logits / temperature).
    top_k: sample from the most likely tokens. top_p: sample from the smallest set of tokens with this probability.
    seed: of the samples; None uses torch's default generator. stop: token ids that end a sequence, which includes them.
    on_token(sequence, token): called for each new token. output: name of the logits, for a model with `outputs:`.
    inputs: those that do not stream, as in `init_state`.

    The model must map tokens to logits, and stream. Call `model.eval()` first. Raises UsageError and RunError.
    """
    _check_model(model)
    _check_names(model.spec, inputs)
    _check_output(model.spec, output)
    sampler = _Sampler(temperature, top_k, top_p, seed, model)
    stops = _stops(stop)
    _check_function(on_token)
    if not _is_whole(max_new_tokens) or max_new_tokens < 0:
        raise UsageError(f"max_new_tokens must be a whole number, at least 0, not {max_new_tokens!r}")
    x, resets = _padded(prompt, model.some_tensor().device, model.spec.input.features)
    if state is not None and resets is not None:
        raise UsageError("prompts that continue a state must have equal lengths")
    if state is not None:
        arguments.check_names_of_context(model.spec.inputs, inputs, x.shape[0])
        arguments.check_no_context(inputs)
    made: list[list[int]] = [[] for _ in range(x.shape[0])]
    if max_new_tokens and made:
        with torch.inference_mode():  # The result is made outside of it, since a model may be trained on it.
            if state is None:
                state = model.init_state(x.shape[0], None, None, **inputs)
            else:
                model._start_stream()
            logits, state = _read(model, x, resets, state, output)
            _continue(model, logits, state, made, max_new_tokens, sampler, stops, on_token, output)
    return [torch.tensor(tokens, dtype=torch.long, device=x.device) for tokens in made]


def _continue(
    model: Generates, logits: Tensor, state: States, made: list[list[int]], limit: int, sampler: _Sampler,
    stops: frozenset[int], on_token: Callable[[int, int], Any] | None, output: str | None,
) -> None:
    """Append tokens to `made`."""
    rows, advance = list(range(len(made))), advance_of(model, state, limit - 1, on_token is not None)
    for count in range(1, limit + 1):
        tokens = sampler(logits)
        numbers = tokens.tolist()
        for row, token in zip(rows, numbers, strict=True):
            made[row].append(token)
            if on_token:
                on_token(row, token)
        unfinished = [at for at, token in enumerate(numbers) if token not in stops]
        if not unfinished or count == limit:
            return
        if len(unfinished) < len(rows):
            advance.keep(unfinished)
            rows, tokens = [rows[at] for at in unfinished], tokens[torch.tensor(unfinished, device=tokens.device)]
        logits = _logits(advance(tokens), output)


def _read(
    model: Any, x: Tensor, resets: Tensor | None, state: States, output: str | None
) -> tuple[Tensor, States]:
    """Return the logits after a prompt, and the state."""
    y: Any = None
    if x.shape[1] == 1:  # for instance after a cached prefix
        y, state = model.step(x[:, 0], state)
        return _logits(y, output), state
    for start in range(0, x.shape[1], CHUNK):
        span = slice(start, start + CHUNK)
        part = None if resets is None else resets[:, span]
        if is_compiled(model):
            y, state = model(x[:, span], state=state, return_state=True, resets=part)
        else:
            y, state = model._read(x[:, span], state, part)
    return _logits(y, output)[:, -1], state


def _logits(y: Any, output: str | None) -> Tensor:
    logits: Tensor = y if output is None else y[output]
    return logits


def _check_model(model: Any) -> None:
    if not isinstance(getattr(model, "spec", None), ModelSpec):  # a compiled model has it too
        raise UsageError(f"generate takes a model from build, not {type(model).__name__}")
    spec = model.spec
    if spec.input.kind != "tokens":
        raise RunError(f"{spec.name} reads {spec.input}, not token ids, so it cannot generate")
    if model.takes_frames:
        raise RunError(f"{spec.name} changes the rate of its tokens, but tokens are generated one by one")


def _check_names(spec: ModelSpec, inputs: Iterable[str]) -> None:
    for name in inputs:
        if name not in spec.inputs:
            _, _, *own, _ = inspect.signature(generate).parameters  # without the model, the prompt and the inputs
            known = listing([*own, *[*spec.inputs][1:]], len(own) + len(spec.inputs))
            raise RunError(f"the model has no input {quote(name)}, and generate no such argument: it takes {known}")


def _check_output(spec: ModelSpec, output: str | None) -> None:
    """Raise an error unless `output` is the name of an output of each token, or None if the only one has no name."""
    if spec.outputs and output not in spec.outputs:
        names = ", ".join(spec.outputs)
        raise UsageError(f"the model has the outputs {names}: pass output= with the name of the logits")
    if not spec.outputs and output is not None:
        raise UsageError(f"the model has one output, which has no name: leave out output={output!r}")
    wire = spec.output if output is None else spec.outputs[output]
    if not has_tokens(wire) or (wire and wire.kind == "tokens"):
        raise RunError(f"{output or spec.name} is {wire}, not logits of each token, so it cannot generate")


def _check_function(on_token: Any) -> None:
    if on_token is not None and not callable(on_token):
        raise UsageError(f"on_token must be a function (sequence, token), not {on_token!r}")


def _stops(stop: int | Iterable[int]) -> frozenset[int]:
    given: Any = stop.tolist() if isinstance(stop, Tensor) else stop
    tokens = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(_is_whole(token) for token in tokens):
        raise UsageError(f"stop must be a token id or several, not {stop!r}")
    return frozenset(map(int, tokens))


def _padded(prompt: Prompt, device: torch.device, vocabulary: int) -> tuple[Tensor, Tensor | None]:
    """Return the prompts as [batch, seq], and where each begins if they differ in length.

    Shorter prompts are right-aligned; a reset separates them from the padding before them.
    """
    rows = [_row(each, device, vocabulary) for each in _rows(prompt)]
    if not rows:
        return torch.empty(0, 1, dtype=torch.long, device=device), None
    longest = max(row.numel() for row in rows)
    x = torch.stack([torch.nn.functional.pad(row, (longest - row.numel(), 0)) for row in rows])
    if all(row.numel() == longest for row in rows):
        return x, None
    resets = torch.zeros_like(x, dtype=torch.bool)
    for at, row in enumerate(rows):
        resets[at, longest - row.numel()] = row.numel() < longest
    return x, resets


def _rows(prompt: Any) -> list[Any]:
    if isinstance(prompt, Tensor):
        return [prompt] if prompt.dim() < 2 else [*prompt]
    if isinstance(prompt, str | bytes | bytearray):
        return [prompt]
    if not isinstance(prompt, list | tuple):
        raise UsageError(f"a prompt is token ids, in a tensor or in lists, not {type(prompt).__name__}")
    return [prompt] if prompt and _is_whole(prompt[0]) else [*prompt]


def _row(tokens: Any, device: torch.device, vocabulary: int) -> Tensor:
    if isinstance(tokens, str):
        how = "encode it, with text.encode()" if vocabulary == BYTES else "encode it with the model's tokenizer"
        raise UsageError(f"a prompt is token ids, in a tensor or in lists, not str: {how}")
    if isinstance(tokens, bytes | bytearray):
        if vocabulary != BYTES:
            raise UsageError(f"bytes are the token ids of a model of {BYTES} tokens, and this model has {vocabulary:,}")
        tokens = torch.tensor(list(tokens), dtype=torch.long)
    try:
        row = torch.as_tensor(tokens, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        found = f"{type(tokens).__name__}: {error}"
        raise UsageError(f"a prompt is token ids, 64-bit integers, and this cannot be read as such ({found})") from None
    if row.dim() != 1 or not row.numel() or row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
        raise UsageError(f"a prompt must be a sequence of at least one token id, not {row.dtype} {list(row.shape)}")
    return row.long()


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) or (isinstance(x, Tensor) and x.numel() == 1 and not x.is_complex())


def _is_whole(x: Any) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool)


class _Sampler:
    """Sample a token from each row of logits."""

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float | None, seed: int | None, model: Generates
    ) -> None:
        if not _is_number(temperature) or not 0 <= temperature < float("inf"):
            raise UsageError(f"temperature must be a number, at least 0, not {temperature!r}")
        if top_k is not None and (not _is_whole(top_k) or top_k < 1):
            raise UsageError(f"top_k must be a whole number, at least 1, not {top_k!r}")
        if top_p is not None and (not _is_number(top_p) or not 0 < top_p <= 1):
            raise UsageError(f"top_p must be a probability above 0, not {top_p!r}")
        self._temperature = temperature if temperature == 0 else max(temperature, COLDEST)
        self._top_k, self._top_p = top_k, top_p
        self._generator = None
        if seed is not None:
            if not _is_whole(seed) or not -(2**63) <= seed < 2**63:
                raise UsageError(f"a seed must be a 64-bit integer or None, not {seed!r}")
            self._generator = torch.Generator(model.some_tensor().device).manual_seed(int(seed))

    def __call__(self, logits: Tensor) -> Tensor:
        """Return token ids [batch] for logits [batch, vocabulary]."""
        if self._temperature == 0:
            return logits.argmax(-1)
        scores = logits.float() / self._temperature
        if self._top_k is not None and self._top_k < scores.shape[-1]:
            least = scores.topk(self._top_k, -1).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self._top_p is not None and self._top_p < 1:
            scores = _nucleus(scores, self._top_p)
        probabilities = scores.softmax(-1)
        try:
            return torch.multinomial(probabilities, 1, generator=self._generator).squeeze(-1)
        except RuntimeError:
            if probabilities.isfinite().all():
                raise
            raise RunError("no token can be sampled: the model's logits are not finite") from None


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens with total probability `top_p` (arXiv:1904.09751)."""
    ordered, index = scores.sort(-1, descending=True)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability  # total probability of the more likely tokens
    left_out = before >= top_p
    left_out[:, 0] = False  # in float32, a tiny top_p is 0
    return scores.masked_fill(left_out.gather(-1, index.argsort(-1)), -torch.inf)
