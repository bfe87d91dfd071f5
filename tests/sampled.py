"""Cases of a quick run: some of many that take the same way. CI runs all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def sampled(cases: Iterable[Any], every: int = 8) -> list[Any]:
    """Return all cases of a `parametrize`, marked slow where a quick run leaves them out."""
    return [slow(each) if at % every else each for at, each in enumerate(cases)]


def slow(case: Any) -> Any:
    if isinstance(case, ParameterSet):
        return case._replace(marks=(*case.marks, pytest.mark.slow))
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
