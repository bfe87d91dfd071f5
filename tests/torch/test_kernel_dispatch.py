"""Which form runs: the order of requests, what `auto` takes, what asking by name for the impossible says."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from seqblocks.errors import BackendError
from seqblocks.kernels import BACKENDS, dispatch, mlstm, use_backend, why
from seqblocks.kernels.dispatch.compiled import constant

OPS = ("causal_conv", "head_norm", "headwise_linear", "mlstm")


@pytest.fixture
def registry(monkeypatch):
    """A registry of one's own, with an op that answers with the name of its form."""
    monkeypatch.setattr(dispatch, "_ops", {})
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)

    def needs_even(**facts):
        return facts["n"] % 2 == 0, f"n = {facts['n']}; even numbers only"

    dispatch.register("op", "triton", lambda: "triton", needs_even)
    dispatch.register("op", "torch", lambda: "torch", dispatch.always("anywhere"))
    dispatch.register("op", "reference", lambda: "reference", dispatch.always("anywhere"))
    return dispatch


def ran(backend=None, n=0):
    return dispatch.choose("op", backend, n=n)()


def test_auto_takes_the_first_that_can(registry):
    assert ran(n=2) == "triton"
    assert ran(n=3) == "torch"
    assert ran("auto", n=3) == "torch"


def test_argument_beats_context_beats_environment(registry, monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    assert ran() == "reference"
    with use_backend("torch"):
        assert ran() == "torch"
        assert ran("triton") == "triton"
        with use_backend("auto"):
            assert ran() == "triton"
        assert ran() == "torch"
    assert ran() == "reference"


def test_context_ends_with_an_exception(registry):
    with pytest.raises(KeyError), use_backend("reference"):
        raise KeyError
    assert ran() == "triton"


def test_contexts_of_threads_may_overlap():
    """Whichever ends first, the other's holds, and nothing is left behind."""
    one, other = use_backend("reference"), use_backend("torch")
    with ThreadPoolExecutor(1) as pool:
        one.__enter__()
        pool.submit(other.__enter__).result()
        one.__exit__(None, None, None)
        assert dispatch._last_asked == "torch"
        pool.submit(other.__exit__, None, None, None).result()
    assert dispatch._last_asked is None


def test_a_device_is_told_as_its_kind_and_its_index(registry):
    told = []
    dispatch.register("other", "torch", lambda: None, lambda **facts: (told.append(facts) or True, ""))
    dispatch.choose("other", "torch", device=torch.device("cuda:1"), n=1)
    assert told == [{"device": "cuda", "index": 1, "n": 1, "asked": "torch"}]


def test_by_name_what_cannot_run_is_an_error_with_the_reason(registry):
    with pytest.raises(BackendError, match=r"'triton' cannot run op: n = 3; even numbers only"):
        ran("triton", n=3)


def test_why_says_it_of_every_form(registry):
    assert why("op", n=3) == [
        ("triton", False, "n = 3; even numbers only"),
        ("torch", True, "anywhere"),
        ("reference", True, "anywhere"),
    ]


def test_auto_with_nothing_left_names_every_reason(registry, monkeypatch):
    monkeypatch.setattr(dispatch, "_ops", {"op": {}})
    with pytest.raises(BackendError, match=r"triton: op has no triton form yet; torch: .*; reference: "):
        ran()


@pytest.mark.parametrize("name", ["cuda", ""])
def test_unknown_names(registry, monkeypatch, name):
    with pytest.raises(BackendError, match="unknown backend"), use_backend(name):
        pass
    with pytest.raises(BackendError, match="unknown backend"):
        ran(name)


def test_unknown_name_in_the_environment(registry, monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "cuda")
    with pytest.raises(BackendError, match=r"SEQBLOCKS_BACKEND.*'cuda'.*auto, triton, torch, reference"):
        ran()
    monkeypatch.setenv(dispatch.VARIABLE, "")  # set but empty: as good as unset
    assert ran() == "triton"


def test_a_form_has_one_of_the_known_names(registry):
    with pytest.raises(ValueError, match="unknown form"):
        dispatch.register("op", "cuda", lambda: None, dispatch.always("no"))


def test_every_op_has_both_forms_that_run_anywhere():
    assert set(OPS) <= set(dispatch.ops())
    for op in OPS:
        assert {"torch", "reference"} <= set(dispatch._ops[op])


def test_a_form_that_is_not_there_yet(monkeypatch):
    monkeypatch.setitem(dispatch._ops, "mlstm", {k: v for k, v in dispatch._ops["mlstm"].items() if k != "triton"})
    forms = {v.form: v for v in why("mlstm", device="cpu", dtype=torch.float32)}
    assert list(forms) == list(BACKENDS[1:])
    assert not forms["triton"].can
    x, gate = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1)
    with pytest.raises(BackendError, match="mlstm has no triton form"):
        mlstm(x, x, x, gate, gate, backend="triton")


def test_compiled_code_sees_the_context(monkeypatch):
    monkeypatch.setattr(dispatch, "_ops", dict(dispatch._ops))
    dispatch.register("op", "torch", lambda x: x + 1, dispatch.always("anywhere"))
    dispatch.register("op", "reference", lambda x: x + 2, dispatch.always("anywhere"))
    compiled = torch.compile(lambda x: dispatch.choose("op")(x), fullgraph=True, backend="eager")
    zero = torch.zeros(())
    assert compiled(zero) == 1
    with use_backend("reference"):
        assert compiled(zero) == 2
    assert compiled(zero) == 1


def test_a_constant_is_what_torch_calls_one() -> None:
    def ours() -> None: ...
    def theirs() -> None: ...

    torch.compiler.assume_constant_result(theirs)
    assert vars(constant(ours)) == vars(theirs) != {}


def test_building_does_not_wait_for_the_compiler(root) -> None:
    """It takes longer to import than torch itself."""
    code = "import sys, torch; before = 'torch._dynamo' in sys.modules; import seqblocks; seqblocks.build('vil_digits')"
    code += "; print(before, 'torch._dynamo' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root).stdout
    before, after = told.split()
    assert after == before
