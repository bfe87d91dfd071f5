"""Cases of a quick run and of CI: some of many that take the same way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def sampled(cases: Iterable[Any], every: int = 8, ci: int = 2, first: int = 0) -> list[Any]:
    """Return all cases of a `parametrize`. A quick run takes one of `every`, and CI also one of `ci`; others are long.

    ci=1: each case tests something of its own. first: the first case that both take, so that tests of the same cases
    take others.
    """
    return [
        each if at % every == 0 else slow(each) if at % ci == 0 else marked(each, pytest.mark.long)
        for at, each in enumerate(cases, -first)
    ]


def slow(case: Any) -> Any:
    return marked(case, pytest.mark.slow)


def marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    if isinstance(case, ParameterSet):
        return case._replace(marks=(*case.marks, mark))
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
