"""Hashed tables: concatenation of one row per sub-table, and a gradient that holds the looked-up rows only."""

from __future__ import annotations

import torch
from torch import nn

from tackboard.batch import HashConfig
from tackboard.models.tables import HashedTables, table_modules, table_parameter_names


def test_a_vector_is_one_row_of_each_sub_table() -> None:
    tables = HashedTables(HashConfig(num_hashes=2, num_rows=5), dim=3)
    with torch.no_grad():
        tables.weight.copy_(torch.arange(30.0).view(10, 3))
    assert tables.width == 6
    # Row 4 of the first sub-table is row 4 of the weight; row 1 of the second is row 5 + 1.
    assert tables(torch.tensor([[4, 1], [0, 0]])).tolist() == [[12, 13, 14, 18, 19, 20], [0, 1, 2, 15, 16, 17]]


def test_the_gradient_is_sparse_and_touches_looked_up_rows_only() -> None:
    tables = HashedTables(HashConfig(num_hashes=2, num_rows=1000), dim=3)
    tables(torch.tensor([[7, 7], [7, 900]])).sum().backward()
    gradient = tables.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    gradient = gradient.coalesce()
    assert gradient.indices().tolist() == [[7, 1007, 1900]]
    assert gradient.values().tolist() == [[2, 2, 2], [1, 1, 1], [1, 1, 1]]


def test_nothing_but_the_weight_is_stored() -> None:
    """The first rows follow from the sizes; storing them would let a file contradict its config."""
    assert list(HashedTables(HashConfig(num_hashes=2, num_rows=5), dim=3).state_dict()) == ["weight"]


def test_fresh_rows_have_the_stated_spread() -> None:
    torch.manual_seed(0)
    weight = HashedTables(HashConfig(num_hashes=4, num_rows=2000), dim=8, init_std=0.3).weight
    assert abs(float(weight.detach().std()) - 0.3) < 0.01


def test_tables_are_found_by_class_wherever_they_are() -> None:
    hashing = HashConfig(num_hashes=1, num_rows=2)
    model = nn.ModuleDict({"a": nn.Sequential(HashedTables(hashing, 2)), "b": nn.Embedding(3, 2)})
    assert list(table_modules(model)) == ["a.0"]
    assert table_parameter_names(model) == {"a.0.weight"}
    assert table_parameter_names(HashedTables(hashing, 2)) == {"weight"}
    assert table_parameter_names(model["b"]) == set()
