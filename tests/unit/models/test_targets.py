"""Pairs of tokens and later events: equal to plain loops over rows and places."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tackboard.batch import SequenceBatch
from tackboard.models.targets import (
    Pairs,
    TokenPlaces,
    future_token_pairs,
    multi_token_pairs,
    next_token_pairs,
    row_of_event,
)

Histories = Callable[..., SequenceBatch]
Triple = tuple[int, int, int]
"""Token, item, row."""

rows_of_lengths = st.lists(st.integers(0, 7), min_size=1, max_size=6)
shared_fixtures = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def triples(pairs: Pairs) -> list[Triple]:
    return list(zip(pairs.tokens.tolist(), pairs.items.tolist(), pairs.rows.tolist(), strict=True))


def plain_pairs(batch: SequenceBatch, is_asked: Callable[[int, int], bool]) -> list[Triple]:
    """(token, item, row) where the token after `seen` events of a row is asked for its positive event at `place`."""
    found, first_token = [], 0
    for row in range(batch.num_rows):
        begin, end = int(batch.offsets[row]), int(batch.offsets[row + 1])
        for event in range(begin, end):
            for seen in range(event - begin + 1):  # Never a token that has seen the event itself.
                if bool(batch.is_positive[event]) and is_asked(seen, event - begin):
                    found.append((first_token + seen, int(batch.items[event]), row))
        first_token += 1 + end - begin  # A start token, and one for each event.
    return found


@given(lengths=rows_of_lengths, seed=st.integers(0, 99))
@shared_fixtures
def test_next_token_pairs(make_histories: Histories, lengths: list[int], seed: int) -> None:
    batch = make_histories(lengths, seed=seed)
    assert triples(next_token_pairs(batch)) == plain_pairs(batch, lambda seen, place: seen == place)


@given(lengths=rows_of_lengths, window=st.integers(1, 9), seed=st.integers(0, 99))
@shared_fixtures
def test_multi_token_pairs(make_histories: Histories, lengths: list[int], window: int, seed: int) -> None:
    batch = make_histories(lengths, seed=seed)
    found = triples(multi_token_pairs(batch, window))
    assert sorted(found) == sorted(plain_pairs(batch, lambda seen, place: 1 <= place - seen < window))
    assert len(multi_token_pairs(batch, 1)) == 0  # The next event is the next-token loss's own.


@given(lengths=rows_of_lengths, anchor=st.integers(1, 6), window=st.integers(1, 4), seed=st.integers(0, 99))
@shared_fixtures
def test_future_token_pairs(make_histories: Histories, lengths: list[int], anchor: int, window: int, seed: int) -> None:
    batch = make_histories(lengths, seed=seed)
    found = triples(future_token_pairs(batch, anchor, window))
    assert found == plain_pairs(batch, lambda seen, place: seen == anchor and anchor <= place < anchor + window)


def test_a_share_of_the_window_is_drawn_anew_by_torchs_generator(make_histories: Histories) -> None:
    batch = make_histories([60] * 20)
    whole = triples(multi_token_pairs(batch, 8))
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(triples(multi_token_pairs(batch, 8, share=0.25)))
    assert draws[0] == draws[1] != draws[2]
    # 5,400 pairs or so: three standard deviations of a share of 1/4 are .018.
    assert all(len(draw) / len(whole) == pytest.approx(0.25, abs=0.02) for draw in draws)
    kept = iter(whole)
    assert all(pair in kept for pair in draws[0])  # some of them, in their order


def test_row_of_event_passes_over_empty_rows(make_histories: Histories) -> None:
    assert row_of_event(make_histories([0, 2, 0, 1, 0])).tolist() == [1, 1, 3]


def test_where_tokens_lie(make_histories: Histories) -> None:
    """Rows of 2, 0 and 3 events: tokens 0–2, 3, 4–7."""
    places = TokenPlaces.of(make_histories([2, 0, 3]))
    assert places.starts.tolist() == [0, 3, 4]
    assert places.lasts.tolist() == [2, 3, 7]
    assert places.before.tolist() == [0, 1, 4, 5, 6]
    assert places.num_tokens == 8
