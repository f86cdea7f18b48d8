"""Does the work of one cell (a unit of work, see cells.py). This module can also run as a separate process:
`python -m tackboard.bench.quality.cell WORK SPEC.json DEVICE THREADS`.

This module reads the description of a cell and writes the result under WORK/cells. The stage of a cell says what to do:

    baseline   ranks the test event by simple counts or by how recently items were seen; no model is fitted
    validate   fits a model with the last two events held out, ranks the second-last event at every checkpoint, and
               chooses the number of steps with the best NDCG@10
    test       fits a model with the last event held out, for the number of steps that the earlier cell `after` chose,
               on the same learning-rate schedule; ranks the test event once, at the end
    published  fits a model with the last event held out and ranks this event at every checkpoint, as the publications
               of SASRec and HSTU did; keeps the last and the best figure, although choosing on test data is cheating

Some studies add other stages, and `STAGES` lists all stages. A run keeps the ranks of each ranked checkpoint in a file.
So a run that continues after a kill ranks no checkpoint twice. If the newest checkpoint must be ranked and has no ranks
yet, it is ranked before training continues. The process has the exit codes of the command `tackboard`. For example, 75
means that the state is saved and the cell is not finished.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pkgutil
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.bench.quality.cells import Cell, Result, Work, save_array
from tackboard.checkpoint.store import CheckpointStore
from tackboard.checkpoint.trained import load_trained, stored_parameters
from tackboard.core import keyed_random
from tackboard.core.config import did_you_mean
from tackboard.core.errors import DataError, UsageError
from tackboard.core.files import read_json, remove_directory, write_json_atomic
from tackboard.core.machine import peak_rss_bytes
from tackboard.core.progress import say
from tackboard.core.rundir import RunDirectory
from tackboard.data.sequences import Sequences
from tackboard.data.source import SequenceSource, open_sequences
from tackboard.evaluation.baselines import ItemToItem, Popularity, RecentlySeen, TrainingEvents
from tackboard.evaluation.judged_events import JudgedEvents, held_out_events
from tackboard.evaluation.ranking import ScoreEvents, rank_model, target_ranks
from tackboard.flow.jobs import Step, run_step
from tackboard.metrics.ranks import RankingMetrics
from tackboard.models.interface import build_model
from tackboard.models.stored_parameters import load_parameters
from tackboard.train.config import RunConfig, config_to_json, features_for
from tackboard.train.devices import choose_device
from tackboard.train.trainer import Trainer

CUTOFFS = (10, 50, 200)
CHOOSE_BY = "ndcg@10"
USER_STREAM = 32
"""Random stream for the draw of ranked users. No other draw uses this stream."""

Arrays = Mapping[str, NDArray[Any] | Path]
Outcome = tuple[dict[str, Any], Arrays]


@dataclasses.dataclass(frozen=True)
class Machine:
    """The device and the number of threads that a cell may use. The description of a cell contains neither."""

    device: str = "auto"
    num_threads: int = 0


def run_cell(work: Work, cell: Cell, machine: Machine | None = None) -> Result:
    """Returns the stored result of a cell. If there is none, runs the stage of the cell and stores the result.

    Raises Preempted if the process is asked to stop before the cell is finished.
    """
    if (found := work.find(cell)) is not None:
        return found
    if cell.after is not None and work.find(cell.after) is None:
        raise DataError(f"{cell.label} builds on {cell.after.label}, which is not finished")
    if cell.stage not in STAGES:
        raise UsageError(
            f"there is no stage {cell.stage!r}",
            allowed=f"allowed: {', '.join(STAGES)}",
            fix=did_you_mean(cell.stage, STAGES),
        )
    stage: Callable[[Work, Cell, Machine], Outcome] = pkgutil.resolve_name(STAGES[cell.stage])
    return work.save(cell, *stage(work, cell, machine or Machine()))


# ---- how a ranking is judged ----


class Judge:
    """Ranks the held-out items of sequences under the protocol of a cell."""

    def __init__(self, sequences: Sequences, protocol: Mapping[str, Any]) -> None:
        self.sequences = sequences
        self.filter_seen = bool(protocol["filter_seen"])
        self.filtered = _with_newest(sequences, int(protocol.get("filter_newest", 0)))
        self.chunk_users = int(protocol.get("chunk_users", 256))
        self.judged = chosen_events(sequences, int(protocol.get("max_users", 0)))
        self.users = self.judged.users
        self.seconds = 0.0

    def rank(self, score: ScoreEvents, *, skip_newest: int = 0) -> NDArray[np.int64]:
        """Returns the 0-based rank of each user's held-out item in the whole catalogue [U].

        Other items with an equal score rank before the held-out item.
        """
        started = time.perf_counter()
        ranks = target_ranks(
            score,
            self.filtered,
            self.judged,
            filter_seen=self.filter_seen,
            chunk_users=self.chunk_users,
            skip_newest=skip_newest,
        )
        self.seconds += time.perf_counter() - started
        return ranks

    def rank_model(self, model: Any, config: RunConfig, *, skip_newest: int = 0) -> NDArray[np.int64]:
        """Returns the ranks that a model gives if it reads histories without their `skip_newest` newest events [U]."""
        started = time.perf_counter()
        score = rank_model(
            model, self.sequences, config.model.tables, config.model.max_history, skip_newest=skip_newest
        )
        self.seconds += time.perf_counter() - started
        return self.rank(score, skip_newest=skip_newest)

    def facts(self) -> dict[str, Any]:
        """Returns counts of users, items and events, and a hash of the held-out events, for the result."""
        begins, targets = self.sequences.offsets[self.users], self.sequences.targets[self.users]
        # The hash covers the user, the index of the event within the user's events, and the item.
        parts = (self.sequences.user_ids[self.users], targets - begins, self.sequences.item_ids[targets])
        identities = np.stack([part.astype(np.int64) for part in parts])
        return {
            "num_ranked_users": len(self.users),
            "num_items": len(self.sequences.catalogue),
            "num_events": len(self.sequences.item_ids),
            "targets_sha256": hashlib.sha256(identities.tobytes()).hexdigest()[:16],
        }

    def returns(self) -> NDArray[np.bool_]:
        """Returns whether each user's held-out item is already in the history [U]."""
        rows = []
        for user in self.users:
            begin, end = self.sequences.offsets[user], self.sequences.train_ends[user]
            target = self.sequences.item_ids[self.sequences.targets[user]]
            rows.append(bool((self.sequences.item_ids[begin:end] == target).any()))
        return np.array(rows, dtype=np.bool_)

    def gaps(self) -> NDArray[np.int64]:
        """Returns for each user the whole seconds between the held-out event and the event before it; -1 if there is no
        event before it.

        The gap is 0 if both events carry the same second. A tie rule adds milliseconds to times (data.py), so only
        whole seconds are compared.
        """
        seconds = self.sequences.events.times // 1000
        targets = self.sequences.targets[self.users]
        has_before = targets > self.sequences.offsets[self.users]
        return np.where(has_before, seconds[targets] - seconds[np.maximum(targets - 1, 0)], -1)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Returns what is kept about each ranked user beside the ranks [U]: position, `gaps` and `returns`."""
        return {"users": self.users.astype(np.int32), "gaps": self.gaps(), "returns": self.returns()}


def _with_newest(sequences: Sequences, count: int) -> Sequences:
    """Returns `sequences` with histories cut to their newest `count` events; 0 keeps all events.

    Only the filter of seen items reads the cut histories.
    """
    if not count:
        return sequences
    starts = np.maximum(sequences.offsets[:-1], sequences.train_ends - count)
    return dataclasses.replace(sequences, offsets=np.append(starts, sequences.offsets[-1]))


def chosen_events(sequences: Sequences, max_users: int) -> JudgedEvents:
    """Returns the held-out events of all users, or of `max_users` users. The draw depends on the user ids alone."""
    judged = held_out_events(sequences)
    if not max_users or len(judged) <= max_users:
        return judged
    draw = keyed_random.bits(0, USER_STREAM, sequences.user_ids[judged.users])
    return judged.take(np.sort(np.argsort(draw, kind="stable")[:max_users]))


def metrics_of(ranks: NDArray[np.int64]) -> dict[str, float]:
    """Returns HR and NDCG at the cutoffs."""
    metrics = RankingMetrics(CUTOFFS)
    metrics.update(ranks)
    return {name: round(value, 6) for name, value in metrics.result().items()}


BASELINES: dict[str, Callable[[Sequences], Any]] = {
    "popularity": lambda sequences: Popularity(TrainingEvents.of(sequences)),
    "item-to-item": lambda sequences: ItemToItem(sequences, TrainingEvents.of(sequences)),
    "recently-seen": RecentlySeen,
}


# ---- the stages ----


def run_baseline(work: Work, cell: Cell, machine: Machine) -> Outcome:
    """Scores items with a baseline, which fits nothing, and ranks the test event."""
    del machine
    started = time.perf_counter()
    sequences = open_sequences(work.dataset(cell), held_out=1).read()
    judge = Judge(sequences, cell.protocol)
    ranks = judge.rank(BASELINES[cell.method](sequences).score)
    values = {
        "metrics": metrics_of(ranks),
        **judge.facts(),
        "seconds": round(time.perf_counter() - started - judge.seconds, 1),
        "evaluation_seconds": round(judge.seconds, 1),
        "peak_rss_bytes": peak_rss_bytes(),
    }
    return values, {"ranks": ranks} | judge.arrays()


def run_validation(work: Work, cell: Cell, machine: Machine) -> Outcome:
    """Fits with two events held out and chooses the number of steps."""
    config = cell.run_config()
    fit = Fit(work, cell, dataclasses.replace(config, data=dataclasses.replace(config.data, held_out=2)), machine)
    fit.train(judge_always=True)
    best, values = fit.best_step(), fit.values()
    ranks = fit.ranks_at(best)
    chosen = {"metrics": metrics_of(ranks), "chosen_steps": best, "curve": fit.curve()}
    # The model of the last step also ranks the held-out item from histories that end some events earlier.
    with fit.trainer.uncompiled():
        ahead = {
            f"ranks_{number}_ahead": fit.judge.rank_model(fit.trainer.model, fit.config, skip_newest=number - 1)
            for number in cell.protocol.get("ahead", ())
        }
    return values | chosen | {name: metrics_of(found) for name, found in ahead.items()}, {
        "ranks": ranks,
        **ahead,
        **fit.judge.arrays(),
    }


def run_test(work: Work, cell: Cell, machine: Machine) -> Outcome:
    """Fits with one event held out, for the chosen number of steps, and ranks the held-out event once."""
    before = work.find(cell.after) if cell.after is not None else None
    if before is None:
        raise DataError(f"{cell.label} needs a number of steps, but its validation is not finished")
    config = cell.run_config()
    planned = config.optimizer.schedule_steps or config.training.steps
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, held_out=1),
        training=dataclasses.replace(config.training, steps=int(before.values["chosen_steps"])),
        optimizer=dataclasses.replace(config.optimizer, schedule_steps=planned),
    )
    fit = Fit(work, cell, config, machine)
    fit.train(judge_always=False)
    ranks = fit.ranks_at(fit.last_step())
    return fit.values() | {"metrics": metrics_of(ranks)}, {"ranks": ranks} | fit.judge.arrays()


def run_published(work: Work, cell: Cell, machine: Machine) -> Outcome:
    """Fits with one event held out and ranks this event at every checkpoint, as the publications did."""
    config = cell.run_config()
    fit = Fit(work, cell, dataclasses.replace(config, data=dataclasses.replace(config.data, held_out=1)), machine)
    fit.train(judge_always=True)
    best, last = fit.best_step(), fit.last_step()
    ranks = fit.ranks_at(last)
    values = {
        "metrics": metrics_of(ranks),
        "best_metrics": metrics_of(fit.ranks_at(best)),
        "best_step": best,
        "curve": fit.curve(),
    }
    return fit.values() | values, {"ranks": ranks, "ranks_best": fit.ranks_at(best)} | fit.judge.arrays()


_HERE = "tackboard.bench.quality.cell"
STAGES = {
    "baseline": f"{_HERE}:run_baseline",
    "validate": f"{_HERE}:run_validation",
    "test": f"{_HERE}:run_test",
    "published": f"{_HERE}:run_published",
    "tune": "tackboard.bench.quality.tuning:run_try",
    "pretrain": "tackboard.bench.transfer.fit:run_pretraining",
    "transfer": "tackboard.bench.transfer.fit:run_transfer",
    "transfer-baselines": "tackboard.bench.transfer.count_baselines:run_baselines",
    "ablation-positives": "tackboard.bench.quality.ablations:run_positives",
    "finetune": "tackboard.bench.finetune.ranker_cells:run_ranker",
    "finetune-trees": "tackboard.bench.finetune.ranker_cells:run_trees",
}
"""Stage → module:function that takes (work, cell, machine). A study that needs a new stage adds it here."""


class Fit:
    """A training run that is judged at its checkpoints. The ranks of each judged step are kept in the run directory."""

    def __init__(self, work: Work, cell: Cell, config: RunConfig, machine: Machine) -> None:
        """Opens or creates the run of the cell, without training."""
        training = dataclasses.replace(config.training, device=machine.device, num_threads=machine.num_threads)
        data = dataclasses.replace(config.data, dataset=str(self.trained_on(work, cell)))
        self.config = dataclasses.replace(config, training=training, data=data)
        self.machine = machine
        self.source = self.open_source(work, cell)
        path = work.run(cell)
        if (path / "config.json").is_file():
            self.run = RunDirectory.open(path)
        else:
            self.run = RunDirectory(path)
            self.run.write(config_to_json(self.config))
        self.judge = Judge(self.judged(work, cell), cell.protocol)
        self.trainer = Trainer(self.config, self.run, self.source, quiet=True, on_checkpoint=self._at_checkpoint)
        self._every = True
        spent = self.run.path / "spent.json"
        self._spent = dict(read_json(spent)) if spent.exists() else {"train_seconds": 0.0, "evaluation_seconds": 0.0}
        self._started = time.perf_counter()

    def trained_on(self, work: Work, cell: Cell) -> Path:
        return work.dataset(cell)

    def open_source(self, work: Work, cell: Cell) -> SequenceSource:
        data = self.config.data
        return open_sequences(
            self.trained_on(work, cell),
            data.positive_actions,
            held_out=data.held_out,
            features=features_for(self.config),
        )

    def judged(self, work: Work, cell: Cell) -> Sequences:
        """Returns the sequences with the held-out events to rank."""
        del work, cell
        return self.source.read()

    def train(self, *, judge_always: bool) -> None:
        """Trains to the end. Ranks at every checkpoint if `judge_always`, otherwise only at the last checkpoint."""
        self._every = judge_always
        self._started = time.perf_counter()
        if self.trainer.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.trainer.device)
        self._rank_saved_checkpoint()
        try:
            self.trainer.train(quiet=True)
        finally:
            self._write_spent()
        for path in CheckpointStore(self.run.checkpoints).complete()[:-1]:
            remove_directory(path)

    def curve(self) -> list[dict[str, Any]]:
        """Returns the metrics at every ranked step."""
        return [{"step": step} | metrics_of(self.ranks_at(step)) for step in self._ranked()]

    def best_step(self) -> int:
        """Returns the step with the best NDCG@10, or the earliest of several steps with equal NDCG@10."""
        return int(max(self.curve(), key=lambda point: (point[CHOOSE_BY], -point["step"]))["step"])

    def last_step(self) -> int:
        return self._ranked()[-1]

    def ranks_at(self, step: int) -> NDArray[np.int64]:
        return np.asarray(np.load(self._path(step), allow_pickle=False), dtype=np.int64)

    def values(self) -> dict[str, Any]:
        """Returns the cost and the size of the run, for the result."""
        seconds = max(1e-9, self._spent["train_seconds"])
        device = self.trainer.device
        on_gpu = device.type == "cuda"
        return {
            **self.judge.facts(),
            "steps": self.trainer.step,
            "tokens": self.trainer.num_tokens,
            "parameters": sum(parameter.numel() for parameter in self.trainer.model.parameters()),
            "seconds": round(seconds, 1),
            "evaluation_seconds": round(self._spent["evaluation_seconds"], 1),
            "tokens_per_s": round(self.trainer.num_tokens / seconds),
            "final_loss": self.trainer.last_loss,
            "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
            "peak_device_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
            "peak_rss_bytes": peak_rss_bytes(),
        }

    def _at_checkpoint(self, trainer: Trainer) -> None:
        if self._is_due(trainer.step):
            self._judge(trainer.model, trainer.step)
        self._write_spent()

    def _is_due(self, step: int) -> bool:
        """Returns whether a step must be ranked and has no ranks yet.

        A checkpoint that was saved because the run was stopped usually lies between the steps that must be ranked.
        """
        every, total = self.config.training.checkpoint_every, self.config.training.steps
        is_point = step == total or (self._every and step % every == 0)
        return step > 0 and is_point and not self._path(step).exists()

    def _judge(self, model: Any, step: int) -> None:
        ranks = self.judge.rank_model(model, self.config)
        self._path(step).parent.mkdir(exist_ok=True)
        save_array(self._path(step), ranks.astype(np.int32))
        metrics = metrics_of(ranks)
        say(f"step {step:,}: HR@10 {metrics['hr@10']:.4f}, NDCG@10 {metrics['ndcg@10']:.4f}")

    def _rank_saved_checkpoint(self) -> None:
        """Ranks the checkpoint that the run continues from, if the checkpoint must be ranked and has no ranks yet."""
        found = CheckpointStore(self.run.checkpoints).find_latest()
        if found is None:
            return
        checkpoint = load_trained(found)
        step = int(checkpoint.state["step"])
        if self._is_due(step):
            model = build_model(self.config.model, self.source.vocabulary)
            load_parameters(model, stored_parameters(checkpoint), checkpoint.path)
            self._judge(model.to(choose_device(self.machine.device)), step)

    def _ranked(self) -> list[int]:
        files = (self.run.path / "ranks").glob("step-*.npy")
        return sorted(int(match[1]) for file in files if (match := re.fullmatch(r"step-(\d+)\.npy", file.name)))

    def _path(self, step: int) -> Path:
        return self.run.path / "ranks" / f"step-{step:08d}.npy"

    def _write_spent(self) -> None:
        """Adds the time since the last call to spent.json. A kill loses the time since the last call, but no ranks."""
        now = time.perf_counter()
        self._spent["evaluation_seconds"] += self.judge.seconds
        self._spent["train_seconds"] += now - self._started - self.judge.seconds
        self.judge.seconds, self._started = 0.0, now
        write_json_atomic(self.run.path / "spent.json", self._spent)


# ---- the process ----


def step_of(work: Work, cell: Cell, device: str) -> Step:
    """Returns a cell as a step of the job runner."""

    def figures() -> list[str]:
        metrics = found.values.get("metrics", {}) if (found := work.find(cell)) is not None else {}
        return [f"{name} {metrics[name]:.4f}" for name in ("hr@10", "ndcg@10") if name in metrics]

    return Step(
        name=cell.name,
        label=cell.label,
        log=work.log(cell),
        command=lambda threads: [sys.executable, "-m", _HERE, *map(str, (work.root, work.spec(cell), device, threads))],
        run=lambda: run_cell(work, cell, Machine(device=device, num_threads=torch.get_num_threads())),
        is_finished=lambda: work.find(cell) is not None,
        figures=figures,
        after=step_of(work, cell.after, device) if cell.after is not None else None,
    )


def main(arguments: list[str]) -> int:
    """Runs the cell that a file describes and returns the exit code. `arguments` are WORK, SPEC, DEVICE and THREADS."""
    folder, spec, device, num_threads = arguments
    work, cell = Work(Path(folder)), Cell.from_description(read_json(Path(spec)))
    machine = Machine(device=device, num_threads=int(num_threads))
    return run_step(lambda: run_cell(work, cell, machine).path, lock=work.log(cell).with_suffix(".lock"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
