"""Stored parameters are compared with the model before it is built; a difference names the file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tackboard.core.errors import CorruptFileError
from tackboard.core.vocabulary import Vocabulary
from tackboard.models.backbone import BackboneConfig
from tackboard.models.interface import ModelConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.stored_parameters import check_fit, find_non_finite, load_tensors, restore_model
from tackboard.models.tables import HashedTables, TableConfig

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


def lies_in(tensor: torch.Tensor, file: Path) -> bool:
    """Whether the tensor's memory is a mapping of the file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.endswith(f" {file}")
    return False


def test_tensors_are_mapped_from_their_file(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    stored = tensors | {"whole": torch.arange(6).view(2, 3), "half": torch.ones(3, dtype=torch.float16)}
    save_file(stored, tmp_path / "x.safetensors")
    loaded = load_tensors(tmp_path / "x.safetensors")
    assert {name: tensor.dtype for name, tensor in loaded.items()} == {n: t.dtype for n, t in stored.items()}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in loaded.items())
    assert all(lies_in(tensor, tmp_path / "x.safetensors") for tensor in loaded.values())
    assert not lies_in(tensors["start"], tmp_path / "x.safetensors")
    with torch.no_grad():
        loaded["start"].zero_()  # The process's own copy of the page.
    assert torch.equal(load_tensors(tmp_path / "x.safetensors")["start"], tensors["start"])


def test_a_file_that_is_cut_is_named(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CorruptFileError, match=r"x\.safetensors cannot be read"):
        load_tensors(tmp_path / "x.safetensors")


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


@pytest.mark.parametrize("table_type", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_restored_model_has_the_tables_as_they_are_stored(
    tensors: dict[str, torch.Tensor], table_type: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "item_tables.weight"
    stored = tensors | {name: tensors[name].to(table_type)}
    widened = CONFIG.build(NAMES)
    widened.load_state_dict(stored)
    drawn: list[int] = []
    fresh = torch.Tensor.normal_
    monkeypatch.setattr(torch.Tensor, "normal_", lambda self, *a, **b: drawn.append(self.numel()) or fresh(self, *a))
    model = restore_model(CONFIG, NAMES, stored, STATE)
    assert tensors[name].numel() not in drawn, "random rows were made first"
    tables, rows = model.item_tables, torch.tensor([[0, 3], [15, 15], [7, 0]])
    assert isinstance(tables, HashedTables)
    is_known = table_type != torch.float64
    assert tables.weight.dtype == (table_type if is_known else torch.float32)
    assert (tables.weight.data_ptr() == stored[name].data_ptr()) == is_known
    assert torch.equal(tables(rows), widened.item_tables(rows)) and tables(rows).dtype == torch.float32
    others = {key: tensor for key, tensor in model.state_dict().items() if key != name}
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in others.items())
    assert all(tensor.data_ptr() != tensors[key].data_ptr() for key, tensor in others.items())
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert tables.first_rows.tolist() == [0, 16]
    CONFIG.build(NAMES).item_tables(rows)  # The next model has rows of its own again.


class Tied(nn.Module):
    """A user's model that reads its table under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = HashedTables(TableConfig(num_hashes=1, num_rows=4, dim=2))
        self.output = nn.Linear(2, 4, bias=False)
        self.output.weight = self.tables.weight

    loss = scores = nn.Module.forward


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiedConfig(ModelConfig):
    def build(self, vocabulary: Vocabulary) -> Tied:
        return Tied()


def test_a_table_with_two_names_stays_one() -> None:
    rows = torch.arange(8.0).view(4, 2)
    model = restore_model(TiedConfig(), NAMES, {"tables.weight": rows, "output.weight": rows.clone()}, STATE)
    assert isinstance(model, Tied) and model.output.weight is model.tables.weight
    assert torch.equal(model.tables.weight, rows)


def test_a_number_that_is_not_finite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tackboard.models.stored_parameters.SCANNED_AT_ONCE", 6)
    model = CONFIG.build(NAMES)
    assert find_non_finite(model) is None
    with torch.no_grad():
        model.item_tables.weight[3, 1] = torch.inf
    assert find_non_finite(model) == "item_tables.weight"
