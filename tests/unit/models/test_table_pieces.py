"""Tables are found by what they have, whether one process holds all rows or some."""

from __future__ import annotations

import torch
from torch import nn

from tackboard.models.table_pieces import Piece, TableInPieces, tables_in_pieces
from tackboard.models.tables import HashedTables, TableConfig
from tackboard.ops.fresh_rows import FreshRows


class Shards(nn.Module):
    """A table of which this process holds rows 10 to 12."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh, self.num_rows_in_all, self.dim, self.dtype = FreshRows(1, 0.1), 100, 4, torch.float32
        self.pieces = [Piece(10, torch.zeros(3, 4), torch.zeros(3))]


def test_a_table_of_one_process_is_one_piece() -> None:
    table = HashedTables(TableConfig(num_hashes=2, num_rows=5, dim=3, storage="fp16"))
    assert isinstance(table, TableInPieces)
    (piece,) = table.pieces
    assert (piece.first_row, piece.sums_R, table.num_rows_in_all, table.dtype) == (0, None, 10, torch.float16)
    piece.rows_Rd[9] = 7.0
    assert table.weight[9].tolist() == [7.0] * 3 and not piece.rows_Rd.requires_grad


def test_tables_have_the_names_of_their_parameters() -> None:
    model = nn.Module()
    model.part = nn.Module()
    model.part.items = HashedTables(TableConfig(num_hashes=2, num_rows=5, dim=3))
    model.shards, model.dense = Shards(), nn.Linear(2, 2)
    found = tables_in_pieces(model)
    assert set(found) == {"part.items.weight", "shards.weight"} and found["shards.weight"] is model.shards
    assert set(tables_in_pieces(model.part.items)) == {"weight"}
