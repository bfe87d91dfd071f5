"""CPU time that an answer may take, on a processor of any speed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 10.0  # twice the documented 5 s, since a neighbour on the same core may halve the speed
LOOP_SECONDS = 0.15  # of `_loop` on a Zen 4, where the slowest answer takes 3 s


@contextmanager
def in_time(what: str) -> Iterator[None]:
    """Fail if the body takes longer than the documented time on a processor as fast as a Zen 4."""
    start = time.process_time()
    yield
    spent = time.process_time() - start
    if spent > SECONDS:
        slowness = max(1.0, min(_loop() for _ in range(3)) / LOOP_SECONDS)
        assert spent < SECONDS * slowness, f"{spent:.1f} s for {what} on a processor {slowness:.1f} times as slow"


def _loop() -> float:
    """Return the CPU time of a fixed amount of Python: small objects, dictionaries and calls, as in an analysis."""
    start = time.process_time()
    made = [{"name": f"n{i}", "span": (i, i + 1)} for i in range(100_000)]
    names = {each["name"]: each for each in made}
    assert sum(len(str(names[f"n{i}"]["name"])) for i in range(100_000)) == 588_890
    return time.process_time() - start
