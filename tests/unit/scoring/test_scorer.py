"""The scorer: a bundle scores as the model it was made of, and nothing damaged or foreign is loaded."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from tackboard.batch import item_rows
from tackboard.batch.builder import make_batch
from tackboard.bundle.signature import KIND
from tackboard.checkpoint.store import find_checkpoint, load_checkpoint
from tackboard.checkpoint.trained import stored_parameters
from tackboard.core.errors import CorruptFileError, UsageError
from tackboard.core.manifest import MANIFEST, write_manifest
from tackboard.core.rundir import RunDirectory
from tackboard.core.user_code import load_code
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.source import open_sequences
from tackboard.export.exporter import export_bundle
from tackboard.features.column import Column, differing_rows
from tackboard.features.feature_set import FILE_NAME, FeatureSet, read_features
from tackboard.features.standard import standard_features
from tackboard.features.types import ID, STRING, TIME
from tackboard.models.description import restore_config
from tackboard.models.interface import build_model
from tackboard.models.pinfm import PinFM
from tackboard.models.stored_parameters import load_parameters
from tackboard.scoring.request import ScoreRequest
from tackboard.scoring.scorer import Scorer
from tackboard.train.config import RunConfig, config_to_json, features_for
from tackboard.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("torch_settings")

HISTORY = {
    "item": Column.of(ID, [3, 17, 3, 999]),
    "action": Column.of(STRING, ["click", "hide", "save", "never seen"]),
    "surface": Column.of(STRING, ["home", "search", "", "home"]),
    "time": Column.of(TIME, [0, 1000, 60_000, 10**9]),
}
REQUEST = ScoreRequest(history=HISTORY, candidate_items=np.array([5, 3, 12345678901234, -7, 5]))
NOTHING = {name: column.take(np.zeros(0, dtype=np.int64)) for name, column in HISTORY.items()}
EMPTY = dataclasses.replace(REQUEST, history=NOTHING)


def scores_of_the_model(
    run: RunDirectory, request: ScoreRequest, make_history: Callable[..., Column]
) -> NDArray[np.float32]:
    """The same by way of the checkpoint: no bundle, no scorer, no features."""
    checkpoint = load_checkpoint(find_checkpoint(run.path))
    config = restore_config(checkpoint.state["model"])
    names = checkpoint.state["vocabulary"]
    vocabulary = Vocabulary(actions=tuple(names["actions"]), surfaces=tuple(names["surfaces"]))
    model = build_model(config, vocabulary)
    load_parameters(model, stored_parameters(checkpoint), checkpoint.path)
    model.eval()
    history = {name: column.to_pylist() for name, column in request.history.items()}
    column = make_history(
        [len(history["item"])],
        history["item"],
        [1 + names["actions"].index(name) if name in names["actions"] else 0 for name in history["action"]],
        [1 + names["surfaces"].index(name) if name in names["surfaces"] else 0 for name in history["surface"]],
        history["time"],
    )
    batch = make_batch(history=column, hashing=config.tables)
    assert isinstance(model, PinFM)
    with torch.no_grad():
        items = model.encode_items(item_rows(request.candidate_items, config.tables))
        cosines = items @ model.encode_users(batch)[0]
        scores: NDArray[np.float32] = (cosines * model.log_inverse_temperature.exp()).numpy()
        return scores


@pytest.mark.parametrize("request_", [REQUEST, EMPTY], ids=["history", "no history"])
def test_a_bundle_scores_as_its_model(
    trained_run: RunDirectory, tiny_bundle: Path, request_: ScoreRequest, make_history: Callable[..., Column]
) -> None:
    scores = Scorer.load(tiny_bundle, num_threads=1).score(request_)
    assert scores.dtype == np.float32
    assert scores == pytest.approx(scores_of_the_model(trained_run, request_, make_history), abs=1e-6)
    assert scores[0] == pytest.approx(scores[4], abs=1e-6)  # the same item twice
    assert len(np.unique(scores.round(4))) == 4


def test_a_half_table_is_mapped_and_scores_as_a_widened_one(trained_run: RunDirectory, tmp_path: Path) -> None:
    export_bundle(find_checkpoint(trained_run.path), tmp_path / "half", name="h", version="1", tables="fp16")
    scorer = Scorer.load(tmp_path / "half", num_threads=1)
    weight, widened = scorer.model.item_tables.weight, deepcopy(scorer)
    assert weight.dtype == torch.float16
    assert f"{tmp_path / 'half' / 'tables' / 'item_tables.weight.safetensors'}\n" in Path("/proc/self/maps").read_text()
    widened.model.item_tables.weight.data = weight.detach().float()
    expected = widened.score(REQUEST)
    assert scorer.score(REQUEST).tobytes() == expected.tobytes()
    # A bundle that is removed, or replaced under its name, goes on to be served as it was.
    shutil.rmtree(tmp_path / "half")
    (tmp_path / "half").mkdir()
    assert scorer.score(REQUEST).tobytes() == expected.tobytes()


LOADED_IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np, torch
from tackboard.features.column import Column
from tackboard.features.types import ID, STRING, TIME
from tackboard.scoring.request import ScoreRequest
from tackboard.scoring.scorer import Scorer

def kib(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

def score(bundle):
    scorer = Scorer.load(bundle, num_threads=1)
    history = {"item": Column.of(ID, [3]), "action": Column.of(STRING, ["click"]),
               "surface": Column.of(STRING, ["home"]), "time": Column.of(TIME, [0])}
    return scorer, scorer.score(ScoreRequest(history=history, candidate_items=np.arange(1000)))

score(Path(sys.argv[1]))  # Imports are over.
before = kib("RssAnon:")
# The kernel counts what a process may write, the pages that it maps of a file included: one table has room, not two.
allowed = (kib("VmData:") << 10) + int(1.5 * int(sys.argv[3]))
resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
scorer, scores = score(Path(sys.argv[2]))
assert np.isfinite(scores).all() and scorer.model.item_tables.weight.nbytes == int(sys.argv[3])
print(kib("RssAnon:") - before)
"""


@pytest.mark.slow
def test_a_large_half_table_takes_no_memory_of_its_own(tiny_bundle: Path, tmp_path: Path) -> None:
    """200 MB of fp16: neither random rows (400 MB), nor rows of fp32 (400 MB), nor a copy (200 MB) would have room."""
    large, name, num_rows, dim = tmp_path / "large", "item_tables.weight", 12_500_000, 4
    shutil.copytree(tiny_bundle, large)
    signature = json.loads((large / "signature.json").read_text())
    signature["model"]["config"]["tables"]["num_rows"] = num_rows
    signature["tables"][name] |= {"dtype": "fp16", "shape": [2 * num_rows, dim]}
    (large / "signature.json").write_text(json.dumps(signature))
    table = torch.full((2 * num_rows, dim), 0.1, dtype=torch.float16)
    save_file({name: table}, large / "tables" / f"{name}.safetensors")
    (large / MANIFEST).unlink()
    write_manifest(large, KIND)
    arguments = [str(tiny_bundle), str(large), str(table.nbytes)]
    done = subprocess.run(
        [sys.executable, "-c", LOADED_IN_LITTLE_MEMORY, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 40_000_000


def train(config: RunConfig, run: RunDirectory) -> None:
    features = features_for(config)
    source = open_sequences(config.data.dataset, config.data.positive_actions, features=features)
    Trainer(config, run, source).train(quiet=True)


FEATURES = """
from tackboard.features.language import Context, Events, FeatureSet, Request, String, milliseconds
events, request, context = Events(), Request(), Context(device=String())
features = FeatureSet(
    "own",
    hour=request.time.hour("UTC") / 12.0 - 1.0,
    busy=events.within(milliseconds(3_000_000)).count().log1p(),
    is_phone=(context.device == "phone").fill_missing(False),
)
"""


@pytest.fixture(scope="module")
def featured(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: Callable[..., RunConfig], make_dataset: Callable[..., Path]
) -> Path:
    """A bundle whose model reads three features of the request beside the history."""
    folder = tmp_path_factory.mktemp("featured")
    (folder / "features.py").write_text(FEATURES)
    log = [(row % 5, row * row % 23, "click" if row % 3 else "save", "home", 1_000_000 * row) for row in range(60)]
    contexts = pa.array([f'{{"device": "{"phone" if row % 2 else "tv"}"}}' for row in range(60)])
    config = tiny_config(
        f"data.dataset={make_dataset(folder, log, fields={'context': contexts})}",
        f"data.features={folder / 'features.py'}",
        'model.request_features=["hour","busy","is_phone"]',
    )
    run = RunDirectory.create(folder / "runs", "own", config_to_json(config))
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    train(config, run)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    export_bundle(find_checkpoint(run.path), folder / "bundle", name="own", version="1", tables="fp32")
    return folder / "bundle"


def test_features_of_the_request_reach_the_model(featured: Path) -> None:
    scorer = Scorer.load(featured, num_threads=1)
    history = {"item": [3, 17], "time_ms": [1_000_000, 5_000_000]}

    def score(hour: int, device: str | None = None) -> NDArray[np.float32]:
        more = {} if device is None else {"context_device": [device]}
        return scorer.score(scorer.reader.read(history, [5, 3, 8], request_ms=3_600_000 * hour, attributes=more))

    assert scorer.features.reads()[-3:] == ["hour", "busy", "is_phone"]
    assert np.abs(score(3) - score(20)).max() > 1e-4
    assert np.abs(score(3) - score(3, "phone")).max() > 1e-4
    assert score(3) == pytest.approx(score(3, "tv"), abs=1e-6)
    assert np.abs(score(1) - score(2)).max() > 1e-4  # one event lies within 50 minutes of 01:00, none of 02:00
    with pytest.raises(UsageError, match="request_time_ms is missing"):
        scorer.reader.read(history, [5])


def test_scores_are_those_of_the_features(featured: Path) -> None:
    """What a server logs of a request is enough to score it again."""
    scorer = Scorer.load(featured, num_threads=1)
    request = scorer.reader.read({"item": [3, 17], "time_ms": [1, 2]}, [5, 3], request_ms=7_200_000)
    features = scorer.compute_features(request)
    assert {name: column.to_pylist() for name, column in features.items() if name != "history"} == {
        "hour": [2 / 12.0 - 1.0],
        "busy": [0.0],
        "is_phone": [False],
    }
    assert features["history"].to_pylist()[0]["item"] == [3, 17]
    assert np.array_equal(scorer.score_features(features, request.candidate_items), scorer.score(request))
    again = scorer.compute_features(request)
    assert all(len(differing_rows(features[name], again[name])) == 0 for name in features)


def remake(bundle: Path, copy: Path, *, features: FeatureSet | None = None) -> Path:
    """A copy of a bundle with other features, or none, under a manifest that fits."""
    shutil.copytree(bundle, copy)
    (copy / FILE_NAME).unlink()
    if features is not None:
        features.write(copy)
    (copy / MANIFEST).unlink()
    write_manifest(copy, KIND)
    return copy


def test_a_bundle_without_features_reads_the_standard_ones(tiny_bundle: Path, tmp_path: Path) -> None:
    old = Scorer.load(remake(tiny_bundle, tmp_path / "old"), num_threads=1)
    new = Scorer.load(tiny_bundle, num_threads=1)
    assert old.features.hash == new.features.hash
    assert np.array_equal(old.score(REQUEST), new.score(REQUEST))


def test_features_that_the_model_cannot_read_are_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    """More events than the model has places for would end in the middle of a request."""
    features = read_features(tiny_bundle)
    assert features is not None
    vocabulary = Scorer.load(tiny_bundle, num_threads=1).signature.vocabulary
    longer = standard_features(vocabulary, 9).reading(features.reads())
    with pytest.raises(CorruptFileError, match="features.json.*is not the user's newest 8 events"):
        Scorer.load(remake(tiny_bundle, tmp_path / "longer", features=longer))


OWN_MODEL = """
import dataclasses, torch
from torch import nn
from tackboard.models.interface import LossOutput, ModelConfig, RetrievalModel
from tackboard.models.tables import HashedTables, TableConfig

@dataclasses.dataclass(frozen=True, kw_only=True)
class MineConfig(ModelConfig):
    tables: TableConfig = dataclasses.field(default_factory=lambda: TableConfig(num_hashes=2, num_rows=16, dim=4))
    max_history: int = 8
    def build(self, vocabulary):
        return Mine(self)

class Mine(RetrievalModel):
    def __init__(self, config):
        super().__init__()
        self.items = HashedTables(config.tables)
        self.bias = nn.Parameter(torch.zeros(8))
    def loss(self, batch):
        return LossOutput((self.items(batch.item_rows) + self.bias).square().mean(), {})
    def encode_users(self, batch):
        return self.bias.expand(batch.num_rows, -1) + 1
    def encode_items(self, item_rows):
        return self.items(item_rows)
"""


def test_a_users_model_is_served_only_with_its_file(tmp_path: Path, tiny_config: Callable[..., RunConfig]) -> None:
    code = tmp_path / "mine.py"
    code.write_text(OWN_MODEL)
    config = dataclasses.replace(tiny_config("training.steps=2"), model=load_code(code).MineConfig())
    run = RunDirectory.create(tmp_path / "runs", "own", config_to_json(config))
    train(config, run)
    checkpoint, bundle = find_checkpoint(run.path), tmp_path / "bundle"
    export_bundle(checkpoint, bundle, name="own", version="1", tables="fp32", code_file=code)
    with pytest.raises(UsageError, match=r"--code mine\.py"):
        Scorer.load(tmp_path / "bundle")
    scores = Scorer.load(tmp_path / "bundle", code_file=code, num_threads=1).score(REQUEST)
    assert scores.shape == (5,)
    assert np.isfinite(scores).all()
    assert str(tmp_path) not in (tmp_path / "bundle" / "signature.json").read_text()
