"""Invalid arguments to the library: each raises an error of the package with a clear message."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import seqblocks
from seqblocks import checkpoint, kernels, testing
from seqblocks.errors import RunError, UsageError
from seqblocks.op import PRIMITIVES, Op, argument
from seqblocks.state_layout import State

SMALL = "seqblocks: 1\nmodel:\n  input: {features: 4}\n  steps:\n    - linear: {features: 4}\n    - causal_conv: {}\n"
TOKENS = "seqblocks: 1\nmodel:\n  input: {tokens: 7}\n  steps:\n    - embed: {features: 4}\n    - causal_conv: {}\n"

FIRST = torch.tensor([[True, False]])
BOUNDS = torch.tensor([0, 2])


def small(**more: Any) -> seqblocks.SequenceModel:
    return seqblocks.build_text(SMALL, **more)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: small(dtype="int8"), "dtype int8 is not a supported dtype"),
        (lambda: small(dtype=torch.int64), "torch.int64 is not a supported dtype"),
        (lambda: small(set=["dim=32"]), "overrides must be a mapping"),
        (lambda: small(set={3: 4}), "overrides must be a mapping"),
        (lambda: small(seed="a"), "a seed must be an integer or None, not 'a'"),
        (lambda: small(device=None), "a device is a name such as 'cpu' .*, not None"),
        (lambda: small(device=7.5), "a device is a name such as 'cpu' .*, not 7.5"),
        (lambda: small(device="gpu9"), "'gpu9' is not a device"),
        (lambda: seqblocks.build(None), "expected a path or the name of a bundled spec, not NoneType"),
        (lambda: seqblocks.build({"model": {}}), "expected a path or the name of a bundled spec, not dict"),
        (lambda: seqblocks.build(b"x.yaml"), "expected a path or the name of a bundled spec, not bytes"),
        (lambda: seqblocks.build_text({}), "expected the text of a spec as str, not dict"),
        (lambda: seqblocks.build_model(seqblocks.load_spec("vil_tiny")), "build_model takes the result of load_model"),
        (lambda: seqblocks.summarise("mlstm_small"), "summarise takes a model, not str"),
        (lambda: checkpoint.save(torch.nn.Linear(2, 2), "x.pt"), "save needs a model from seqblocks.build, not Linear"),
        (lambda: checkpoint.save(torch.compile(small()), "x"), "save the model in it, model.get_submodule"),
        (lambda: checkpoint.save(small(), "no/such/folder/x.pt"), "a folder is written, but no/such/folder/x.pt"),
        (lambda: checkpoint.save(small(), "."), r"\. is the working directory, which cannot be replaced\. Write"),
        (lambda: testing.check_law(torch.nn.Linear(2, 2)), "check_law needs a model from seqblocks.build, not Linear"),
        (lambda: testing.check_shapes(3), "check_shapes needs a model from seqblocks.build, not int"),
        (lambda: small().init_state("x"), "batch_size must be a number of sequences, not 'x'"),
        (lambda: small().stream(torch.ones(2, 3)), "batch_size must be a number of sequences, not Tensor$"),
        (lambda: small().init_state(2.0), "not 2.0"),
        (lambda: small().init_state(True), "not True"),
        (lambda: small().init_state(None), "not None"),
        (lambda: small().init_state(-1), "not -1"),
        (lambda: small().init_state(1, device="xyz"), "'xyz' is not a device"),
        (lambda: small().init_state(1, dtype="x"), "dtype x is not a supported dtype"),
        (lambda: small().parameter_groups("x"), "weight_decay must be a number, at least 0, not 'x'"),
        (lambda: small().parameter_groups(-1), "not -1"),
        (lambda: small(dim=64), r'build_text has no argument .dim.: to change a value .* pass set={"dim": 64}$'),
        (lambda: seqblocks.build("mamba_small", dim=64), r'^build has no argument .dim.: .* pass set={"dim": 64}$'),
        (lambda: seqblocks.build("mamba_small", sed=1), "build has no argument 'sed': did you mean 'seed'"),
        (lambda: seqblocks.build_model(small().spec, dim=6), r'build_model .* set={"dim": 6} to load_model$'),
        (lambda: seqblocks.build_model(small().spec, set={}), "has no argument 'set': pass it to load_model$"),
        (lambda: seqblocks.build("mamba_small", {"dim": 6}), r"^build takes only spec without a name: .* set=…, dev"),
        (lambda: seqblocks.load(".", dim=64), r'^load has no argument .dim.: to change .* pass set={"dim": 64}$'),
        (lambda: seqblocks.from_pretrained(".", dim=64), r'from_pretrained .* pass set={"dim": 64}$'),
        (lambda: checkpoint.load_official(small(), "x.pt"), "load_official needs an official state dict"),
    ],
)
def test_building(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: small()([[1.0]]), "the model reads a tensor, not list"),
        (lambda: small()(torch.ones(1, 2, 4, dtype=torch.uint8)), "reads floating-point numbers, not torch.uint8"),
        (lambda: small()(torch.ones(1, 2, 4), resets=[[True, False]]), "resets is a tensor, not list"),
        (lambda: small().step(torch.ones(1, 4), resets=torch.ones(1, 1)), r"must be bool of shape \[1\], not torch"),
        (lambda: small().step([1.0]), "a step reads a tensor, not list"),
        (lambda: small().step(torch.ones(1, 4), resets=[True]), "resets is a tensor, not list"),
        (lambda: small().step(torch.ones(1, 4), {}, resets=torch.ones(2).bool()), r"bool of shape \[1\], not .* \[2\]"),
        (lambda: small().step(torch.ones(())), r"a step reads \[batch, 4\], not \[\]"),
        (lambda: small().step(torch.ones(1, 2, 4)), r"a step reads \[batch, 4\], not \[1, 2, 4\]"),
        (lambda: seqblocks.build_text(TOKENS).step(torch.ones(1)), r"a step reads token ids \[batch\], not "),
        (lambda: seqblocks.build("vil_digits").step(torch.ones(1, 1, 8, 8)), "cannot stream: it reads a whole image"),
        (lambda: seqblocks.build_text(TOKENS)(torch.tensor([[7]])), "a token id is outside the vocabulary of 7"),
        (lambda: seqblocks.build("vil_digits")(torch.ones(1, 1, 9, 9)), "do not cover an image of 9 x 9"),
        (lambda: small()(torch.ones(1, 2, 4).to("meta")), "the model is on cpu and the input on meta: move one"),
        (lambda: small().step(torch.ones(1, 4).to("meta")), "the model is on cpu and the input on meta"),
        (lambda: small(device="meta")(torch.ones(1, 2, 4)), "the model is on meta and the input on cpu"),
        (lambda: small()(torch.ones(1, 2, 4), resets=FIRST.to("meta")), "resets is on meta and the input on cpu: m"),
        (lambda: small()(torch.ones(1, 2, 4), cu_seqlens=BOUNDS.to("meta")), "cu_seqlens is on the meta device"),
        (lambda: seqblocks.build("vil_digits")(torch.ones(1, 1, 8, 8), resets=FIRST), "it takes neither resets nor cu"),
        (lambda: seqblocks.build("vil_digits")(torch.ones(1, 1, 8, 8), cu_seqlens=BOUNDS), "neither resets nor cu_seq"),
        (lambda: small()(torch.ones(1, 2, 4).cfloat()), r"not torch.complex64: its parts are torch.view_as_real\(x\)"),
        (lambda: seqblocks.state.detach(None), "a state is a dict of tensors, as returned by a call, not NoneType"),
        (
            lambda: seqblocks.state.index_select(small().init_state(2), [0]),
            r"index must be a tensor \[n\] of integers, not list",
        ),
        (lambda: seqblocks.state.index_select(small().init_state(2), torch.ones(2)), r"not torch.float32 \[2\]"),
        (lambda: seqblocks.state.index_select(small().init_state(2), BOUNDS), r"has no such sequences: \[0, 2\]"),
        (lambda: seqblocks.build("vim_tiny")(torch.ones(1, 3, 112, 112)), "places for 197 tokens of an image"),
    ],
)
def test_running(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        call()


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        ("float32", "float64", "the model is float32 and its input float64: convert it with x.to(torch.float32), or b"),
        ("float64", "float32", "the model is float64 and its input float32: convert it with x.to(torch.float64), or b"),
        ("bfloat16", "float32", "or build the model with dtype='float32'"),
        ("float32", "float16", "or build the model with dtype='float16'"),
    ],
)
def test_an_input_of_another_dtype(model: str, given: str, message: str) -> None:
    text = "seqblocks: 1\nuse: [mamba]\nmodel: {input: {features: 4}, steps: [{mamba_mixer: {dim: 4}}]}"
    made, x = seqblocks.build_text(text, dtype=model), torch.ones(1, 3, 4, dtype=getattr(torch, given))
    for call in (lambda: made(x), lambda: made.step(x[:, 0])):
        with pytest.raises(RunError, match=re.escape(message)) as caught:
            call()
        assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(("own", "head"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_step_of_another_dtype(own: str, head: str) -> None:
    """`ssm` has float32 parameters in a model of 16 bits, which are no fault."""
    text = "seqblocks: 1\nuse: [mamba]\nmodel: {input: {features: 4}, steps: [{mamba_mixer: {dim: 4}}, {linear: 4}]}"
    model = seqblocks.build_text(text, dtype=own)
    model.linear.to(getattr(torch, head))
    message = (
        f"linear.weight is {head} and the model {own}: convert the step with model.get_submodule('linear')"
        f".to(torch.{own}), or its inputs and output in hooks"
    )
    with pytest.raises(RunError, match=re.escape(message)) as caught:
        model(torch.ones(1, 3, 4, dtype=getattr(torch, own)))
    assert isinstance(caught.value.__cause__, RuntimeError)
    other = {"bfloat16": "float32", "float32": "float64"}[own]
    with pytest.raises(RunError, match=f"the model is {own} and its input {other}: convert it"):
        model(torch.ones(1, 3, 4, dtype=getattr(torch, other)))


STEPS = """
seqblocks: 1
model:
  input: {features: 4}
  steps:
    - linear: {features: 4}
    - residual: [causal_conv]
    - repeat: {times: 1, steps: [silu]}
    - parallel: {branches: [a: [silu], b: [silu]], merge: sum}
    - scan: {order: [forward, reverse], merge: sum, steps: [silu]}
    - experts: {count: 2, top: 1, steps: [linear: 4]}
"""
KINDS = ["residual", "repeat", "parallel", "scan", "experts"]  # not `linear`, which is torch's module


@pytest.mark.parametrize("name", [*KINDS, "residual.causal_conv", "repeat.0", "experts.router"])
def test_a_step_called_with_what_it_does_not_read(name: str) -> None:
    module = seqblocks.build_text(STEPS).get_submodule(name)
    x = torch.zeros(1, 3, 4)
    assert module(x).shape[:2] == x.shape[:2]
    for given, message in ((), "nothing"), ((x, x), "Tensor, Tensor"), ((x.tolist(),), "list"):
        with pytest.raises(RunError, match=f"takes 1 tensor, what its step reads, not {message}$"):
            module(*given)
    for named in ({"state": None}, {"x": x}):
        with pytest.raises(RunError, match=r"takes the tensors that its step reads, by position, and no '(state|x)'"):
            module(x, **named)


@pytest.mark.parametrize("name", ["done", "attention_mask", "reset", "sate"])
def test_unknown_arguments_of_streams(name: str) -> None:
    model, x = small().eval(), torch.zeros(1, 4)
    hint = r": (pass resets|call model)"
    for call in (model.step, model.stream(1).step, lambda x, **named: model.stream(1).read(x[None], **named)):
        with pytest.raises(RunError, match=f"the model has no input '{name}'{hint}"):
            call(x, **{name: torch.zeros(1)})


def test_a_step_takes_no_context() -> None:
    text = "{seqblocks: 1, model: {inputs: {q: {features: 4}, m: {features: 4}}, steps: [%s]}}"
    model = seqblocks.build_text(text % "cross_attention: {q: q, k: m, v: m, heads: 2}")
    for name, message in (("m", r"does not take m, .* = model.init_state\(batch, m=…\)$"), ("q", "q by position")):
        with pytest.raises(RunError, match=message):
            model.step(torch.zeros(1, 4), **{name: torch.zeros(1, 2, 4)})


@pytest.mark.parametrize("result", [lambda y: [y], lambda y: (y, {})])
@pytest.mark.parametrize("name", ["linear", "residual", "repeat.0", "scan", "experts.router", "residual.causal_conv"])
def test_a_hook_that_returns_no_tensor(name: str, result: Callable[[Any], Any]) -> None:
    model = seqblocks.build_text(STEPS)
    model.get_submodule(name).register_forward_hook(lambda module, inputs, output: result(output))
    with pytest.raises(RunError, match=rf"^{name.rpartition('.')[2]}: a hook or a wrapper returned (list|tuple), and"):
        model(torch.zeros(1, 3, 4))


@torch.no_grad()
def test_a_hook_that_returns_no_tensor_in_a_stream() -> None:
    model = small().eval()
    model.causal_conv.register_forward_hook(lambda module, inputs, output: [output])
    with pytest.raises(RunError, match=r"^causal_conv: a hook or a wrapper returned list, and a step returns"):
        model.step(torch.zeros(1, 4))


def test_autocast_converts_all_but_float64() -> None:
    model = small()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for given in (torch.float32, torch.bfloat16, torch.float16):
            model(torch.ones(1, 3, 4, dtype=given))
        with pytest.raises(RunError, match=r"its input float64, which torch.autocast does not convert for every step"):
            model(torch.ones(1, 3, 4, dtype=torch.float64))


def test_torchs_other_errors_stay_torchs() -> None:
    model, x = small(), torch.ones(1, 3, 4, dtype=torch.float64)
    model.linear.register_forward_pre_hook(lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        model(x)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([2, 3], r"begins with 2, not 0: .*; these look like lengths, whose bounds are 0, 2, 5"),
        ([0, 9], "ends with 9, not 5, the number of tokens"),
        ([0.0, 2.5, 5.0], r"must be integers of shape \[n \+ 1\], not torch.float32 \[3\]"),
        ([True, False], "not torch.bool"),
        ([[0, 5]], r"not torch.int64 \[1, 2\]"),
        ([0], r"at least two numbers, .*; got 1"),
        ([0, -3, 5], "decreases from 0 to -3"),
        ([0, 4, 2, 5], "decreases from 4 to 2"),
    ],
)
def test_bounds_of_packed_sequences(bounds: Any, message: str) -> None:
    model, x = small(), torch.ones(1, 5, 4)
    with pytest.raises(RunError, match=message):
        model(x, cu_seqlens=torch.tensor(bounds))
    with pytest.raises(RunError, match=message):
        kernels.packed_resets(torch.tensor(bounds), 5)


def test_bounds_need_a_device_only_for_their_values() -> None:
    """Reading values from another device would wait, so only the attributes of such tensors are checked."""
    assert kernels.packed_resets(torch.tensor([0, 9], device="meta"), 5).shape == (1, 5)
    with pytest.raises(RunError, match=r"at least two numbers, .*; got 0"):
        kernels.packed_resets(torch.zeros(0, dtype=torch.long, device="meta"), 5)
    assert kernels.packed_resets(torch.tensor([0, 2, 5]), 5, torch.device("meta")).device.type == "meta"


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"not written by seqblocks\.save: it has no seqblocks\.json"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", torch.bfloat16, "torch.bfloat16"])
def test_a_dtype_has_several_names(dtype: Any) -> None:
    assert next(small(dtype=dtype).parameters()).dtype == torch.bfloat16


def test_seeds() -> None:
    """By default all builds have the same weights. With seed=None only torch's generator determines them."""

    def weight(at: int, seed: int | None) -> torch.Tensor:
        torch.manual_seed(at)
        return small(seed=seed).linear.weight

    assert torch.equal(weight(1, 0), weight(2, 0))
    assert torch.equal(weight(1, None), weight(1, None))
    assert not torch.equal(weight(1, None), weight(2, None))


def test_a_step_may_begin_another_sequence() -> None:
    model, x = small(dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    _, state = model(x, return_state=True)
    fresh = model.step(x[:, 0])[0]
    went_on = model.step(x[:, 0], state)[0]
    mixed = model.step(x[:, 0], state, resets=torch.tensor([True, False]))[0]
    torch.testing.assert_close(mixed, torch.stack([fresh[0], went_on[1]]))


def test_a_summary_of_what_was_built() -> None:
    checked = seqblocks.load_model("mlstm_small")
    built = seqblocks.build_model(checked, device="meta")
    assert seqblocks.summarise(built).params == seqblocks.summarise(checked).params


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cuts": (9,)}, "a sequence of 5 can be split at 1 to 4, not at 9"),
        ({"cuts": (0,)}, "not at 0"),
        ({"resets": ((7, 2),)}, r"\(row, position\) in 2 rows of 5, not \(7, 2\)"),
        ({"resets": ((0, 99),)}, r"not \(0, 99\)"),
        ({"seq": 0}, "a sequence needs at least one token, not 0"),
    ],
)
def test_the_law_is_checked_within_the_sequence(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        testing.check_law(small(), **{"seq": 5, **given})


class Own(Op):
    """An op with a user-defined forward, which returns `given`."""

    given: str = argument("x", "an expression")

    def forward(self, p: Any, call: Any, x: torch.Tensor) -> Any:
        return eval(self.given, {"x": x})


class OwnState(Own):
    """An op with a user-defined forward and a state."""

    def state(self, x: Any) -> dict[str, State]:
        return {"s": State((2,))}


@pytest.mark.parametrize(
    ("verb", "given", "message"),
    [
        ("own", "x", None),
        ("own", "x[:, :3]", r"own: output: \[2, 3, 4\] is not \[2, 23, 4\], as declared"),
        ("own", "x[..., :3]", r"own: output: \[2, 23, 3\] is not \[2, 23, 4\], as declared"),
        ("own", "None", "own: output: NoneType is not a tensor"),
        ("own_state", "(x, {'s': x[:, 0, :2]})", None),
        ("own_state", "(x, {'s': x[:, 0]})", r"own_state: state s: \[2, 4\] is not \[2, 2\], as declared"),
        ("own_state", "(x, {})", r"own_state: state: \[\] is not \['s'\], as declared"),
        ("own_state", "x", r"OwnState.forward must return \(output, state\), as the op declares a state, not Tensor"),
        ("own_state", "None", "not NoneType"),
    ],
)
def test_a_primitive_must_return_the_declared_outputs(
    verb: str, given: str, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRIMITIVES, "own", Own)
    monkeypatch.setitem(PRIMITIVES, "own_state", OwnState)
    model = seqblocks.build_text(
        f'seqblocks: 1\nmodel: {{input: {{features: 4}}, steps: [{{{verb}: {{given: "{given}"}}}}]}}'
    )
    with pytest.raises((AssertionError, UsageError), match=message) if message else contextlib.nullcontext():
        testing.check_shapes(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_tolerance_of_the_law_depends_on_the_dtype(dtype: torch.dtype) -> None:
    testing.check_law(small(dtype=dtype))


@pytest.mark.parametrize(
    ("name", "message"),
    [("vil_digits", r"patch_embed .*cannot stream: it reads a whole image"), ("vim_tiny", "reads a whole image")],
)
def test_a_model_without_steps_has_no_law(name: str, message: str) -> None:
    model = seqblocks.build(name, device="meta")
    with pytest.raises(RunError, match=message):
        testing.check_law(model)
    assert testing.random_input(model, 2, 23).shape == (2, *model.spec.input.axes[1:])


def test_the_law_of_a_model_without_parameters() -> None:
    testing.check_law(seqblocks.build_text("seqblocks: 1\nmodel: {input: {features: 4}, steps: [silu]}"))


@pytest.mark.slow
def test_kernels_need_torch_and_einops_alone(root: Path) -> None:
    """They can be tested and timed on a machine without the other dependencies."""
    program = (
        "import sys\n"
        "for name in ('pydantic', 'yaml', 'rich'): sys.modules[name] = None\n"
        "from seqblocks import kernels\n"
        "assert kernels.fallbacks() == {}\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)


@pytest.mark.parametrize("name", ["mlstm_small", "mamba_small", "vil_digits", "vim_tiny", "hybrid_small"])
def test_a_model_without_storage_runs(name: str) -> None:
    """On the meta device, shapes are computed without values. Tools that count or shard models rely on this."""
    model = seqblocks.build(name, device="meta")
    wire = model.spec.input
    if wire.kind == "image":
        x = torch.zeros(2, wire.features, *(wire.grid or ()), device="meta")
    else:
        x = torch.zeros(2, 8, dtype=torch.long, device="meta")
    y = model(x)
    assert y.device.type == "meta"
    assert y.shape[0] == 2
    assert y.shape[-1] == model.spec.output.features


@pytest.mark.slow
def test_modules_are_there_without_an_import_of_their_own(root: Path) -> None:
    """The README uses `seqblocks.testing.check_law(model)` without importing the submodule."""
    code = (
        "import seqblocks, sys; assert 'torch' not in sys.modules;"
        "seqblocks.testing.check_law, seqblocks.checkpoint.load, seqblocks.state.detach, seqblocks.kernels.mlstm;"
        "assert {'testing', 'checkpoint', 'state', 'kernels', 'build'} <= set(dir(seqblocks))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


LONG, ODD = "x" * 100_000, "a\x1b[31mb\u202e"
ECHOING: dict[str, Callable[[seqblocks.SequenceModel, Any], object]] = {
    "device": lambda model, value: seqblocks.build("mamba_small", device=value),
    "dtype": lambda model, value: seqblocks.build("mamba_small", dtype=value),
    "seed": lambda model, value: seqblocks.build("mamba_small", seed=value),
    "dtype of a summary": lambda model, value: seqblocks.summarise(model, value),
    "batch size": lambda model, value: model.init_state(value),
    "state": lambda model, value: model(torch.zeros(1, 2, dtype=torch.long), state={value: {}}),
    "number of tokens": lambda model, value: seqblocks.generate(model, [1, 2], value),
    "auxiliary loss": lambda model, value: model.auxiliary_losses(value),
    "folder to load": lambda model, value: seqblocks.load(value),
    "pretrained folder": lambda model, value: seqblocks.from_pretrained(value),
}


@pytest.mark.parametrize("what", ECHOING)
def test_an_error_that_echoes_a_value_is_readable(what: str) -> None:
    """It is short, and shows control characters and those that change the direction of text as escapes."""
    model = seqblocks.build("mamba_small", set={"dim": 16, "depth": 1}, device="meta")
    for value in (LONG, ODD):
        with pytest.raises(seqblocks.SeqblocksError) as caught:
            ECHOING[what](model, value)
        text = str(caught.value)
        assert len(text) <= 2000
        assert all(line.isprintable() for line in text.split("\n"))
