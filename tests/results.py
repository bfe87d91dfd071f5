"""Write the result of each test to a file as soon as it is known, so that an interrupted run loses nothing.

    python -m pytest --results FILE ...            appends one line of JSON per test that begins, and one when it ends
    python tests/results.py FILE                   prints the counts, and the failures with their messages
    python tests/results.py FILE --failed 12       prints the names of the first 12 tests that failed or did not end
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

FAILED, UNFINISHED = "failed", "did not end"


class Results:
    """A plugin of pytest. Under xdist it belongs in the main process, which gets the reports of all others."""

    def __init__(self, path: Path, config: pytest.Config) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", encoding="utf-8")
        self.config = config

    def add(self, **record: Any) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def pytest_unconfigure(self) -> None:
        self.file.close()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # the main process of xdist collects nothing
            self.add(collected=len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.add(collected=len(ids))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.finished(report.nodeid, FAILED, 0.0, report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.add(test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.finished(report.nodeid, FAILED, report.duration, report.longreprtext)
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.finished(report.nodeid, report.outcome, report.duration, reason)
        elif report.when == "call":
            self.finished(report.nodeid, report.outcome, report.duration, "")

    def finished(self, test: str, outcome: str, seconds: float, message: str) -> None:
        self.add(test=test, outcome=outcome, seconds=round(seconds, 2), message=message)
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if outcome == FAILED and terminal is not None:
            terminal.write_line(f"\n{test} failed:\n{message}")


def read(lines: Iterable[str]) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return how many tests were collected, and the last record of each test. A line that is cut off is ignored."""
    collected, tests = 0, {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        collected = max(collected, record.get("collected", 0))
        if "test" not in record:
            continue
        before = tests.get(record["test"], {})
        if before.get("outcome") != FAILED:  # a test may fail and then pass in its teardown
            tests[record["test"]] = {"outcome": UNFINISHED, **before, **record}
    return collected, tests


def bad(tests: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: test for name, test in tests.items() if test["outcome"] in (FAILED, UNFINISHED)}


def summary(collected: int, tests: dict[str, dict[str, Any]]) -> str:
    counts = Counter(test["outcome"] for test in tests.values())
    words = ", ".join(f"{n} {outcome}" for outcome, n in counts.items())
    lines = [f"{words or 'no test began'}; {max(0, collected - len(tests))} of {collected} did not begin"]
    for name, test in bad(tests).items():
        lines += ["", f"{name}: {test['outcome']}", *test.get("message", "").splitlines()]
    reasons = Counter(test["message"] for test in tests.values() if test["outcome"] == "skipped")
    lines += ["", *(f"{n} skipped: {reason}" for reason, n in reasons.items())] if reasons else []
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the results of tests.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--failed", type=int, help="only the names of so many tests that failed or did not end")
    options = parser.parse_args()
    collected, tests = read(options.file.read_text(encoding="utf-8").splitlines() if options.file.exists() else [])
    if options.failed is None:
        print(summary(collected, tests))
    else:
        for name in [name for name in bad(tests) if "::" in name][: options.failed]:
            print(name)


if __name__ == "__main__":
    main()
