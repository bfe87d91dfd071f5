"""Every kernel compiles for GPUs that are not present, fits into shared memory, keeps its values in registers, and has
none of the compilers' faults that are known.

`ahead_of_time.py` compiles in a separate process. tests/golden/triton/<op>.txt is its output with the Triton version in
the first line; tests/golden/triton/3.6.0/<op>.txt is that of Triton 3.6, for sm_80 and sm_90. Other versions are
checked against the bounds, and for the same launches.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

GOLDEN = Path("tests", "golden", "triton")
SHARED = {"sm_80": 166_912, "sm_90": 232_448, "gfx942": 65_536}  # bytes available to a program
LOCAL = 16  # bytes: a few values stored outside the loops are acceptable
# The most, by case and kernel, with any version. These use all 255 registers. Launches with twice the warps would have
# room for all values, but take more instructions and barriers. For `pairs` and `key_gradients` an H200 has timed both:
# those that spill are faster, see docs/kernels/linear_attention.md.
SPILLS = {
    ("linear_attention D=128 bf16 delta per head", "state_gradients"): 24,  # Triton 3.6
    ("linear_attention D=128 to 256 bf16 delta per head", "state_gradients"): 32,  # Triton 3.6
    ("linear_attention D=128 bf16 delta per key", "state_gradients"): 32,  # Triton 3.6
    ("linear_attention D=128 bf16 resets delta per key", "state_gradients"): 32,  # Triton 3.6
    ("linear_attention D=128 bf16 delta per key", "pairs"): 64,
    ("linear_attention D=128 bf16 resets delta per key", "pairs"): 72,
    ("linear_attention D=128 bf16 delta per head", "key_gradients"): 56,  # Triton 3.6, sm_80; otherwise 32
    ("linear_attention D=128 to 256 bf16 delta per head", "key_gradients"): 56,  # Triton 3.6, sm_80; otherwise 32
    ("linear_attention D=64 bf16 per key bonus resets", "key_gradients_per_key"): 64,
    ("linear_attention D=256 to 512 bf16 delta per head reverse resets", "state_gradients"): 24,  # sm_90
    ("linear_attention D=256 bf16 delta per key", "state_gradients"): 256,  # Triton 3.9; with 3.6 120
}
REGISTERS = {"sm_80": 255, "sm_90": 255, "gfx942": 256}  # gfx942: above this, the second half of the registers
# Launches that an H200 was fastest with. On gfx942 they use a part of the second half; no such device has timed them.
SECOND_HALF = {("key_gradients", "gfx942"): 264, ("key_gradients_per_key", "gfx942"): 304}


def table(words: list[str], root: Path, cache: Path) -> list[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(root), "TRITON_CACHE_DIR": str(cache)}
    env["TRITON_DEFAULT_FP_FUSION"] = "0"  # the default of Triton 3.10: launches ask for fusion themselves
    command = [sys.executable, "-m", "tests.triton.ahead_of_time", *words]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def hold(lines: list[str]) -> None:
    assert len(lines) > 1
    for line in lines[1:]:
        assert not line.startswith("fault: "), line
        name, kernel, arch, _, *numbers = (cell.strip() for cell in line.split("|"))
        registers, local, shared, instructions = map(int, numbers)
        assert instructions > 10, line
        assert local <= SPILLS.get((name, kernel), LOCAL), line
        assert shared <= SHARED[arch], line
        assert registers <= SECOND_HALF.get((kernel, arch), REGISTERS[arch]), line


def test_a_fault_of_the_compiler_fails() -> None:
    row = "mlstm D=16 bf16 | gates | sm_90 | BT=64 num_warps=1 | 64 | 0 | 0 | 539"
    hold(["triton 3.9.0", row])
    with pytest.raises(AssertionError, match="UR42"):
        hold(["triton 3.9.0", row, "fault: mlstm D=16 bf16 | gates | sm_90: UR42 is read"])


def test_every_kernel_is_searched_for_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.triton import ahead_of_time  # it needs Triton

    binary = SimpleNamespace(asm={"ttgir": "tiles", "cubin": b""}, metadata=SimpleNamespace(shared=0))
    for name, value in {
        "cases": lambda: [("case", None)],
        "launches": lambda arch, call: [("kernel", None, (), {})],
        "compiled": lambda *args: binary,
        "overwritten": lambda ttgir: [f"found in {ttgir}"],
        "unwritten": lambda code: [f"found in {code}"],
    }.items():
        monkeypatch.setattr(ahead_of_time, name, value)
    output = SimpleNamespace(stdout="REG:8 STACK:0")
    monkeypatch.setattr(ahead_of_time.subprocess, "run", lambda *args, **options: output)
    row, *faults = ahead_of_time.rows(["case | sm_90"])
    assert row.split("|")[1].strip() == "kernel"
    assert faults == [f"fault: case | kernel | sm_90: found in {x}" for x in ("tiles", "REG:8 STACK:0")]


def golden_file(root: Path, op: str, version: str) -> Path:
    """Return the recorded table of a version, "triton 3.6.0", by default that of the newest."""
    folder = root / GOLDEN / version.removeprefix("triton ")
    return (folder if folder.is_dir() else root / GOLDEN) / f"{op}.txt"


def golden(root: Path, op: str, version: str) -> list[str]:
    return golden_file(root, op, version).read_text(encoding="utf-8").splitlines()


def kernels(lines: list[str]) -> set[str]:
    return {line.split("|")[1].strip() for line in lines[1:]}


def of_arch(line: str) -> str:
    """Return the architecture of a row, "" for the first line."""
    return line.split("|")[2].strip() if "|" in line else ""


def compare(lines: list[str], recorded: list[str]) -> None:
    if lines[0] == recorded[0]:
        assert [line for line in lines if of_arch(line) in {of_arch(x) for x in recorded}] == recorded
    else:  # another compiler has other numbers, for the same launches
        assert [line.split("|")[:4] for line in lines[1:]] == [line.split("|")[:4] for line in recorded[1:]]


OPS = (
    "selective_scan", "causal_conv", "head_norm", "headwise_linear", "mlstm", "slstm", "centaurus", "linear_attention",
    "residual_norm",
)
# The cases of each op compiled without `long`, which include all its kernels, each for one architecture in turn, since
# compiling takes seconds; with `long` all cases run for all architectures. sm_80 is left out: its kernels are compiled
# like those for sm_90.
ARCHS = ("sm_90", "gfx942")
TYPICAL = {
    "selective_scan": ["selective_scan N=16 bf16 segments resets", "selective_scan token N=16 bf16"],
    "causal_conv": ["causal_conv K=4 bf16 silu reverse resets"],
    "head_norm": ["head_norm D=192 bf16 skip gate"],
    "residual_norm": ["residual_norm D=768 bf16 layer one_plus"],
    "headwise_linear": ["headwise_linear O=4 I=4 bf16", "headwise_linear O=4 I=4 fp32"],
    "mlstm": ["mlstm D=128 bf16 many chunks resets", "mlstm step D=128 bf16"],
    # Programs of gfx942 do not wait for one another, so kernels by team are compiled for sm_90 alone.
    "slstm": ["slstm D=64 bf16 reverse resets", "slstm D=256 bf16", "slstm D=256 bf16"],
    "centaurus": ["centaurus M=8 bf16 segments reverse resets"],
    "linear_attention": [
        "linear_attention D=128 bf16 per head", "linear_attention D=64 fp32 delta",
        "linear_attention D=128 bf16 delta per key",
    ],
}


SHARED_KERNELS = {"search", "search_gradients", "copy", "spread", "fill"}  # kernels/resets; in a case of the mLSTM


def compiled_for(op: str) -> list[tuple[str, str]]:
    """Return the cases of an op that run without `long`, with their architectures."""
    return [*zip(TYPICAL[op], itertools.cycle(ARCHS), strict=False)]


TOGETHER = (  # by one process: importing torch and Triton takes as long as compiling some ops
    ("head_norm",),
    ("selective_scan", "causal_conv", "headwise_linear", "residual_norm", "slstm", "centaurus"),
    ("mlstm",), ("linear_attention",),
)  # fmt: skip


@pytest.mark.parametrize("ops", [TOGETHER[0], *(pytest.param(ops, marks=pytest.mark.slow) for ops in TOGETHER[1:])])
def test_typical(ops: tuple[str, ...], root: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if request.config.option.markexpr == "":
        pytest.skip("test_all, which `-m ''` runs too, compiles these kernels")
    pairs = [pair for op in ops for pair in compiled_for(op)]
    lines = table([" | ".join(pair) for pair in pairs], root, tmp_path)
    hold(lines)
    for op in ops:
        compare_typical(op, [line for line in lines if op == line.split(" ", 1)[0] or line == lines[0]], root)


def compare_typical(op: str, lines: list[str], root: Path) -> None:
    pairs = compiled_for(op)
    first, *recorded = golden(root, op, lines[0])
    cells = [(line, [cell.strip() for cell in line.split("|")]) for line in recorded]
    compare(lines, [first, *(line for line, (name, _, arch, *_) in cells if (name, arch) in pairs)])
    of_resets = SHARED_KERNELS if op == "linear_attention" else set()
    assert kernels(lines) == kernels([first, *recorded]) - of_resets


def test_every_op_is_compiled() -> None:
    assert sorted(op for ops in TOGETHER for op in ops) == sorted(OPS)


@pytest.mark.long
@pytest.mark.parametrize("op", OPS)
def test_all(op: str, root: Path, tmp_path: Path, update_golden: bool) -> None:
    lines = table([op], root, tmp_path)
    hold(lines)
    if update_golden:
        file = golden_file(root, op, lines[0])
        kept = lines if file.parent == root / GOLDEN else [line for line in lines if of_arch(line) != "gfx942"]
        file.write_text("\n".join(kept) + "\n", encoding="utf-8")
    compare(lines, golden(root, op, lines[0]))


def triton_files(folder: Path) -> list[Path]:
    """Return `triton.py`, or the files of a folder `triton`, except generated ones."""
    return [*folder.glob("triton.py"), *folder.glob("triton/*.py")]


@pytest.mark.parametrize("op", OPS)
def test_every_launch_has_the_options_that_all_share(op: str, root: Path) -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in triton_files(root / "kernels" / op)]
    decorated = {
        f.name for tree in trees for f in tree.body if isinstance(f, ast.FunctionDef)
        if any(ast.unparse(d).startswith("common.kernel(") for d in f.decorator_list)
    }
    jitted = {
        f.name for tree in trees for f in tree.body if isinstance(f, ast.FunctionDef)
        if any(ast.unparse(d).endswith("jit") for d in f.decorator_list)
    }
    launched = {
        ast.unparse(call.func.value).rpartition(".")[2] for tree in trees for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)
    }
    assert decorated & launched
    assert not jitted & launched


def absent_results(tree: ast.AST) -> set[str]:
    """Return the names of functions whose result may be None."""
    found = set()
    for f in ast.walk(tree):
        if isinstance(f, ast.FunctionDef):
            nothing = {
                target.id for node in ast.walk(f) if isinstance(node, ast.Assign) for target in node.targets
                if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant) and node.value.value is None
            }
            returned = {n.value.id for n in ast.walk(f) if isinstance(n, ast.Return) and isinstance(n.value, ast.Name)}
            found |= {f.name} if nothing & returned else set()
    return found


@pytest.mark.parametrize("op", OPS)
def test_no_tuple_has_a_result_that_may_be_none(op: str, root: Path) -> None:
    """Triton 3.6 and earlier do not compile `a, b = f(x), g(y)` if a device function returns None."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in triton_files(root / "kernels" / op)]
    absent = set().union(*map(absent_results, trees))
    assert op != "selective_scan" or absent
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Tuple):
                called = {ast.unparse(x.func) for x in node.elts if isinstance(x, ast.Call)}
                assert not called & absent, ast.unparse(node)


def test_recorded_spills_are_the_named_ones(root: Path) -> None:
    found: dict[tuple[str, str], int] = {}
    for file in (root / GOLDEN).rglob("*.txt"):
        for line in file.read_text(encoding="utf-8").splitlines()[1:]:
            name, kernel, _, _, _, local, *_ = (cell.strip() for cell in line.split("|"))
            found[name, kernel] = max(int(local), found.get((name, kernel), 0))
    assert {key: most for key, most in found.items() if most > LOCAL} == SPILLS


ALWAYS_THERE = {"q", "k", "v", "dy", "dh"}  # arguments of kernels that are never None


@pytest.mark.parametrize("op", OPS)
def test_absent_arguments_are_not_passed_on(op: str, root: Path) -> None:
    """Triton 3.6 and earlier do not compile `chosen(x, ...)`, which may return x itself, if x is None."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in triton_files(root / "kernels" / op)]
    for f in (f for tree in trees for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)):
        for statement in f.body:
            if not isinstance(statement, ast.If):  # `if x is not None`
                read = [ast.unparse(call.args[0]) for call in ast.walk(statement)
                        if isinstance(call, ast.Call) and ast.unparse(call.func) == "chosen"]
                assert {*read} <= ALWAYS_THERE, f.name


@pytest.mark.slow
def test_there_is_a_test_for_every_case(root: Path, tmp_path: Path) -> None:
    names = table(["--names"], root, tmp_path)
    assert {name.split()[0] for name in names} == set(OPS) == {path.stem for path in (root / GOLDEN).glob("*.txt")}
    assert {name for several in TYPICAL.values() for name in several} <= set(names)
    assert {path.name for path in (root / "kernels").iterdir() if triton_files(path)} == set(OPS)
