"""A plugin of pytest that rehearses the GPU tests on a CPU: one case of each test runs in Triton's interpreter.

    TRITON_INTERPRET=1 python -m pytest -m gpu -p tests.kernels.rehearsal tests/kernels \\
        tests/torch/test_{stream,models_on_device}.py

Tests of models, which need pydantic, run on the CPU too if it is installed. The rehearsal finds what would stop the
tests on a machine that has a GPU but not all packages: test_rehearsal.py runs it in such an environment. It says
nothing about compiled kernels.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from tests.kernels.conformance import IMPLEMENTATIONS, Kernel, Tensors, Variant

# Tests of what only a device has, and tests of many tokens: they are only collected.
ONLY_ON_A_DEVICE = (
    "test_auto_takes_it_and_a_compiler_sees_one_node", "test_in_a_graph", "test_forward_and_backward_in_a_graph",
    "test_teams", "test_a_long_walk_of_teams_is_that_of_pieces", "test_the_same_bits_every_time_of_wide_heads",
    "test_self_check_on_device.py", "test_a_cuda_graph_gives_what_the_step_gives", "test_a_step_in_a_graph",
)
ALL_CASES = ("test_newer_steps_on_a_device",)
QUICK = ("causal_conv", "float32", "-gated delta-")  # of each test, the case with most of these words runs

NARROW = {"D": 16, "E": 16, "K": 16, "V": 16}  # larger widths take minutes
_tensors = Kernel.tensors


def narrow_tensors(kernel: Kernel, variant: Variant, *, state: bool = True, **sizes: int) -> Tensors:
    return _tensors(kernel, variant, state=state, **{name: min(n, NARROW.get(name, n)) for name, n in sizes.items()})


def pytest_configure(config: pytest.Config) -> None:
    """Replace the device, and limit the widths: not at import, since test_rehearsal.py imports this file too."""
    for name in ("gpu", "device"):
        IMPLEMENTATIONS[name] = replace(IMPLEMENTATIONS[name], device="cpu")
    Kernel.tensors = narrow_tensors  # type: ignore[method-assign]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    chosen = [max(cases, key=lambda item: sum(word in item.nodeid for word in QUICK)) for cases in tests.values()]
    chosen += [item for item in items if item.originalname in ALL_CASES and item not in chosen]
    chosen = [item for item in chosen if not any(name in item.nodeid for name in ONLY_ON_A_DEVICE)]
    for item in chosen:
        if hasattr(item.module, "DEVICE"):
            item.module.DEVICE = "cpu"
            item.module.cuda_graph.RECORDERS["cpu"] = lambda function, device: function
        for sizes in getattr(item.module, "DEVICE_SHAPES", {}).values():
            sizes.clear()  # the default sizes of the kernel, which are small
        for node in item.listchain():
            node.own_markers = [mark for mark in node.own_markers if mark.name not in ("skip", "skipif")]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
