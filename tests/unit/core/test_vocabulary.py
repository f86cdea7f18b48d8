"""The names of a vocabulary are sorted, and an embedding has a row for every name and one for unknown names."""

from __future__ import annotations

from tackboard.core.vocabulary import Vocabulary


def test_names_do_not_depend_on_the_order_or_number_of_uses() -> None:
    first = Vocabulary.from_names(["save", "click", "save"], ["home"])
    assert first == Vocabulary.from_names(["click", "save"], ["home", "home"])
    assert first.actions == ("click", "save")


def test_an_embedding_has_a_row_for_unknown_names() -> None:
    vocabulary = Vocabulary.from_names(["a", "b", "c"], ["x", "y"])
    assert (vocabulary.num_actions, vocabulary.num_surfaces) == (4, 3)


def test_a_grown_vocabulary_keeps_every_index() -> None:
    first = Vocabulary(actions=("click", "save"), surfaces=("home",))
    grown = first.grown(Vocabulary.from_names(["buy", "click", "add"], ["home"]))
    assert grown == Vocabulary(actions=("click", "save", "add", "buy"), surfaces=("home",))
    assert grown.grown(first) == grown
