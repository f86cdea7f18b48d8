"""A small workspace that the commands made: a dataset, a run and a bundle."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

RECIPE = '''\
"""A run of seconds."""

from tackboard.data.loader import DataConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.train.config import RunConfig, TrainingConfig


def recipe() -> RunConfig:
    return RunConfig(
        name="tiny",
        data=DataConfig(dataset="datasets/tiny", max_length=12, tokens_per_step=256),
        model=PinFMConfig(tables=TableConfig(num_hashes=2, num_rows=64, dim=4), width=8, max_history=12),
        training=TrainingConfig(steps=4, checkpoint_every=2, num_threads=1, device="cpu"),
    )
'''
WORLD = ["num_users=60", "num_items=80", "num_topics=5", "median_events=12", "max_events=30"]


@pytest.fixture(scope="session")
def workspace(tackboard: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """datasets/tiny, runs/latest, bundle and recipe.py, made by the commands. Do not change it."""
    folder = tmp_path_factory.mktemp("workspace")
    (folder / "recipe.py").write_text(RECIPE)
    settings = [word for setting in WORLD for word in ("--set", setting)]
    for arguments in (
        ["data", "synth", "--name", "tiny", *settings],
        ["train", "recipe.py:recipe"],
        ["export", "runs/latest", "--out", "bundle"],
    ):
        answer = tackboard(*arguments, cwd=folder)
        assert answer.code == 0, answer.err
    return folder


@pytest.fixture(scope="session")
def serving() -> Callable[..., contextlib.AbstractContextManager[str]]:
    """`with serving(bundle, code) as url`: a server in a thread of this process, because a process costs seconds."""
    from tackboard.scoring.scorer import Scorer
    from tackboard.serve.server import ServeConfig, Server

    @contextlib.contextmanager
    def serve(bundle: Path, code_file: Path | None = None) -> Iterator[str]:
        ready = threading.Event()
        scorer = Scorer.load(bundle, code_file=code_file, num_threads=1)
        server = Server(scorer, ServeConfig(port=0), on_ready=lambda _url: ready.set())
        thread = threading.Thread(target=server.run)
        thread.start()
        assert ready.wait(20)
        try:
            yield server.url
        finally:
            server.drain()
            thread.join(20)

    return serve
