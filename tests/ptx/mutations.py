"""Plant faults in copies of the kernels. Which does the interpreter of PTX find, and which does Triton's own?

    python -m tests.ptx.mutations [NAME ...]        all faults, or these; takes about ten minutes on a free core

Prints a row for each, as in the table of docs/kernels/compiled_code.md, with the first thing that is reported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("kernels", "seqblocks", "cli", "specs", "tests")
BARRIER = "tl.debug_barrier()"
SECONDS = 900


@dataclass(frozen=True)
class Planted:
    """edits: (old, new) in `file`, where each old text occurs once. barrier: which barrier of `file` is removed.

    words: further arguments of `python -m tests.ptx`.
    """

    what: str
    case: str
    file: str = ""
    edits: tuple[tuple[str, str], ...] = ()
    barrier: int | None = None
    words: tuple[str, ...] = ()


BARRIERS = {  # by file: each barrier in its order, and the case that runs it
    "linear_attention/triton/forward.py": ("GDN f32 32 S=70 reverse", ("between levels of the inverse",)),
    "selective_scan/triton/backward.py": ("scan f32 N=128 constant BC E=9 S=70", (
        "after `_prepare`", "after the states", "after the gradients", "after `_finish`")),
    "slstm/triton/forward.py": ("slstm f32 D=100 tiles S=3", ("by tiles, after a token",)),
    "slstm/triton/backward.py": ("slstm f32 D=100 tiles S=3", (
        "by tiles, before the products", "by tiles, after a token")),
    "slstm/triton/teams.py": ("slstm f32 D=100 team S=3", ("before a release", "after an acquire")),
}
PLANTED = {
    f"barrier {file.partition('/')[0]} {Path(file).stem} {number}": Planted(
        f"barrier removed: {what}", case, file, barrier=number)
    for file, (case, barriers) in BARRIERS.items() for number, what in enumerate(barriers)
}
STORE = "    tl.store(y + to, out.to(y.dtype.element_ty), mask)"


def plant(name: str, what: str, case: str, file: str, *edits: tuple[str, str], words: tuple[str, ...] = ()) -> None:
    PLANTED[name] = Planted(what, case, file, edits, words=words)


plant("release", "a counter raised without release", "slstm f16 D=70 team S=3", "slstm/triton/teams.py",
      ('tl.atomic_add(arrived, 1, sem="release"', 'tl.atomic_add(arrived, 1, sem="relaxed"'))
plant("acquire", "a counter read without acquire", "slstm f16 D=70 team S=3", "slstm/triton/teams.py",
      ('        count = tl.atomic_add(arrived, 0, sem="acquire"',
       '        count = tl.atomic_add(arrived, 0, sem="relaxed"'),
      ('    count = tl.atomic_add(arrived, 0, sem="acquire", scope="gpu")\n    attempts',
       '    count = tl.atomic_add(arrived, 0, sem="relaxed", scope="gpu")\n    attempts'))
plant("mask", "mask of a store dropped", "residual_norm f32 67x20 added", "residual_norm/triton.py",
      (STORE, STORE.replace(", mask)", ")")))
plant("mask-load", "mask dropped of a load whose value is unused", "head_norm f32 67x3x20", "head_norm/triton.py",
      ("out *= load_gain(weight, c, is_d, ONE_PLUS)", "out *= load_gain(weight, c, c >= 0, ONE_PLUS)"))
plant("offset", "offset wrong by one", "causal_conv f32 4 taps S=67 D=17 reverse", "causal_conv/triton.py",
      ("w + d * K + K - 1 - lag", "w + d * K + K - lag"))
plant("last-chunk", "last chunk skipped", "GLA f32 17x20 S=67 reverse HV=2", "linear_attention/triton/forward.py",
      ("    for c in range(chunks):\n        at = wide * chunks + c\n        kept",
       "    for c in range(chunks - 1):\n        at = wide * chunks + c\n        kept"))
plant("kept", "diagonal of the kept inverse not written", "GDN bf16 64 S=140", "linear_attention/triton/forward.py",
      ("        tl.store(to + corner, found.to(inverse.dtype.element_ty))\n", ""))
plant("kept-offset", "block of the kept inverse in the wrong place", "GDN bf16 64 S=140",
      "linear_attention/triton/forward.py",
      ("        tl.store(to + 3 * DOWN + 16, d_b.", "        tl.store(to + 3 * DOWN, d_b."))
plant("accumulate", "sum in float16", "headwise_linear f32 70 5x3x16", "headwise_linear/triton.py",
      ("        total += weight[None, :] * value",
       "        total = (total + weight[None, :] * value).to(tl.float16).to(tl.float32)"))
plant("other", "`other` of a masked load missing", "head_norm f32 67x3x20", "head_norm/triton.py",
      ("    value = tl.load(x + r[:, None] * xs + c[None, :], mask, 0.0).to(tl.float32)\n    out, _",
       "    value = tl.load(x + r[:, None] * xs + c[None, :], mask).to(tl.float32)\n    out, _"))
plant("strides", "strides swapped", "centaurus f32 dws segments S=90", "centaurus/triton/kernels.py",
      ("    u += b * ub + t * us + n % F\n    if resets is not None:\n        resets += b * S + t\n    mask",
       "    u += b * us + t * ub + n % F\n    if resets is not None:\n        resets += b * S + t\n    mask"))
plant("scratch", "scratch read that nothing wrote, where zeros would be right",
      "mlstm f32 many chunks 16 S=100 reverse", "mlstm/triton/forward.py",
      ("operand(state, C.dtype.element_ty, PRECISION), own)",
       "operand(state, C.dtype.element_ty, PRECISION), own & (tile > 0))"))
plant("one-tile", "two programs write one row; in order, the right one last", "residual_norm f32 67x20 added",
      "residual_norm/triton.py",
      (STORE, STORE.replace("mask)", "(r < R)[:, None] & ((d < D)[None, :] | (r < R - 1)[:, None]))")))
plant("int32", "offset in 32 bits, rows 2^26 apart", "head_norm bf16 far rows", "head_norm/triton.py",
      ("    r = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)\n    d = tl.arange(0, BD)\n    mask",
       "    r = tl.program_id(0) * BT + tl.arange(0, BT)\n    d = tl.arange(0, BD)\n    mask"))
plant("reset", "reset at the first token of a chunk ignored", "mlstm f32 17x20 S=67 resets", "mlstm/triton/gates.py",
      ("        segment = tl.cumsum(marks, 0)", "        segment = tl.cumsum(tl.where(j == 0, 0, marks), 0)"))
plant("shared-tile", "a tile that feeds an asynchronous product and a sum; sm_90, early copies", "mlstm bf16 128 S=150",
      "mlstm/triton/forward.py",
      ("            parts += a * tl.load(norm", "            parts += 0.0 * a * tl.load(norm"),
      ("        num += tl.dot(a, state.to(DOT), input_precision=PRECISION)\n    num *= u[:, None]",
       ("        num += tl.dot(a, state.to(DOT), input_precision=PRECISION)\n        if norm is not None:\n"
        "            parts += a.to(tl.float32) * tl.load(norm + at * DK + dk, is_k, 0.0)[None, :]\n"
        "    den = tl.sum(parts, 1) * u\n    num *= u[:, None]")),
      words=("--arch", "sm_90", "--copies", "early"))
plant("waits", "no wait for asynchronous copies, in the PTX", "GDN f32 32 S=70 reverse", "", words=("--omit", "waits"))
plant("barriers", "no barriers of the compiler, in the PTX", "GDN f32 32 S=70 reverse", "",
      words=("--omit", "barriers"))


def changed(planted: Planted, text: str) -> str:
    """Return the text of a file with the fault."""
    for old, new in planted.edits:
        assert text.count(old) == 1, f"{planted.what}: the text to replace occurs {text.count(old)} times"
        text = text.replace(old, new)
    if planted.barrier is not None:
        lines = text.splitlines(keepends=True)
        del lines[[at for at, line in enumerate(lines) if line.strip().startswith(BARRIER)][planted.barrier]]
        text = "".join(lines)
    return text


def found(planted: Planted, tree: Path, interpreter: str) -> str:
    """Return the first thing that is reported for the case of a fault, or ""."""
    command = [sys.executable, "-m", "tests.ptx", planted.case, *planted.words]
    env = {**os.environ, "PYTHONPATH": str(tree), "TRITON_INTERPRET": interpreter, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} s"
    lines = done.stdout.splitlines()
    if not any(line.startswith(planted.case) for line in lines):
        return f"ended with {done.returncode}: {(done.stderr.splitlines() or [''])[-1][:120]}"
    return "" if done.returncode == 0 else next((line.strip() for line in lines if line.startswith("      ")), "?")


def main(names: list[str]) -> int:
    print("| name | fault | found here | found by Triton's interpreter |\n|---|---|---|---|")
    for name in names or PLANTED:
        planted = PLANTED[name]
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder)
            for part in COPIED:
                ignored = shutil.ignore_patterns("__pycache__", "golden")
                shutil.copytree(ROOT / part, tree / part, symlinks=True, ignore=ignored)
            if planted.file:
                path = tree / "kernels" / planted.file
                path.write_text(changed(planted, path.read_text("utf-8")), "utf-8")
            here = found(planted, tree, "0") or "no"
            triton = (found(planted, tree, "1") or "no") if planted.file else "(in the PTX)"
        print(f"| {name} | {planted.what} | {here[:150]} | {triton[:80]} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
