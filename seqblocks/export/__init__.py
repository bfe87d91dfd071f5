"""Exporting a built model: programs of torch.export, ONNX files and AOTInductor packages, with the state of a stream.

None of them needs seqblocks to run; docs/export.md shows each.
"""

from seqblocks.export.contract import GRAPHS, Contract, Part, Port
from seqblocks.export.files import aoti, onnx, pt2
from seqblocks.export.program import Exported, trace

__all__ = ["GRAPHS", "Contract", "Exported", "Part", "Port", "aoti", "onnx", "pt2", "trace"]
