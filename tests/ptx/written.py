"""Write small kernels in PTX, for the tests of the interpreter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from tests.ptx.dtypes import LANES, TYPES, Array, size_of
from tests.ptx.execute import Launch, Settings
from tests.ptx.memory import Memory

FILES = {1: "rs", 2: "rs", 4: "r", 8: "rd"}


def listing(body: str, parameters: int, threads: int = LANES) -> str:
    """Return the text of a kernel. The lines of `body` come from source.py:1, source.py:2, …"""
    lines = "\n".join(f"\t.loc\t1 {at} 0\n\t{line}" for at, line in enumerate(body.strip().splitlines(), 1))
    names = ",\n".join(f"\t.param .u64 .ptr .global .align 1 test_param_{at}" for at in range(parameters))
    return (
        f".version 8.7\n.target sm_90a\n.extern .shared .align 16 .b8 global_smem[];\n"
        f".visible .entry test(\n{names}\n)\n.reqntid {threads}\n{{\n\t.reg .pred \t%p<64>;\n\t.reg .b16 \t%rs<64>;\n"
        f"\t.reg .b32 \t%r<512>;\n\t.reg .b64 \t%rd<64>;\n{lines}\n}}\n\t.file\t1 \"folder/source.py\"\n"
    )


def run(
    body: str, *arrays: Array, threads: int = LANES, shared: int = 0, grid: tuple[int, ...] = (1,),
    fresh: tuple[int, ...] = (), settings: Settings | None = None,
) -> Counter[str]:
    """Run a kernel on arrays, its parameters, and return its notes. fresh: arrays that nothing has written."""
    memory = Memory()
    parameters = []
    for at, array in enumerate(arrays):
        data = array.reshape(-1).view(np.uint8)
        unwritten = np.ones(data.size, bool) if at in fresh else None
        parameters.append(memory.add(at, data, f"array {at}", unwritten))
    launch = Launch(listing(body, len(arrays), threads), grid, parameters, memory, shared, settings or Settings())
    launch.run()
    return launch.notes


class Lines:
    """The statements of a kernel in which each lane holds one element of each array."""

    def __init__(self) -> None:
        self.text = ["mov.u32 %r1, %tid.x;"]
        self.arrays: list[Array] = []
        self.registers = 10

    def register(self, dtype: str) -> str:
        self.registers += 1
        return f"%p{self.registers}" if dtype == "pred" else f"%{FILES[size_of(dtype)]}{self.registers}"

    def _address(self, size: int) -> str:
        at = self.registers = self.registers + 1
        self.text.append(f"ld.param.b64 %rd{at}, [test_param_{len(self.arrays) - 1}];")
        self.text.append(f"mad.wide.u32 %rd{at}, %r1, {size}, %rd{at};")
        return f"[ %rd{at} + 0 ]"

    def load(self, dtype: str, values: Any) -> str:
        """Load values [threads], and return their register."""
        self.arrays.append(np.ascontiguousarray(values))
        size, to = size_of(dtype), self.register(dtype)
        held = f"%rs{self.registers}" if dtype == "pred" else to
        self.text.append(f"ld.global.b{8 * size} {held}, {self._address(size)};")
        if dtype == "pred":
            self.text.append(f"setp.ne.b16 {to}, {held}, 0;")
        return to

    def store(self, dtype: str, register: str, threads: int = LANES) -> Array:
        """Store a register. The array is filled by `run`."""
        found = np.zeros(threads, TYPES[dtype])
        self.arrays.append(found)
        size = size_of(dtype)
        if dtype == "pred":
            self.registers += 1
            self.text.append(f"selp.b16 %rs{self.registers}, 1, 0, {register};")
            register = f"%rs{self.registers}"
        self.text.append(f"st.global.b{8 * size} {self._address(size)}, {{ {register} }};")
        return found

    def run(self, **options: Any) -> Counter[str]:
        return run("\n".join([*self.text, "ret;"]), *self.arrays, **options)
