"""The side file of calibrated outlier columns: how many there are is known only at the end.

Each linear's columns are put into a file of their own in OUT.partial/outliers as soon as the linear
is written, before its unit is recorded; a unit that is done again puts the same bytes there. At the
end they are joined, one tensor in memory at a time.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from safetensors.torch import save

from compress.checkpoint import Checkpoint, ShardWriter, disk, single_file, write_atomic
from compress.checkpoint.shards.header import TensorInfo, read_header
from compress.errors import CheckpointError, OutputError
from compress.formats import FORMATS
from compress.formats.format import OutlierFile
from compress.plan.layers import ModulePlan
from compress.plan.plan import Plan
from compress.quant.tensor import OutlierColumns

WORKING = "outliers"  # in OUT.partial, gone when it is published


def keep(partial: Path, module: ModulePlan, outliers: OutlierColumns, file: OutlierFile) -> int:
    """Put a linear's columns aside, on the disk for certain; returns the bytes they take."""
    folder = partial / WORKING
    if not folder.is_dir():
        with disk.refusing(f"make {folder}"):
            with suppress(FileExistsError):  # another rank was first
                disk.mkdir(folder)
            disk.fsync_path(partial)
    tensors = file.encode(module.linear.tensor, outliers)
    cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    write_atomic(partial / _piece(module), save(cpu))
    return sum(tensor.nbytes for tensor in cpu.values())


def join(plan: Plan, partial: Path) -> None:
    """Write the side file from what was put aside, in the plan's order; may be repeated.

    OutputError when a linear's columns are gone or broken.
    """
    file = FORMATS[plan.format].outliers
    calibrated = [m for m in plan.modules if is_calibrated(m)]
    if file is None or not calibrated:
        return
    pieces = [_open(partial, m, file) for m in calibrated]
    found = [(piece, info) for piece in pieces for info in piece.tensors.values()]
    layout = single_file(file.name, [(info.name, info.dtype, info.shape) for _, info in found])
    folder = partial / file.folder
    if not folder.is_dir():
        with disk.refusing(f"make {folder}"):
            disk.mkdir(folder)
    writer = ShardWriter.create(folder, layout)
    for piece, info in found:
        writer.write(info.name, piece.read(info.name))
    writer.finish()


def is_calibrated(module: ModulePlan) -> bool:
    """Whether calibration finds a linear's outlier columns."""
    inputs = module.scheme.activation
    return inputs is not None and inputs.outliers == "calibrated"


def side_bytes(folder: Path) -> int:
    """Size of the side file of a result in any format, 0 where there is none."""
    files = [folder / fmt.outliers.path for fmt in FORMATS.values() if fmt.outliers is not None]
    return sum(path.stat().st_size for path in files if path.is_file())


def _piece(module: ModulePlan) -> str:
    return f"{WORKING}/{quote(module.linear.name, safe='')}"


def _open(partial: Path, module: ModulePlan, side: OutlierFile) -> Checkpoint:
    """A linear's columns and their weights, as a checkpoint of their own."""
    file = _piece(module)
    try:
        tensors: Mapping[str, TensorInfo] = read_header(partial / file, file)
    except CheckpointError as error:
        raise OutputError(f"{error}; remove {partial} and start again") from error
    wanted = set(side.tensors(module.linear.tensor))
    if tensors.keys() != wanted:
        raise OutputError(
            f"{partial / file} does not hold {' and '.join(sorted(wanted))}; remove {partial} and"
            " start again"
        )
    return Checkpoint(partial, {}, tensors, (file,))
