"""A reduced example of a fault in Triton 3.5 to 3.9 on sm_90, for a report (docs/kernels/compiler_faults.md).

    python tests/triton/shared_tile.py           print the buffers of both tiles; on such a GPU also compare the product

Needs torch and Triton only. The tile `left` feeds an asynchronous product and a sum. It gets 2 buffers, `right` gets 3.
With two copies in flight, iteration i copies the tile of iteration i + 2 into the buffer that its own product, which is
still pending, reads. Expected are 3 buffers, which the kernel has without `terms`.
"""

from __future__ import annotations

import re

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SIZES = {"K": 1024, "M": 64, "N": 128, "BLOCK": 32}
LAUNCH = {"num_warps": 4, "num_stages": 3}


@triton.jit
def kernel(a, b, n, y, z, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    terms = tl.zeros((M, BLOCK), tl.float32)
    product = tl.zeros((M, N), tl.float32)
    for first in range(0, K, BLOCK):
        k = first + tl.arange(0, BLOCK)
        left = tl.load(a + i[:, None] * K + k[None, :])
        right = tl.load(b + k[:, None] * N + j[None, :])
        terms += left.to(tl.float32) * tl.load(n + k)[None, :]
        product += tl.dot(left, right)
    tl.store(y + i[:, None] * N + j[None, :], product)
    tl.store(z + i, tl.sum(terms, 1))


def compiled():
    types = {"a": "*bf16", "b": "*bf16", "n": "*fp32", "y": "*fp32", "z": "*fp32"} | dict.fromkeys(SIZES, "constexpr")
    aligned = {(at,): [["tt.divisibility", 16]] for at in range(5)}
    return triton.compile(ASTSource(kernel, types, SIZES, aligned), target=GPUTarget("cuda", 90, 32), options=LAUNCH)


def main() -> None:
    found = re.findall(r"%(\w+) = ttg\.local_alloc.*memdesc<(\d+)x", compiled().asm["ttgir"])
    print(f"triton {triton.__version__}:", ", ".join(f"{name}: {buffers} buffers" for name, buffers in found))
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        a = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(1024, 128, device="cuda", dtype=torch.bfloat16)
        n, y, z = torch.randn(1024, device="cuda"), torch.empty(64, 128, device="cuda"), torch.empty(64, device="cuda")
        kernel[(1,)](a, b, n, y, z, **SIZES, **LAUNCH)
        print("product off by", (y - a.float() @ b.float()).abs().max().item())


if __name__ == "__main__":
    main()
