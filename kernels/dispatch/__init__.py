"""Choose which implementation of a kernel runs (`choice`), check kernels before use, report why."""

from seqblocks.kernels.dispatch.choice import (
    BACKENDS,
    VARIABLE,
    Verdict,
    check_real,
    choose,
    fallbacks,
    requested,
    same_backend,
    saves_launches,
    use_backend,
    why,
)
from seqblocks.kernels.dispatch.compiled import transformed
from seqblocks.kernels.dispatch.registry import IMPLEMENTATIONS, always, implementation, load_implementations, register

__all__ = [
    "BACKENDS", "IMPLEMENTATIONS", "VARIABLE", "Verdict", "always", "check_real", "choose", "fallbacks",
    "implementation", "load_implementations", "register", "requested", "same_backend", "saves_launches", "transformed",
    "use_backend", "why",
]  # fmt: skip
