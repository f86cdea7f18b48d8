"""Names as indices: sorted, from 1, with 0 for what training never saw."""

from __future__ import annotations

from tackboard.core.vocabulary import UNKNOWN, Vocabulary


def test_indices_do_not_depend_on_the_order_or_number_of_names() -> None:
    first = Vocabulary.from_names(["save", "click", "save"], ["home"])
    assert first == Vocabulary.from_names(["click", "save"], ["home", "home"])
    assert first.actions == ("click", "save")
    assert first.action_indices(["save", "click"]).tolist() == [2, 1]


def test_unseen_names_share_the_reserved_index() -> None:
    vocabulary = Vocabulary.from_names(["click"], ["home"])
    assert vocabulary.action_indices(["clcik", "click", ""]).tolist() == [UNKNOWN, 1, UNKNOWN]
    assert vocabulary.surface_indices(["click"]).tolist() == [UNKNOWN]
    assert vocabulary.action_indices([]).dtype.kind == "i"


def test_an_embedding_of_the_stated_size_holds_every_index() -> None:
    vocabulary = Vocabulary.from_names(["a", "b", "c"], ["x", "y"])
    assert (vocabulary.num_actions, vocabulary.num_surfaces) == (4, 3)
    assert vocabulary.action_indices(["a", "b", "c", "new"]).max() < vocabulary.num_actions
