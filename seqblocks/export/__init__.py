"""Export a built model as a torch.export program, an ONNX file or an AOTInductor package, including streaming state.

The exported files run without seqblocks; see docs/export.md.
"""

from seqblocks.export.contract import GRAPHS, Contract, Part, Port
from seqblocks.export.files import aoti, onnx, pt2
from seqblocks.export.program import Exported, trace

__all__ = ["GRAPHS", "Contract", "Exported", "Part", "Port", "aoti", "onnx", "pt2", "trace"]
