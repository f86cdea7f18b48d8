"""Hashed tables: concatenation of one row per sub-table, a gradient of the looked-up rows only, storage in halves."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tackboard.core.errors import ConfigError
from tackboard.models.tables import (
    STORAGES,
    HashedTables,
    TableConfig,
    halved,
    rows_on,
    table_modules,
    table_parameter_names,
)
from tackboard.ops.fresh_rows import ELEMENTS_AT_ONCE

HALVES = ("fp16", "bf16")


def test_a_vector_is_one_row_of_each_sub_table() -> None:
    tables = HashedTables(TableConfig(num_hashes=2, num_rows=5, dim=3))
    with torch.no_grad():
        tables.weight.copy_(torch.arange(30.0).view(10, 3))
    assert tables.width == 6
    # Row 4 of the first sub-table is row 4 of the weight; row 1 of the second is row 5 + 1.
    assert tables(torch.tensor([[4, 1], [0, 0]])).tolist() == [[12, 13, 14, 18, 19, 20], [0, 1, 2, 15, 16, 17]]


@pytest.mark.parametrize("storage", STORAGES)
def test_the_gradient_waits_with_the_table_and_touches_looked_up_rows_only(storage: str) -> None:
    tables = HashedTables(TableConfig(num_hashes=2, num_rows=1000, dim=3, storage=storage))
    (tables(torch.tensor([[7, 7], [7, 900]])) * torch.tensor([[1.0], [2.0]])).sum().backward()
    assert tables.weight.grad is None
    ((rows, values),) = tables.pending
    assert rows.tolist() == [7, 1007, 7, 1900]
    assert values.dtype == torch.float32
    assert values.tolist() == [[1, 1, 1], [1, 1, 1], [2, 2, 2], [2, 2, 2]]


@pytest.mark.parametrize("storage", STORAGES)
def test_padding_reads_zeros(storage: str) -> None:
    tables = HashedTables(TableConfig(num_hashes=2, num_rows=4, dim=3, storage=storage))
    vectors = tables(torch.tensor([[1, -1], [-1, -1]]))
    assert torch.equal(vectors[0, :3], tables.weight[1].float())
    assert not vectors[0, 3:].any() and not vectors[1].any()
    vectors.sum().backward()
    assert tables.pending[0][0].tolist() == [1, -1, -1, -1]
    assert tables.pending_gradient().sum(dim=1).tolist() == [0, 3, 0, 0, 0, 0, 0, 0]


def test_vectors_may_be_bf16() -> None:
    tables = HashedTables(TableConfig(num_hashes=2, num_rows=4, dim=3))
    rows = torch.tensor([[1, 3]])
    assert torch.equal(tables(rows, torch.bfloat16), tables(rows).bfloat16())


def test_tables_are_found_by_class_wherever_they_are() -> None:
    config = TableConfig(num_hashes=1, num_rows=2, dim=2)
    model = nn.ModuleDict({"a": nn.Sequential(HashedTables(config)), "b": nn.Embedding(3, 2)})
    assert list(table_modules(model)) == ["a.0"]
    assert table_parameter_names(model) == {"a.0.weight"}
    assert table_parameter_names(HashedTables(config)) == {"weight"}
    assert table_parameter_names(model["b"]) == set()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("num_hashes", "num_rows", "dim"), [(1, 1, 1), (8, 3, 32), (64, 7, 5), (3, 1000, 1)])
def test_any_size_goes_through_every_storage(storage: str, num_hashes: int, num_rows: int, dim: int) -> None:
    tables = HashedTables(TableConfig(num_hashes=num_hashes, num_rows=num_rows, dim=dim, storage=storage))
    assert tables.weight.dtype == STORAGES[storage]
    rows = torch.arange(6 * num_hashes).view(6, num_hashes) % num_rows
    vectors = tables(rows)
    assert vectors.dtype == torch.float32
    for item in range(6):
        parts = [tables.weight[table * num_rows + int(rows[item, table])] for table in range(num_hashes)]
        assert torch.equal(vectors[item], torch.cat(parts).float())
    vectors.sum().backward()
    assert float(tables.pending_gradient().sum()) == 6 * num_hashes * dim


@pytest.mark.parametrize("storage", HALVES)
def test_the_gradient_of_a_half_table_never_becomes_half(storage: str) -> None:
    """1e-9 is 0 in fp16 and 4097 is 4096 in both: sums over repeated rows and over two lookups keep all of them."""
    half = HashedTables(TableConfig(num_hashes=1, num_rows=5, dim=2, storage=storage))
    full = HashedTables(TableConfig(num_hashes=1, num_rows=5, dim=2))
    first, second = torch.tensor([[3], [0], [3]]), torch.tensor([[3], [4]])
    factors = torch.tensor([[1e-9, 4097.0], [1.0, 1e6], [3e-9, 0.25]])
    for tables in (half, full):
        ((tables(first) * factors).sum() + (tables(second) * 0.125).sum()).backward()
    assert torch.equal(half.pending_gradient(), full.pending_gradient())
    assert half.pending_gradient()[3].tolist() == pytest.approx([0.125 + 4e-9, 4097.375], rel=1e-7)


def test_pending_gradients_are_in_no_file_and_belong_to_one_table() -> None:
    tables = HashedTables(TableConfig(num_hashes=2, num_rows=500, dim=8))
    other = copy.deepcopy(tables)
    other(torch.tensor([[1, 1]])).sum().backward()
    assert (len(other.pending), len(tables.pending)) == (1, 0)
    assert list(other.state_dict()) == ["weight"]


@pytest.mark.parametrize("storage", STORAGES)
def test_no_gradient_where_none_is_wanted(storage: str) -> None:
    tables = HashedTables(TableConfig(num_hashes=1, num_rows=4, dim=2, storage=storage))
    rows = torch.tensor([[2]])
    with torch.inference_mode():
        assert torch.equal(tables(rows)[0], tables.weight[2].float())
    tables(rows).sum().backward()  # inference before training does no harm
    tables.pending.clear()
    tables.requires_grad_(requires_grad=False)
    vectors = tables(rows)
    assert not vectors.requires_grad
    (vectors * torch.ones(2, requires_grad=True)).sum().backward()
    assert tables.pending == []


@pytest.mark.parametrize("storage", HALVES)
def test_a_half_table_begins_as_the_full_one_rounded(storage: str) -> None:
    for num_rows in (1, 5, 33):
        torch.manual_seed(3)
        full = HashedTables(TableConfig(num_hashes=3, num_rows=num_rows, dim=7, init_std=0.2))
        after = torch.rand(4)
        torch.manual_seed(3)
        half = HashedTables(TableConfig(num_hashes=3, num_rows=num_rows, dim=7, init_std=0.2, storage=storage))
        assert torch.equal(half.weight, full.weight.to(STORAGES[storage]))
        assert torch.equal(torch.rand(4), after)


def test_fresh_rows_depend_on_the_seed_and_the_table_and_never_on_the_device() -> None:
    config = TableConfig(num_hashes=2, num_rows=50, dim=4, init_std=0.2)
    torch.manual_seed(3)
    first, second = HashedTables(config), HashedTables(config)
    assert not (first.weight == second.weight).any()
    torch.manual_seed(3)
    with rows_on("meta"):
        declared = HashedTables(config)
    assert declared.weight.is_meta and declared.fresh == first.fresh
    with torch.device("meta"):
        assert HashedTables(config).fresh == second.fresh
    assert torch.equal(first.weight, declared.fresh.rows(torch.arange(100), 4))
    torch.manual_seed(4)
    assert HashedTables(config).fresh != first.fresh
    assert HashedTables(dataclasses.replace(config, init_std=0.0)).weight.abs().max() == 0


class Allocations(TorchDispatchMode):
    """Adds up the bytes of all memory that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[int, int] = {}
        self.kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.kept.append(result)  # so that no place is used twice
            self.places[result.untyped_storage().data_ptr()] = result.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize("storage", STORAGES)
def test_making_a_table_takes_the_room_of_one_table(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ELEMENTS_AT_ONCE, "cpu", 1 << 10)
    with Allocations() as made:
        HashedTables(TableConfig(num_hashes=2, num_rows=5_000, dim=8, storage=storage))
    sizes = sorted(made.places.values())
    assert sizes[-1] == 2 * 5_000 * 8 * STORAGES[storage].itemsize
    assert sizes[-2] <= 8 * torch.get_num_threads() << 10  # one block of bits; each is dropped before the next is made


@pytest.mark.parametrize("storage", STORAGES)
def test_the_published_size_can_be_declared(storage: str) -> None:
    with torch.device("meta"):
        tables = HashedTables(TableConfig(num_hashes=8, num_rows=80_000_000, dim=32, storage=storage))
        assert tables(torch.zeros(5, 8, dtype=torch.int64)).shape == (5, 256)
    assert tables.weight.shape == (640_000_000, 32)
    assert tables.weight.dtype == STORAGES[storage]


def test_halved_tables_have_as_many_parameters() -> None:
    config = TableConfig(num_hashes=2, num_rows=7, dim=6, seed=3, storage="fp16")
    assert halved(config) == TableConfig(num_hashes=2, num_rows=14, dim=3, seed=3, storage="fp16")
    assert HashedTables(halved(config)).weight.numel() == HashedTables(config).weight.numel()
    with pytest.raises(ConfigError, match="an even number"):
        halved(halved(config))
