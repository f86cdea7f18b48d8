"""The page of an evaluation: whole for any result, it loads nothing, and it names the best rival."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.data.sequences import Sequences
from tackboard.data.source import load_sequences
from tackboard.evaluation.catalogue import judge_catalogue
from tackboard.evaluation.evaluation_page import evaluation_page
from tackboard.evaluation.ranking import EvaluationConfig
from tackboard.models.interface import build_model
from tackboard.train.config import RunConfig

pytestmark = pytest.mark.usefixtures("torch_settings")
Config = Callable[..., RunConfig]


def result_of(sequences: Sequences, config: RunConfig, cutoffs: tuple[int, ...] = (1, 10)) -> dict[str, Any]:
    model = build_model(config.model, sequences.source.vocabulary)
    tables, length = config.model.tables, config.model.max_history
    result = judge_catalogue(model, sequences, tables, length, EvaluationConfig(cutoffs=cutoffs), quiet=True)
    return result | {"step": 1200, "checkpoint": "runs/x/checkpoints/step-00001200"}


def test_the_page_shows_the_table_and_every_slice(by_time: Callable[..., Sequences], tiny_config: Config) -> None:
    result = result_of(by_time(1), tiny_config())
    page = evaluation_page(result)
    assert "://" not in page and "<script" not in page
    for row in result["rows"]:
        assert f"<td>{row['name']}</td>" in page.replace(' class="left"', "") and f"{row['hr@10']:.4f}" in page
    for row in result["slices"]:
        assert f"{row['slice']} ({row['num_events']:,})" in page
    best = max(result["rows"], key=lambda row: row["hr@10"])["hr@10"]
    strong = re.search(r'<tr class="strong">(.*?)</tr>', page, re.DOTALL)
    assert strong is not None and f"{best:.4f}" in strong[1]
    assert "Evaluation at step 1,200" in page and html.escape(result["protocol"]) in page


def test_the_oracle_is_not_the_best_rival(by_time: Callable[..., Sequences], tiny_config: Config) -> None:
    result = result_of(by_time(1), tiny_config())
    figures = {name: 1.0 for name in result["rows"][0] if name != "name"}
    result["rows"].append({"name": "oracle"} | figures)
    strong = re.search(r'<tr class="strong">(.*?)</tr>', evaluation_page(result), re.DOTALL)
    assert strong is not None and "oracle" not in strong[1]


def test_one_event_and_slices_with_one_label(
    tmp_path: Path, make_dataset: Callable[..., Path], tiny_config: Config
) -> None:
    """Without a cutoff of 10, the page shows the first cutoff. Names are shown as text, and long names are cut."""
    action, surface = "<b>click</b> https://x", "s" * 400
    log = [(1, 5, action, surface, 1), (1, 6, action, surface, 2)]
    result = result_of(load_sequences(make_dataset(tmp_path, log)), tiny_config(), cutoffs=(3,))
    assert result["num_events"] == 1 and {row["num_events"] for row in result["slices"]} == {1}
    page = evaluation_page(result)
    assert "HR@3 by item age" in page and "<b>click" not in page and "://" not in page
    assert "&lt;b&gt;click" in page and "s" * 29 + "… (1)" in page and "s" * 30 not in page
    widths = [float(width) for width in re.findall(r'<rect[^>]* width="([^"]+)"', page)]
    assert widths and all(0 <= width <= 900 for width in widths)
