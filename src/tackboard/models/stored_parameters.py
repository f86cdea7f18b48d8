"""Loads stored parameters and checks that they fit their model; errors name the file.

A config of a few bytes can ask for a table of any size. So the model is first built without memory, on torch's meta
device, and compared with the stored tensors. The real model is built only if names and shapes agree exactly. The number
of parameters in the first build is limited, because building takes time even without memory.

Decided: the tensors of a file are mapped into memory, not read. The tables of a restored model are the mapped tensors
themselves, in their stored type. So a table takes no memory of its own: its pages are those of the file. They are
loaded when rows are looked up, and processes that map the same file share them. Dense parameters are copied, because
the rounding of a matrix product may depend on the address of its operands.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from tackboard.core.documents import blaming
from tackboard.core.errors import CorruptFileError, DataError
from tackboard.core.vocabulary import Vocabulary
from tackboard.models.changed_rows import Stored, copy_range, whole_tensor
from tackboard.models.interface import build_model
from tackboard.models.table_pieces import tables_in_pieces
from tackboard.models.tables import STORAGES, rows_on, table_parameter_names

SPARE_PARAMETERS = 1000
"""A model may make this many parameters while it is built, in addition to twice the number of stored tensors."""
SCANNED_AT_ONCE = 1 << 22
"""Number of elements of a parameter that are checked at once."""
Tensors = Mapping[str, Stored]


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Maps the named tensors of a safetensors file. Raises CorruptFileError if the file cannot be read.

    The file may later be removed or replaced by another file, but its bytes must not be changed in place.
    """
    with blaming(path):
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping.
        except (SafetensorError, OSError) as error:
            raise CorruptFileError(f"{path} cannot be read: {error}") from None


def check_fit(config: Any, vocabulary: Vocabulary, stored: Tensors, where: Path) -> None:
    """Checks that `stored` are the parameters of the model of `config`, before memory is allocated.

    Raises CorruptFileError if they differ; the error names `where`, the file of the config. Half and full precision of
    a parameter count as equal.
    """
    num_made = 0

    def count(_module: nn.Module, _name: str, _parameter: Any) -> None:
        nonlocal num_made
        num_made += 1
        if num_made > 2 * len(stored) + SPARE_PARAMETERS:
            raise DataError(f"the model has more than the {len(stored)} stored tensors")

    counting = register_module_parameter_registration_hook(count)
    try:
        with blaming(where), torch.device("meta"):
            model = build_model(config, vocabulary)
    finally:
        counting.remove()
    check_tensors(model, stored, where)


def restore_model(
    config: Any, vocabulary: Vocabulary, stored: Tensors, where: Path, device: torch.device | str = "cpu"
) -> nn.Module:
    """Returns the model of `config` on a device, with the parameters `stored`, after `check_fit`.

    On a CPU, tables are mapped, not copied. If only the changed rows of a table are stored, the whole table is made on
    the device.
    """
    check_fit(config, vocabulary, stored, where)
    with rows_on("meta"):
        model = build_model(config, vocabulary)
    tables = table_parameter_names(model)
    for name in tables:
        rows_Rd = whole_tensor(stored[name], where, device)
        rows_Rd = rows_Rd if rows_Rd.dtype in STORAGES.values() else rows_Rd.float()
        # The parameter itself is swapped, because a user's model may hold it under a second name.
        torch.utils.swap_tensors(model.get_parameter(name), nn.Parameter(rows_Rd))
    model.load_state_dict({name: stored[name] for name in stored if name not in tables}, strict=False)
    return model.to(device)


def load_parameters(model: nn.Module, stored: Tensors, where: Path) -> None:
    """Copies the parameters `stored` into a model, after `check_tensors`. Tables are filled in place.

    Of a table in pieces, only the pieces of this process are filled.
    """
    check_tensors(model, stored, where)
    tables = tables_in_pieces(model)
    model.load_state_dict({name: stored[name] for name in stored if name not in tables}, strict=False)
    for name, table in tables.items():
        for piece in table.pieces:
            copy_range(stored[name], piece.rows_Rd, piece.first_row)


def check_tensors(model: nn.Module, stored: Tensors, where: Path) -> None:
    """Raises CorruptFileError with `where` unless `stored` has the names, shapes and kinds of the model's tensors."""
    expected, found = _described(model.state_dict()), _described(stored)
    # The rows of a table that several processes share are not in the state of the module.
    expected |= {(name, (table.num_rows_in_all, table.dim), True) for name, table in tables_in_pieces(model).items()}
    if expected == found:
        return
    name = sorted({name for name, _, _ in expected ^ found})[0]
    sizes = [
        f"{' × '.join(map(str, shape)) or '1'} {'floating' if is_floating else 'whole'} numbers"
        for group in (expected, found)
        for other, shape, is_floating in group
        if other == name
    ]
    raise CorruptFileError(
        f"{where} does not fit its model: {name}",
        allowed=f"in the model and in the file: {' and '.join(sizes)}" if len(sizes) > 1 else "",
        fix="check whether the code of the model has changed",
    )


def find_non_finite(model: nn.Module) -> str | None:
    """Returns the name of the first parameter with a number that is not finite, or None."""
    for name, parameter in model.named_parameters():
        for numbers in parameter.detach().flatten().split(SCANNED_AT_ONCE):
            if not bool(torch.isfinite(numbers).all()):
                return name
    return None


def _described(tensors: Tensors) -> set[tuple[str, tuple[int, ...], bool]]:
    return {(name, tuple(tensor.shape), tensor.is_floating_point()) for name, tensor in tensors.items()}
