"""kill -9 in the middle of writing the log of served features: what is there can be read, but for one torn line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tackboard.features.serving_log import open_log

ROOT = Path(__file__).resolve().parents[2]
KEY = bytes(range(32))
PROGRAM = """
import itertools, sys
from pathlib import Path
import numpy as np
from tackboard.features.column import Column
from tackboard.features.language import FeatureSet, Float, Item
from tackboard.features.serving_log import FeatureLog, FeatureLogConfig
from tackboard.features.types import FLOAT

features = FeatureSet("home", price=Item(price=Float()).price)
log = FeatureLog(Path(sys.argv[1]), features, bytes(range(32)), FeatureLogConfig(max_file_bytes=3_000_000))
values = {"price": Column(FLOAT, np.arange(20_000) + 0.5)}
for number in itertools.count():
    log.offer(user_id=number, request_ms=number, item_ids=np.arange(20_000), features=values)
    if log.num_logged > 3:
        print("writing", flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.023])
def test_a_killed_writer_leaves_a_readable_log(tmp_path: Path, delay_s: float) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.stdout.close()
        process.wait()
    files = open_log(tmp_path, KEY)
    records = [record for file in files for record in file.records()]
    assert len(records) > 3
    assert [record.user for record in records] == list(dict.fromkeys(record.user for record in records))
    for record in records:
        assert record.features["price"].values[-1] == 19_999.5
        assert len(record.item_ids) == 20_000
    assert not any(file.is_torn for file in files[:-1])
