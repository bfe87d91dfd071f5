"""The choice of implementations: precedence of requests, threads, `auto`, errors for impossible requests."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from seqblocks import kernels
from seqblocks.errors import BackendError, RunError
from seqblocks.kernels import BACKENDS, dispatch, mlstm, same_backend, use_backend, why
from seqblocks.kernels.dispatch import registry
from seqblocks.kernels.dispatch.compiled import constant

OPS = ("causal_conv", "head_norm", "headwise_linear", "mlstm")


@pytest.fixture
def toy(monkeypatch):
    """Return a registry with one op, whose implementations return their names."""
    monkeypatch.setattr(registry, "OPS", {})
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)

    def needs_even(**facts):
        return facts["n"] % 2 == 0, f"n = {facts['n']}; even numbers only"

    dispatch.register("op", "triton", lambda: "triton", needs_even)
    dispatch.register("op", "torch", lambda: "torch", dispatch.always("anywhere"))
    dispatch.register("op", "reference", lambda: "reference", dispatch.always("anywhere"))
    return dispatch


def ran(backend=None, n=0):
    return dispatch.choose("op", backend, n=n)()


def test_auto_takes_the_first_that_can(toy):
    assert ran(n=2) == "triton"
    assert ran(n=3) == "torch"
    assert ran("auto", n=3) == "torch"


def test_argument_beats_context_beats_environment(toy, monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    assert ran() == "reference"
    with use_backend("torch"):
        assert ran() == "torch"
        assert ran("triton") == "triton"
        with use_backend("auto"):
            assert ran() == "triton"
        assert ran() == "torch"
    assert ran() == "reference"


def test_context_ends_with_an_exception(toy):
    with pytest.raises(KeyError), use_backend("reference"):
        raise KeyError
    assert ran() == "triton"


def test_a_context_holds_for_its_thread_alone(toy):
    """Threads do not affect each other whichever ends first, and no setting remains."""
    one, other = use_backend("reference"), use_backend("torch")
    with ThreadPoolExecutor(1) as pool:
        one.__enter__()
        assert pool.submit(ran).result() == "triton"
        pool.submit(other.__enter__).result()
        assert (ran(), pool.submit(ran).result()) == ("reference", "torch")
        one.__exit__(None, None, None)
        assert (ran(), pool.submit(ran).result()) == ("triton", "torch")
        pool.submit(other.__exit__, None, None, None).result()
        assert pool.submit(ran).result() == "triton"


def test_compiled_code_follows_the_context_of_its_thread(monkeypatch):
    """The context of the current thread counts, even if another thread compiled the code in its own context."""
    monkeypatch.setattr(registry, "OPS", dict(registry.OPS))
    dispatch.register("op", "torch", lambda x: x + 1, dispatch.always("anywhere"))
    dispatch.register("op", "reference", lambda x: x + 2, dispatch.always("anywhere"))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: dispatch.choose("op")(x), fullgraph=True, backend="eager")
    zero = torch.zeros(())
    with ThreadPoolExecutor(1) as pool, use_backend("reference"):
        assert pool.submit(compiled, zero).result() == 1
        assert compiled(zero) == 2
        assert pool.submit(compiled, zero).result() == 1
    assert compiled(zero) == 1


@pytest.mark.parametrize("elsewhere", [False, True])
def test_recomputation_in_a_checkpoint_uses_the_same_backend(toy, elsewhere):
    """The backward pass of a GPU runs in a thread of its own, outside the context."""
    requested = []

    def f(x):
        requested.append(ran())
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    with use_backend("reference"):
        y = checkpoint(f, x, use_reentrant=False, context_fn=same_backend)
    if elsewhere:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(y.sum().backward).result()
    else:
        y.sum().backward()
    assert requested == ["reference"] * 2


CALLS = {
    "causal_conv": (kernels.causal_conv, [(2, 9, 4), (4, 1, 3)]),
    "headwise_linear": (kernels.headwise_linear, [(3, 8), (4, 2, 2)]),
    "mlstm": (kernels.mlstm, [(1, 5, 2, 4), (1, 5, 2, 4), (1, 5, 2, 3), (1, 5, 2), (1, 5, 2)]),
    "slstm": (kernels.slstm, [*[(1, 5, 6)] * 4, (2, 3, 4, 3), (4, 2, 3)]),
    "selective_scan": (kernels.selective_scan, [(1, 5, 4), (1, 5, 4), (4, 2), (1, 5, 2), (1, 5, 2)]),
    "attention": (kernels.attention, [(1, 5, 2, 4)] * 3),
    "memoroid": (kernels.mlstm_memoroid, [(1, 5, 2, 4), (1, 5, 2, 4), (1, 5, 2, 3), (1, 5, 2), (1, 5, 2)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_backward_pass_uses_the_choice_of_the_forward_pass(name, monkeypatch):
    """It uses the choice of the forward pass, whatever context or thread it runs in."""
    function, shapes = CALLS[name]
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    y = function(*leaves)
    monkeypatch.setattr(dispatch, "choose", None)
    with ThreadPoolExecutor(1) as pool:
        pool.submit((y if isinstance(y, torch.Tensor) else y[0]).sum().backward).result()
    assert all(x.grad is not None for x in leaves)


def test_inputs_on_several_devices_are_an_error(toy):
    inputs = {"x": torch.ones(2), "weight": torch.ones(2, device="meta"), "bias": None, "state": torch.ones(2)}
    message = r"op needs its inputs on one device; got x, state on cpu; weight on meta\. Move them with `\.to"
    with pytest.raises(RunError, match=message):
        dispatch.choose("op", None, inputs, n=2)
    assert dispatch.choose("op", None, {"x": torch.ones(2, device="meta"), "bias": None}, n=2)() == "triton"


def test_complex_inputs_are_an_error_where_their_imaginary_parts_would_be_lost(toy):
    inputs = {"x": torch.ones(2), "weight": torch.ones(2, dtype=torch.complex64), "bias": None}
    with pytest.raises(RunError, match="op computes with real numbers; got complex weight"):
        dispatch.choose("op", None, inputs, n=2)
    assert dispatch.choose("op", None, inputs, may_be_complex=("weight",), n=2)() == "triton"


@pytest.mark.parametrize("name", CALLS)
def test_every_kernel_checks_the_devices_of_all_its_inputs(name):
    """A kernel would otherwise read weights on another GPU as if they were on the GPU of the input."""
    function, shapes = CALLS[name]
    for at in range(len(shapes)):
        inputs = [torch.zeros(shape, device="meta" if other == at else "cpu") for other, shape in enumerate(shapes)]
        with pytest.raises((RunError, RuntimeError), match="device"):
            function(*inputs)


def test_a_device_is_passed_as_its_kind_and_its_index(toy):
    passed = []
    dispatch.register("other", "torch", lambda: None, lambda **facts: (passed.append(facts) or True, ""))
    x = SimpleNamespace(device=torch.device("cuda:1"), dtype=torch.float32)
    dispatch.choose("other", "torch", {"x": x}, n=1)
    assert passed == [{"device": "cuda", "index": 1, "n": 1, "requested_backend": "torch"}]


def test_a_named_backend_that_cannot_run_is_an_error_with_the_reason(toy):
    with pytest.raises(BackendError, match=r"'triton' cannot run op: n = 3; even numbers only"):
        ran("triton", n=3)


def test_why_has_a_verdict_for_each_implementation(toy):
    assert why("op", n=3) == [
        ("triton", False, "n = 3; even numbers only"),
        ("torch", True, "anywhere"),
        ("reference", True, "anywhere"),
    ]


def test_auto_with_nothing_left_names_every_reason(toy, monkeypatch):
    monkeypatch.setattr(registry, "OPS", {"op": {}})
    with pytest.raises(BackendError, match=r"triton: op has no triton implementation; torch: .*; reference: "):
        ran()


@pytest.mark.parametrize("name", ["cuda", ""])
def test_unknown_names(toy, monkeypatch, name):
    with pytest.raises(BackendError, match="unknown backend"), use_backend(name):
        pass
    with pytest.raises(BackendError, match="unknown backend"):
        ran(name)


def test_unknown_name_in_the_environment(toy, monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "cuda")
    with pytest.raises(BackendError, match=r"SEQBLOCKS_BACKEND.*'cuda'.*auto, triton, torch, reference"):
        ran()
    monkeypatch.setenv(dispatch.VARIABLE, "")  # set but empty: equivalent to unset
    assert ran() == "triton"


def test_an_implementation_has_one_of_the_known_names(toy):
    with pytest.raises(ValueError, match="unknown implementation"):
        dispatch.register("op", "cuda", lambda: None, dispatch.always("no"))


def test_every_op_has_both_implementations_that_run_anywhere():
    assert set(OPS) <= set(registry.OPS)
    for op in OPS:
        assert {"torch", "reference"} <= set(registry.OPS[op])


def test_an_implementation_that_is_missing(monkeypatch):
    monkeypatch.setitem(registry.OPS, "mlstm", {k: v for k, v in registry.OPS["mlstm"].items() if k != "triton"})
    found = {v.implementation: v for v in why("mlstm", device="cpu", dtype=torch.float32)}
    assert list(found) == list(BACKENDS[1:])
    assert not found["triton"].can
    x, gate = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1)
    with pytest.raises(BackendError, match="mlstm has no triton implementation"):
        mlstm(x, x, x, gate, gate, backend="triton")


def test_a_constant_is_what_torch_calls_one() -> None:
    def ours() -> None: ...
    def theirs() -> None: ...

    torch.compiler.assume_constant_result(theirs)
    assert vars(constant(ours)) == vars(theirs) != {}


@pytest.mark.slow
def test_building_does_not_wait_for_the_compiler(root) -> None:
    """The compiler takes longer to import than torch itself."""
    code = "import sys, torch; before = 'torch._dynamo' in sys.modules; import seqblocks; seqblocks.build('vil_digits')"
    code += "; print(before, 'torch._dynamo' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root).stdout
    before, after = output.split()
    assert after == before


def test_an_interrupted_entry_leaves_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may arrive right after the backend was set."""

    class Interrupted:
        backend = "auto"

        def __setattr__(self, name: str, value: str) -> None:
            super().__setattr__(name, value)
            if value == "reference":
                raise KeyboardInterrupt

    monkeypatch.setattr(dispatch.choice, "_local", Interrupted())
    with pytest.raises(KeyboardInterrupt), use_backend("reference"):
        pass
    assert dispatch.requested() == "auto"
