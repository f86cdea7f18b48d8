"""Stored parameters and the model that they claim to be: files in, tensors out, or an error that names the file.

A config can ask for a table of any size in a few bytes. So the model is first built without memory, on torch's meta
device, and compared with the tensors that are there: only a model that has exactly these is built. The number of
parameters is watched while that goes on, because even a model without memory takes time.

Decided: the tensors of a file are mapped, not read, and a restored model's tables are these very tensors, in the type
that they are stored in. A table takes no memory of the process: its pages belong to the file, come when rows are looked
up, and processes that map the same file share them. Dense parameters are copied: how a product of matrices is rounded
may depend on where they lie.
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
from tackboard.models.interface import build_model
from tackboard.models.tables import STORAGES, table_parameter_names, without_rows

SPARE_PARAMETERS = 1000
"""Parameters that a model may make and drop while it is built, beyond those that it keeps."""
SCANNED_AT_ONCE = 1 << 22
"""Numbers of a parameter that are looked at in one go for one that is not finite."""
Tensors = Mapping[str, torch.Tensor]


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The named tensors of a safetensors file, mapped. A header that does not fit the bytes raises CorruptFileError.

    The file may be removed or replaced by another under its name meanwhile. Its bytes must not be changed in place.
    """
    with blaming(path):
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping.
        except (SafetensorError, OSError) as error:
            raise CorruptFileError(f"{path} cannot be read: {error}") from None


def check_fit(config: Any, vocabulary: Vocabulary, stored: Tensors, where: Path) -> None:
    """Proves that `stored` are the parameters of the model of `config`, before memory for one is asked for.

    A difference raises CorruptFileError naming `where`, the file that holds the config. Half and full precision of one
    parameter are no difference.
    """
    num_made = 0

    def count(_module: nn.Module, _name: str, _parameter: Any) -> None:
        nonlocal num_made
        num_made += 1
        if num_made > 2 * len(stored) + SPARE_PARAMETERS:
            raise DataError(f"the model has more than the {len(stored)} tensors that are stored")

    counting = register_module_parameter_registration_hook(count)
    try:
        with blaming(where), torch.device("meta"):
            model = build_model(config, vocabulary)
    finally:
        counting.remove()
    check_tensors(model, stored, where)


def restore_model(config: Any, vocabulary: Vocabulary, stored: Tensors, where: Path) -> nn.Module:
    """The model of `config` with `stored` as parameters, after `check_fit`: tables as they are, the rest copied."""
    check_fit(config, vocabulary, stored, where)
    with without_rows():
        model = build_model(config, vocabulary)
    tables = table_parameter_names(model)
    for name in tables:
        rows_Rd = stored[name] if stored[name].dtype in STORAGES.values() else stored[name].float()
        # In place of the parameter itself: a user's model may hold it under a second name.
        torch.utils.swap_tensors(model.get_parameter(name), nn.Parameter(rows_Rd))
    model.load_state_dict({name: tensor for name, tensor in stored.items() if name not in tables}, strict=False)
    return model


def check_tensors(model: nn.Module, stored: Tensors, where: Path) -> None:
    """Raises CorruptFileError naming `where` unless `stored` has the names, shapes and kinds of the model's tensors."""
    expected, found = _described(model.state_dict()), _described(stored)
    if expected == found:
        return
    name = sorted({name for name, _, _ in expected ^ found})[0]
    sizes = [" × ".join(map(str, shape)) or "1" for group in (expected, found) for n, shape, _ in group if n == name]
    raise CorruptFileError(
        f"{where} does not fit its model: {name}",
        allowed=f"the model and the stored tensors differ: {' and '.join(sizes)} numbers" if len(sizes) > 1 else "",
        fix="was the model's code changed?",
    )


def check_finite_parameters(model: nn.Module, where: Path) -> None:
    """Raises CorruptFileError naming `where` and the parameter that holds a number which is not finite."""
    if name := find_non_finite(model):
        raise CorruptFileError(f"{where}: {name} holds numbers that are not finite", fix="export it again")


def find_non_finite(model: nn.Module) -> str | None:
    """The name of a parameter that holds a number which is not finite, or None. Reads a part of a table at a time."""
    for name, parameter in model.named_parameters():
        for numbers in parameter.detach().flatten().split(SCANNED_AT_ONCE):
            if not bool(torch.isfinite(numbers).all()):
                return name
    return None


def _described(tensors: Tensors) -> set[tuple[str, tuple[int, ...], bool]]:
    return {(name, tuple(tensor.shape), tensor.is_floating_point()) for name, tensor in tensors.items()}
