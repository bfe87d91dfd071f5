"""Steps of models in bfloat16 and float16: planned, more exact than whole passes, and with the same interface."""

from __future__ import annotations

import copy
import random
import textwrap

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

import seqblocks
from seqblocks.errors import SpecError
from seqblocks.kernels import half
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.testing import random_context, random_input
from tests.compose import Composer
from tests.torch import planned

DTYPES = (torch.bfloat16, torch.float16)
CACHE = """
seqblocks: 1
use: [transformer, mamba]
model:
  input: {tokens: 11}
  steps:
    - embed: {features: 16}
    - mamba_block: {dim: 16}
    - attention_layer: {dim: 16, heads: 2, cache: 20}
    - layer_norm
    - unembed
"""
GATES = planned.GATES.replace("BLOCK", "12").replace("READ", "w")


def in_steps(model: SequenceModel, x: Tensor, context: dict[str, Tensor]) -> tuple[Tensor, seqblocks.States]:
    """Return the outputs of all tokens or frames, computed by `step`, and the last state."""
    size = model.frame_size if model.takes_frames else 0
    with torch.no_grad():
        state, made = model.init_state(x.shape[0], **context), []
        for at in range(0, x.shape[1], size or 1):
            y, state = model.step(x[:, at : at + size] if size else x[:, at], state)
            made.append(y)
    return (torch.cat(made, 1) if size else torch.stack(made, 1)), state


def assert_more_exact(model: SequenceModel, x: Tensor, context: dict[str, Tensor]) -> None:
    """Compare steps and a whole pass with float64. Between steps, a plan rounds less; both round the output.

    model: in 16 bits.
    """
    exact = copy.deepcopy(model).double()
    expected = exact(to(x, torch.float64), **to(context, torch.float64))
    whole = model(x, **context)
    found, state = in_steps(model, x, context)
    assert found.dtype == whole.dtype
    largest = expected.abs().max().clamp(min=torch.finfo(whole.dtype).tiny)
    errors = [float((y.double() - expected).abs().max() / largest) for y in (found, whole)]
    assert errors[0] <= errors[1] + torch.finfo(whole.dtype).eps, errors
    assert layout(state) == layout(model.init_state(x.shape[0], **context))


def layout(state: seqblocks.States) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {keystr(path): (x.dtype, x.shape) for path, x in tree_flatten_with_path(state)[0]}


def to(tree: dict[str, Tensor] | Tensor, dtype: torch.dtype) -> dict[str, Tensor] | Tensor:
    return tree_map(lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", [planned.SPEC, planned.CONVOLUTIONS, GATES, CACHE])
@pytest.mark.parametrize("smallest", [1, half.MIN_ELEMENTS])
@torch.no_grad()
def test_steps_round_less_than_a_whole_pass(
    dtype: torch.dtype, text: str, smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """smallest: from how many elements on matrices are read in 16 bits."""
    monkeypatch.setattr("seqblocks.streaming.half.MIN_ELEMENTS", smallest)
    model = seqblocks.build_text(text, seed=0, dtype=dtype).eval()
    assert_more_exact(model, torch.randint(0, 11, (3, 9), generator=torch.Generator().manual_seed(1)), {})
    assert model.token_plan is not None


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_quantized_models_of_16_bits(dtype: torch.dtype) -> None:
    """A token is rounded to 8 bits for each product: differences between steps and a pass are about 1 / 127."""
    model = seqblocks.quantize(seqblocks.build_text(CACHE, seed=0, dtype=dtype).eval(), smallest=1)
    x = torch.randint(0, 11, (3, 9), generator=torch.Generator().manual_seed(1))
    found, _ = in_steps(model, x, {})
    plan = model.token_plan
    expected = model(x)
    assert plan is not None
    assert found.dtype == expected.dtype == dtype
    assert float((found - expected).abs().max() / expected.abs().max()) < 4 / 127


@pytest.mark.filterwarnings("ignore::seqblocks.errors.SpecWarning")
@pytest.mark.parametrize("seed", range(24))
@torch.no_grad()
def test_composed_models(seed: int) -> None:
    text = Composer(random.Random(700_000 + seed), streams=True).compose()
    try:
        model = seqblocks.build_text(text, seed=seed, dtype=DTYPES[seed % 2]).eval()
    except SpecError:
        return
    kind = DTYPES[seed % 2]
    x = random_input(copy.deepcopy(model).double(), 2, 4 * model.frame_size, seed)
    context = random_context(copy.deepcopy(model).double(), 2, seed, x.shape[1])
    made = model(to(x, kind), **to(context, kind))
    if isinstance(made, Tensor) and made.dim() == 3 and not model.token_outputs:
        assert_more_exact(model, to(x, kind), to(context, kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 9, 40])
@pytest.mark.parametrize("slow", [False, True])
@torch.no_grad()
def test_products_with_a_matrix_of_16_bits(
    dtype: torch.dtype, tokens: int, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are rounded to the dtype, products are added in float32, and each sum is rounded once.

    The order of the sums is free: their error is below I times that of float32. slow: without instructions for it.
    """
    monkeypatch.setattr("seqblocks.kernels.numerics.SLOW_KINDS", frozenset({dtype} if slow else ()))
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(shape, generator=generator).to(dtype) for shape in ((70, 33), (tokens, 33)))
    bias = torch.randn(70, generator=generator)
    matrix = half.HalfMatrix(weight)
    exact = x.double() @ weight.double().t()
    sums = 33 * 2**-24 * (x.double().abs() @ weight.double().abs().t())
    for found in (matrix.product(x.float(), bias), matrix.prepare(bias)(x.float())):
        assert found.dtype == torch.float32
        bound = sums + torch.finfo(dtype).eps / 2 * (exact.abs() + sums) + 2**-23 * (exact.abs() + bias.abs())
        assert ((found - exact - bias).abs() <= bound).all()
    assert torch.equal(matrix.rows(torch.tensor([[3, 1]])), weight[[3, 1]].float().unsqueeze(0))


@torch.no_grad()
def test_a_new_stream_uses_new_parameters() -> None:
    """Also those that were converted, written through `.data`, which leaves no trace."""
    model = seqblocks.build("mamba_small", seed=0, dtype=torch.bfloat16).eval()
    x = torch.arange(6).expand(2, -1)
    in_steps(model, x, {})
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    found, _ = in_steps(model, x, {})
    other = copy.deepcopy(model)
    assert torch.equal(found, in_steps(other, x, {})[0])


@pytest.mark.parametrize("name", ["embed.weight", "unembed.weight", "layer_norm.weight", "attention_layer"])
@torch.no_grad()
def test_a_stream_goes_on_with_changed_parameters(name: str) -> None:
    model = seqblocks.build_text(CACHE, seed=0, dtype=torch.bfloat16).eval()
    x = torch.randint(0, 11, (3, 2), generator=torch.Generator().manual_seed(1))
    _, state = in_steps(model, x[:, :1], {})
    for own, parameter in model.named_parameters():
        if own.startswith(name):
            parameter.mul_(-2)
    y, _ = model.step(x[:, 1], state)
    other = copy.deepcopy(model)
    assert torch.equal(y, other.step(x[:, 1], state)[0])


@torch.no_grad()
def test_token_ids_as_an_output() -> None:
    """16 bits cannot hold them."""
    text = """
    seqblocks: 1
    model:
      input: {tokens: 1000}
      steps: [{identity: {as: ids}}, {embed: {features: 16}}, {unembed: {as: logits}}]
      outputs: [ids, logits]
    """
    model = seqblocks.build_text(textwrap.dedent(text), seed=0, dtype=torch.bfloat16).eval()
    x = torch.tensor([257, 999])
    y, _ = model.step(x, model.init_state(2))
    assert y["ids"].tolist() == [257, 999]
    assert y["ids"].dtype == torch.int64
    assert y["logits"].dtype == torch.bfloat16
    assert model.token_plan is not None


@torch.no_grad()
def test_a_quantized_model_whose_other_parameters_are_float32() -> None:
    text = """
    seqblocks: 1
    model:
      input: {tokens: 50}
      steps:
        - embed: 16
        - linear: {features: 16, bias: false, as: q}
        - attention: {q: q, k: q, v: q, heads: 2, window: 4, bias: learned_alibi}
        - unembed: {bias: false}
    """
    model = seqblocks.build_text(textwrap.dedent(text), seed=0, dtype=torch.bfloat16)
    model = seqblocks.quantize(model, smallest=1)
    assert {x.dtype for x in model.parameters()} == {torch.float32}
    found, _ = in_steps(model, torch.arange(6).expand(2, -1), {})
    assert found.dtype == model(torch.arange(6).expand(2, -1)).dtype == torch.bfloat16


@torch.no_grad()
def test_hooked_and_replaced_steps_run_in_16_bits() -> None:
    model = seqblocks.build_text(CACHE, seed=0, dtype=torch.bfloat16).eval()
    seen = []
    model.layer_norm.register_forward_hook(lambda _module, given, y: seen.append((given[0].dtype, y.dtype)))
    in_steps(model, torch.zeros(1, 2, dtype=torch.long), {})
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 2
    assert model.token_plan is None
