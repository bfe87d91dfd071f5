"""Tensors that cannot be weights of a model."""

from __future__ import annotations

import warnings
from typing import Any

import torch


def odd_tensors() -> dict[str, Any]:
    ones = torch.ones(6, 4)
    quantised: Any = torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)
    return {
        "integer": ones.long(), "bool": ones.bool(), "fp8": ones.to(torch.float8_e4m3fn), "complex": ones.cfloat(),
        "uint16": ones.to(torch.uint16), "sparse": ones.to_sparse(), "rows": ones.to_sparse_csr(),
        "quantised": quantised, "meta": ones.to("meta"), "expanded": torch.ones(1).expand(6, 4),
        "transposed": torch.ones(4, 6).T, "list": [1.0], "none": None, "text": "1.0", "mapping": {},
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }  # fmt: skip


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ODD = odd_tensors()
