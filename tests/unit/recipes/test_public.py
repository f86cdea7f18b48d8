"""The recipes of public datasets: complete, and of the sizes that their datasets have."""

from __future__ import annotations

import pytest

from tackboard.core.config import to_dict
from tackboard.events.public.listing import find_public
from tackboard.recipes.registry import find_recipe
from tackboard.train.config import config_from_json, config_to_json


@pytest.mark.parametrize("name", ["ml-1m", "kakao-brunch", "deskdrop"])
def test_a_recipe_reads_the_dataset_that_an_import_of_its_name_writes(name: str) -> None:
    config = find_recipe(name)
    counts = find_public(name).counts
    assert config.name == name and config.data.dataset == f"datasets/{name}"
    assert config.model.tables.num_rows >= counts.items / 2
    assert config_from_json(config_to_json(config)) == config
    assert to_dict(config)["model"]["request_time"] is True
