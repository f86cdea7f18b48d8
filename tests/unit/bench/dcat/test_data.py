"""Requests and logs of the bench: full histories, one request per user, and the ratios that were asked for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tackboard.bench.dcat.data import PRESETS, DcatPreset, device_word, find_dcat_preset, made_up_requests
from tackboard.core.errors import UsageError
from tackboard.train.config import RunConfig
from tackboard.train.start import open_source


def test_made_up_requests_have_full_histories_of_different_users(smallest: DcatPreset) -> None:
    asked = made_up_requests(smallest, num_candidates=5, num_requests=3)
    batch = asked.batch(smallest.config().model)
    assert batch.histories.lengths().tolist() == [smallest.max_history] * 3
    assert torch.bincount(batch.request_of).tolist() == [5, 5, 5]
    assert batch.histories.item_ids[batch.candidates].tolist() == asked.candidates.tolist()
    assert len(torch.unique(batch.histories.items)) > smallest.max_history


@pytest.mark.parametrize("at_once", [1, 4, 7, 100])
def test_parts_hold_every_candidate_with_its_own_history(smallest: DcatPreset, at_once: int) -> None:
    asked = made_up_requests(smallest, num_candidates=5, num_requests=3)
    parts = asked.parts(at_once)
    assert [len(part.candidates) for part in parts[:-1]] == [min(at_once, 15)] * (len(parts) - 1)
    seen = []
    for part in parts:
        assert len(part.history) == len(np.unique(part.request_of)), "no history without candidates"
        batch = part.batch(smallest.config().model)
        events = batch.histories.item_ids[batch.histories.items].view(batch.num_requests, -1)
        seen += [
            (item, *events[row].tolist()) for item, row in zip(part.candidates, batch.request_of.tolist(), strict=True)
        ]
    whole = asked.batch(smallest.config().model)
    events = whole.histories.item_ids[whole.histories.items].view(3, -1)
    assert seen == [(item, *events[number // 5].tolist()) for number, item in enumerate(asked.candidates)]


def test_training_has_one_request_per_user_at_the_wanted_ratio(smallest: DcatPreset, dcat_config: RunConfig) -> None:
    source = open_source(dcat_config)
    steps = dcat_config.data.steps(source, dcat_config.model.tables, dcat_config.seed)
    assert steps.plan.steps_per_epoch >= smallest.warmup + smallest.timed, "no step is read twice"
    for number in range(smallest.warmup + smallest.timed):
        batch = steps[number]
        assert batch.num_candidates == 10 * batch.num_requests
        assert len(batch.histories.users.unique()) == batch.num_requests
        assert batch.histories.lengths().unique().tolist() == [smallest.max_history]
        assert 0 < batch.num_requests <= smallest.requests_per_step + 1


def test_a_preset_fits_its_model() -> None:
    for preset in PRESETS.values():
        model = preset.config().model
        assert model.max_history == preset.max_history
        assert not model.dropout and not model.head.dropout
        assert preset.training == (10, 16)
    assert {1, 10, 16, 100, 1000} == set(PRESETS["cpu"].serving) == set(PRESETS["h200"].serving)
    assert dataclasses.replace(PRESETS["cpu"], width=128).config().model.width == 128


def test_presets_are_found_by_name_and_by_device() -> None:
    assert find_dcat_preset(device_word(torch.device("cuda"))) is PRESETS["h200"]
    assert find_dcat_preset(device_word(torch.device("cpu"))) is PRESETS["cpu"]
    with pytest.raises(UsageError, match="there is no size 'huge'"):
        find_dcat_preset("huge")
