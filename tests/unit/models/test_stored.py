"""Stored parameters are compared with the model before it is built; a difference names the file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tackboard.core.errors import CorruptFileError
from tackboard.core.vocabulary import Vocabulary
from tackboard.models.backbone import BackboneConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.stored import check_finite_parameters, check_fit, load_tensors, read_shapes
from tackboard.models.tables import TableConfig

NAMES = Vocabulary(actions=("save",), surfaces=("home",))
CONFIG = PinFMConfig(
    tables=TableConfig(num_hashes=2, num_rows=16, dim=4),
    backbone=BackboneConfig(num_layers=1, num_heads=1),
    width=8,
    max_history=8,
)
STATE = Path("state.json")


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return CONFIG.build(NAMES).state_dict()


def test_shapes_are_read_without_the_numbers(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    stored = tensors | {"whole": torch.arange(6).view(2, 3), "half": torch.ones(3, dtype=torch.float16)}
    save_file(stored, tmp_path / "x.safetensors")
    shapes = read_shapes(tmp_path / "x.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in shapes.items()} == {
        n: (t.shape, t.dtype) for n, t in stored.items()
    }
    assert all(tensor.is_meta for tensor in shapes.values())
    assert all(torch.equal(tensor, stored[name]) for name, tensor in load_tensors(tmp_path / "x.safetensors").items())


def test_a_file_that_is_cut_is_named(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    for read in (read_shapes, load_tensors):
        with pytest.raises(CorruptFileError, match=r"x\.safetensors cannot be read"):
            read(tmp_path / "x.safetensors")


def test_the_parameters_of_the_model_fit_in_any_precision(tensors: dict[str, torch.Tensor]) -> None:
    check_fit(CONFIG, NAMES, tensors, STATE)
    check_fit(CONFIG, NAMES, {name: tensor.half() for name, tensor in tensors.items()}, STATE)


@pytest.mark.parametrize(
    "change",
    [
        {"tables": TableConfig(num_hashes=2, num_rows=1 << 30, dim=4)},
        {"width": 1 << 20},
        {"backbone": BackboneConfig(num_layers=1 << 40, num_heads=1)},
    ],
)
def test_a_larger_model_is_refused_before_it_is_built(
    change: dict[str, object], tensors: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(CorruptFileError, match=r"state\.json"):
        check_fit(dataclasses.replace(CONFIG, **change), NAMES, tensors, STATE)
    CONFIG.build(NAMES)  # Nothing watches the next model.


def test_a_missing_a_further_and_a_whole_number_tensor_are_named(tensors: dict[str, torch.Tensor]) -> None:
    name = "item_tables.weight"
    fewer = {key: tensor for key, tensor in tensors.items() if key != name}
    for stored in (fewer, tensors | {name: tensors[name].long()}, tensors | {name: tensors[name][1:]}):
        with pytest.raises(CorruptFileError, match=rf"does not fit its model: {name}"):
            check_fit(CONFIG, NAMES, stored, STATE)
    with pytest.raises(CorruptFileError, match="does not fit its model: more"):
        check_fit(CONFIG, NAMES, tensors | {"more": torch.zeros(1)}, STATE)


def test_a_number_that_is_not_finite_is_named() -> None:
    model = CONFIG.build(NAMES)
    check_finite_parameters(model, STATE)
    with torch.no_grad():
        model.item_tables.weight[3, 1] = torch.inf
    with pytest.raises(CorruptFileError, match=r"item_tables\.weight holds numbers that are not finite"):
        check_finite_parameters(model, STATE)
