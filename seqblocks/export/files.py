"""Write exported graphs to files: ONNX, torch.export programs, AOTInductor packages.

A file is written under a temporary name, compared with the model, and then renamed, replacing an earlier one.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqblocks.errors import RunError, UnavailableError, UsageError, unwritable
from seqblocks.export.compare import Run, agree
from seqblocks.export.contract import KEY, Contract
from seqblocks.export.loops import pass_sizes
from seqblocks.export.operators import copy_open_sizes, translations
from seqblocks.export.program import Exported, captured, example, quiet, trace
from seqblocks.model.sequence_model import SequenceModel

EXTRA = "ONNX needs an extra: pip install 'seqblocks[onnx]'"
ENDINGS = (".onnx", ".pt2")  # of the files that may be replaced
MAX_BYTES_IN_FILE = 1 << 30  # weights in an ONNX file (the format's limit is 2 GiB); more go to a separate file


class Written(NamedTuple):
    """The result of an export: the interface, and the largest difference from the model (None if not compared)."""

    contract: Contract
    difference: float | None


def onnx(
    model: SequenceModel, path: str | os.PathLike[str], graph: str = "forward", *,
    batch: int | None = None, length: int | None = None, check: bool | None = None,
) -> Written:
    """Export a graph of a model to ONNX. `graph`, `batch` and `length` as in `trace`.

    The contract is stored in the metadata of the file, as JSON under the key `seqblocks`. Weights above 1 GiB are
    stored in a separate file next to it. check: compare with the model in onnxruntime, by default if it is installed.

    Raises RunError if a step cannot be exported or results differ, UnavailableError if the packages are missing or the
    disk is full, and UsageError for invalid arguments.
    """  # fmt: skip
    target = _target(path)
    _import("onnx", "onnxscript")
    check = _has_onnxruntime() if check is None else check
    if check:
        _import("onnxruntime")
    exported = captured(_on_cpu(model), graph, batch, length)
    if check and "bfloat16" in exported.contract.dtypes:
        raise UsageError("onnxruntime does not support bfloat16 on a CPU: export a float32 model, or pass check=False")
    made = _as_onnx(model, exported)

    def work(file: Path) -> float | None:
        _save_onnx(made, file)
        return agree(model, exported.contract, _in_onnxruntime(file, exported.contract), f"{path}") if check else None

    return Written(exported.contract, _write(target, ".onnx", work))


def pt2(
    model: SequenceModel, path: str | os.PathLike[str], graph: str = "forward", *,
    batch: int | None = None, length: int | None = None, check: bool = True,
) -> Written:
    """Export a graph of a model as a program for `torch.export.load`. Arguments as in `onnx`.

    The contract is stored as the extra file `seqblocks.json`. The path must end in `.pt2`.
    """  # fmt: skip
    target = _target(path, ".pt2")
    exported = trace(model, graph, batch=batch, length=length)

    def work(file: Path) -> float | None:
        with _explained(model, "a program of torch"):
            with _Disk(file) as disk:
                torch.export.save(exported.program, disk, extra_files={f"{KEY}.json": exported.contract.as_json()})
            loaded = torch.export.load(file).module()
        return agree(model, exported.contract, _as_run(model, exported, loaded), f"{path}") if check else None

    return Written(exported.contract, _write(target, ".pt2", work))


def aoti(
    model: SequenceModel, path: str | os.PathLike[str], graph: str = "forward", *,
    batch: int | None = None, length: int | None = None, check: bool = True,
) -> Written:
    """Compile a graph of a model to machine code, as a package that `torch._inductor.aoti_load_package` and C++ load.

    Arguments as in `onnx`. Requires a C++ compiler and takes a minute or more. The contract is stored in the metadata
    of the package. The path must end in `.pt2`.
    """  # fmt: skip
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    target = _target(path, ".pt2")
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")))):
        raise UnavailableError("AOTInductor needs a C++ compiler: install g++ or clang++")
    exported = trace(model, graph, batch=batch, length=length)
    options = {"aot_inductor.metadata": {KEY: exported.contract.as_json()}}

    def work(file: Path) -> float | None:
        with _explained(model, "AOTInductor"):
            pass_sizes(exported.program)
            with _Disk(file) as disk:
                aoti_compile_and_package(exported.program, package_path=disk, inductor_configs=options)
            loaded = aoti_load_package(str(file))
        return agree(model, exported.contract, _as_run(model, exported, loaded), f"{path}") if check else None

    return Written(exported.contract, _write(target, ".pt2", work))


def _as_run(model: SequenceModel, exported: Exported, loaded: Any) -> Run:
    """Return a loaded program as a function over flat lists of tensors."""
    spec = pytree.tree_structure(example(model, exported.contract))

    def run(tensors: list[Tensor]) -> list[Tensor]:
        try:
            with torch.no_grad():
                return pytree.tree_leaves(loaded(*pytree.tree_unflatten(tensors, spec)))
        except Exception as error:  # such as the guard of a size
            raise RunError(f"torch cannot run the exported program: {_first_line(error)}") from error

    return run


# ------------------------------------------------------------------------------------------------ ONNX


def _import(*names: str) -> None:
    for name in names:
        try:
            __import__(name)
        except ModuleNotFoundError:
            raise UnavailableError(f"{name} is missing. {EXTRA}") from None


def _has_onnxruntime() -> bool:
    from importlib.util import find_spec

    return find_spec("onnxruntime") is not None


def _on_cpu(model: SequenceModel) -> SequenceModel:
    devices = {x.device.type for x in model.parameters()} if isinstance(model, SequenceModel) else set()
    if devices - {"cpu", "meta"}:
        raise UsageError(f"the model is on {', '.join(sorted(devices))}: move it with model.cpu()")
    return model


def _as_onnx(model: SequenceModel, exported: Exported) -> Any:
    """Return the onnx_ir model of a program, with the names and the metadata of the contract."""
    import onnx_ir as ir

    contract = exported.contract
    with _explained(model, "ONNX", exported):
        made = torch.onnx.export(
            exported.program, dynamo=True, verbose=False, input_names=contract.input_names,
            output_names=contract.output_names, custom_translation_table=translations(),
        )  # fmt: skip
    assert made is not None
    graph = made.model.graph
    copy_open_sizes(graph)
    returned = [port.shape for port in contract.outputs] + [part.shape for part in contract.state]
    for values, shapes in ((graph.inputs, contract.input_shapes), (graph.outputs, returned)):
        for value, shape in zip(values, shapes, strict=True):
            value.shape = ir.Shape(shape)
    made.model.metadata_props[KEY] = contract.as_json()
    return made.model


def _save_onnx(program: Any, file: Path) -> None:
    import onnx_ir as ir

    size = sum(x.const_value.nbytes for x in program.graph.initializers.values() if x.const_value is not None)
    ir.save(program, file, external_data=_weights_of(file).name if size > MAX_BYTES_IN_FILE else None)


def _in_onnxruntime(file: Path, contract: Contract) -> Run:
    """Return an ONNX file as a function over lists of tensors."""
    onnxruntime: Any = importlib.import_module("onnxruntime")  # it has no annotations
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        message = f"onnxruntime cannot load the exported file: {_first_line(error)}"
        raise RunError(f"{message}. To write the file without running it, use --no-check or check=False") from error

    def run(tensors: list[Tensor]) -> list[Tensor]:
        feeds = {name: x.numpy() for name, x in zip(contract.input_names, tensors, strict=True)}
        used = {port.name for port in session.get_inputs()}
        try:
            found = session.run(contract.output_names, {name: x for name, x in feeds.items() if name in used})
        except Exception as error:
            raise RunError(f"onnxruntime cannot run the exported file: {_first_line(error)}") from error
        return [torch.from_numpy(x) for x in found]

    return run


@contextlib.contextmanager
def _explained(model: SequenceModel, target: str, exported: Exported | None = None) -> Iterator[None]:
    """Convert exceptions of a compiler or converter to RunError, with the step if it is known."""
    try:
        with quiet():
            yield
    except OSError:
        raise
    except Exception as error:
        reason = _reason(error)
        step = exported and _step_of(exported, reason)
        raise RunError(f"{step or model.spec.name} cannot be converted to {target}: {reason}") from error


def _reason(error: BaseException) -> str:
    """Return the first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def _step_of(exported: Exported, reason: str) -> str | None:
    """Return the path of the first step that uses the operator named in a message, or None."""
    names = re.findall(r"op='\w+\.(\w+)'", reason)  # the name of a part, if the operator was decomposed
    for node in exported.program.graph.nodes:
        stack = node.meta.get("nn_module_stack") if names and names[0] in str(node.target) else None
        if stack:
            path = [*stack.values()][-1][0]
            return str(path).removeprefix("model.") or None
    return None


# ------------------------------------------------------------------------------------------------ files


def _target(path: str | os.PathLike[str], ending: str = "") -> Path:
    """Return the file to write, with symbolic links resolved. Raises UsageError if it cannot be written."""
    try:
        target = Path(os.path.realpath(path))
        is_folder, has_parent = target.is_dir(), target.parent.is_dir()
        os.fspath(target).encode()  # torch and onnxruntime read no other names
    except UnicodeEncodeError:
        raise UsageError(f"{path!r} cannot be written: the names of the file and its folders must be UTF-8") from None
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path!r} cannot be written: {error}") from None
    if not os.fspath(path).endswith(ending):
        name = f"{os.fspath(path)}{ending}"
        raise UsageError(f"the file's name must end in {ending}, as torch requires: write {name}")
    if is_folder:
        raise UsageError(f"{path} is a folder, not a file")
    if target.exists() and not (target.is_file() and target.suffix in ENDINGS):
        what = f"{path} exists, and is probably not an exported model: its name does not end in {' or '.join(ENDINGS)}"
        raise UsageError(f"{what}. Write to another file")
    if not has_parent:
        raise UsageError(f"{path} cannot be written: there is no folder {target.parent}")
    return target


class _Disk(io.BufferedWriter):
    """A new file that raises OSError when it is closed, not when it is written: torch would end the process."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write data, and discard it after an error. Returns its number of bytes."""
        try:
            return super().write(data) if self._error is None else len(data)
        except OSError as error:
            self._error = error
            return len(data)

    def close(self) -> None:
        """Close the file. Raises OSError if data was lost."""
        super().close()
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _write(target: Path, ending: str, work: Callable[[Path], float | None]) -> float | None:
    """Call `work` with the path of a new file, then rename the file to the target. Return the result of `work`.

    The file has the mode of the file that it replaces.
    """
    file = target.with_name(f".{_prefix(target)}.{secrets.token_hex(4)}{ending}")
    data, earlier = _weights_of(file), _weights_used(target)
    try:
        found = work(file)
        with open(file, "rb+") as handle:
            os.fsync(handle.fileno())
        _take_mode((file, data), target)
        os.replace(file, target)
    except BaseException as error:
        data.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise unwritable(target, error) from error
        raise
    finally:
        file.unlink(missing_ok=True)
    for other in earlier:
        with contextlib.suppress(OSError):
            other.unlink()
    return found


def _take_mode(files: tuple[Path, ...], target: Path) -> None:
    """Give new files the permissions of the file that they replace, on file systems that have any."""
    with contextlib.suppress(OSError):
        mode = stat.S_IMODE(os.stat(target).st_mode)
        for file in filter(Path.exists, files):
            os.chmod(file, mode)


def _prefix(target: Path) -> str:
    """Return the beginning of the names of temporary and weights files, which must be no longer than 255 bytes."""
    return target.stem.encode()[:200].decode(errors="ignore")


def _weights_of(file: Path) -> Path:
    """Return the weights file of a new ONNX file; it is not renamed, since the ONNX file refers to it by name."""
    return file.with_name(f"{file.stem.removeprefix('.')}.data")


def _weights_used(target: Path) -> set[Path]:
    """Return the weights files of an earlier ONNX file, if they have names that this module creates."""
    named = re.compile(re.escape(_prefix(target)) + r"\.[0-9a-f]{8}\.data")
    candidates = {path.name: path for path in target.parent.glob("*.data") if named.fullmatch(path.name)}
    if not candidates or not target.is_file():
        return set()
    import onnx_ir as ir

    try:
        tensors = [value.const_value for value in ir.load(target).graph.initializers.values()]
    except Exception:  # not an ONNX file
        return set()
    return {candidates[x.location] for x in tensors if isinstance(x, ir.ExternalTensor) and x.location in candidates}
