"""The training loop: it takes a config, a run directory and a source of data, and writes checkpoints and metrics.

The trainer knows numbered steps, `model.loss(batch)` and the number of tokens of a batch; only the data config and the
model know what a batch contains. A step reads the batch of a numbered data step and computes the loss. If the loss is
not finite, the step ends there. Otherwise backward runs and moves the tables. If the dense gradient is bad, then the
run rolls back; otherwise the dense parameters move. The state of a run is (step, next data step, parameters, buffers,
optimiser state, guard state, judgements) and nothing else: the order of the data and dropout are functions of the seed
and the step. So a killed and resumed run ends in the same bits. A judgement (the loss on held-out users) is made before
the checkpoint of its step. The checkpoint stores the judgement, so no judgement is lost or made twice.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

import torch

from tackboard.batch import HashConfig, item_rows
from tackboard.batch.batches import Batch
from tackboard.checkpoint.store import Checkpoint, CheckpointStore
from tackboard.checkpoint.trained import load_trained
from tackboard.core.documents import blaming
from tackboard.core.errors import DivergedError, Preempted, TackboardError, UsageError
from tackboard.core.files import storage_error
from tackboard.core.hashing import mix64
from tackboard.core.locks import silence_to_wait_for, wait_for_lock
from tackboard.core.machine import has_nvidia_driver, keep_freed_memory, usable_cores
from tackboard.core.progress import Progress, say
from tackboard.core.rundir import RunDirectory
from tackboard.data.cluster import ClusterSteps
from tackboard.data.prefetch import on_device
from tackboard.data.source import SequenceSource
from tackboard.data.steps import NumberedSteps
from tackboard.features.feature_set import FILE_NAME, read_features
from tackboard.models.description import describe_model
from tackboard.models.interface import build_model, compile_parts
from tackboard.models.stored_parameters import check_tensors, find_non_finite
from tackboard.models.tables import table_parameter_names
from tackboard.train.config import RunConfig, config_to_json
from tackboard.train.guard import Guard
from tackboard.train.optimizers import Optimizers
from tackboard.train.start import take_parameters
from tackboard.train.validation import Validation, mean_loss

ORDER_VERSION = 2
"""Version of the order of data. Version 1 had no windows, so 1 and 2 differ only for datasets of several windows."""


class _StopNow(BaseException):
    """A stop signal came while there was nothing to save. It is a BaseException, so compilation does not catch it."""


class Trainer:
    """Trains one run of one config on one device."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        source: SequenceSource,
        *,
        steps: NumberedSteps[Any] | None = None,
        checkpoint: Checkpoint | None = None,
        quiet: bool = True,
        on_checkpoint: Callable[[Trainer], None] | None = None,
    ) -> None:
        """`source` is the opened data of the config. `steps` holds its numbered steps, or None if there are none yet.

        `checkpoint` is the run's newest checkpoint if the caller has verified it, else None. `on_checkpoint` is called
        after each checkpoint, for example to evaluate the model.
        """
        self.config = config
        self.run = run
        self.source = source
        self.device = choose_device(config.training.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        precision = config.training.precision
        self.is_half = precision == "bf16" or (precision == "auto" and self.device.type == "cuda")
        self.num_threads = config.training.num_threads or usable_cores()
        torch.set_num_threads(self.num_threads)
        torch.use_deterministic_algorithms(self.device.type == "cpu")
        torch.manual_seed(config.seed)
        self.model: Any = build_model(config.model, source.vocabulary).to(self.device)
        self.is_compiled = shall_compile(config.training.compile, self.device)
        if self.is_compiled:
            compile_parts(self.model)
        self.tables = table_parameter_names(self.model)
        self.has_state_beyond_parameters = len(self.model.state_dict()) > sum(1 for _ in self.model.named_parameters())
        """Whether the model has state other than its parameters, for example streaming frequencies."""
        self.optimizers = Optimizers(self.model, config.optimizer, config.training.steps, seed=config.seed)
        self.on_checkpoint = on_checkpoint
        self.guard = Guard(config.guard)
        tables = config.model.tables
        self.steps: NumberedSteps[Any] = steps or config.data.steps(source, tables, config.seed, quiet=quiet)
        self.batches: NumberedSteps[Any] | ClusterSteps = self.steps
        if config.data.ray_address:
            self.batches = ClusterSteps(self.steps, config.data.ray_address)  # type: ignore[arg-type]
        self.validation = Validation(config.training.patience)
        self.judges: NumberedSteps[Any] | None = None
        if config.training.validate_every:
            self.judges = config.data.steps(source, tables, config.seed, part="validation", quiet=quiet)
        self.store = CheckpointStore(run.checkpoints)
        self._verified = checkpoint
        for warning in [*config.warnings(), *_shared_rows(tables, source)]:
            say(f"warning: {warning}")
        self.step = 0
        self.data_step = 0
        self.num_tokens = 0
        self.is_compiling = False
        """Whether the first step of a compiled model is running. Compiling makes this step slow."""
        self.last_loss = float("nan")
        self.tokens_per_s = 0.0
        """Tokens per second of this process. The time includes loading, checkpoints and steps that were rolled back."""

    def train(self, *, quiet: bool = False) -> None:
        """Trains to the last step. Raises DivergedError, Preempted (with the state saved), or any other error."""
        with _only_process(self.run), _stop_signals(lambda: self.is_compiling) as stop:
            self.run.clean()
            self.store.clean()
            self._resume_or_start()
            # `latest` moves only now, because a run that starts from `runs/latest` must first read that run.
            self.run.make_latest()
            self.run.set_status("running")
            try:
                self._train_until_done(stop, quiet=quiet)
            except BaseException as caught:
                error = self._preempted(stop[0]) if isinstance(caught, _StopNow) else caught
                reason = error.got if isinstance(error, TackboardError) else f"{type(error).__name__}: {error}"
                with suppress(OSError):  # An error of a full disk must not hide the first error.
                    self.run.set_status("preempted" if isinstance(error, Preempted) else f"failed: {reason}")
                    self.run.log_event("stopped", step=self.step, reason=reason)
                if error is not caught:
                    raise error from None
                raise
            self.run.set_status("done")
            self.run.log_event("done", step=self.step, loss=self.last_loss)

    def _train_until_done(self, stop: list[int], *, quiet: bool) -> None:
        total = self.config.training.steps
        every = self.config.training.checkpoint_every
        started, tokens_before = time.perf_counter(), self.num_tokens
        self.is_compiling = self.is_compiled
        if stop and self.is_compiling:
            raise _StopNow
        with Progress(f"training {self.config.name}", total=total, unit="steps", quiet=quiet) as progress:
            progress.advance(self.step)
            while self.step < total and not self.validation.is_over:
                for data_step, batch in on_device(
                    self.batches.iterate(self._upcoming(), self.config.data.num_workers), self.device
                ):
                    if not self._one_step(data_step, batch):
                        break  # Data was skipped or the state went back, so the upcoming steps have changed.
                    progress.advance(1, note=f"loss {self.last_loss:.3f}")
                    is_judged = self._validate()
                    if is_judged or self.step % every == 0 or self.step == total:
                        self.save()
                        if self.on_checkpoint is not None:
                            with self.uncompiled():
                                self.on_checkpoint(self)
                    if stop:
                        self.save()
                        raise self._preempted(stop[0])
                    if self.validation.is_over:
                        self.run.log_event("stopped_early", step=self.step, best_step=self.validation.best_step)
                        break
                progress.advance(self.step - progress.done)
        self.tokens_per_s = (self.num_tokens - tokens_before) / (time.perf_counter() - started)

    def _validate(self) -> bool:
        """Computes the validation loss if it is due; returns whether it was due."""
        every = self.config.training.validate_every
        if self.judges is None or self.step % every:
            return False
        with self.uncompiled(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_half):
            loss = mean_loss(self.model, self.judges, self.device, self.config.training.validation_steps)
        is_better = self.validation.note(self.step, loss)
        self.run.log_event("validated", step=self.step, loss=loss, best_step=self.validation.best_step)
        say(f"step {self.step:,}: validation loss {loss:.4f}{', the best so far' if is_better else ''}")
        return True

    def _preempted(self, number: int) -> Preempted:
        return Preempted(
            f"stopped by signal {number} at step {self.step}; the state is saved in {self.run.path}",
            fix=f"continue with: --resume {self.run.path}",
        )

    def uncompiled(self) -> AbstractContextManager[Any]:
        """Returns a context without compilation: compiling the training model again for another use does not pay."""
        stance: AbstractContextManager[Any] = nullcontext()
        if self.is_compiled:
            stance = torch.compiler.set_stance("force_eager")
        return stance

    def _upcoming(self) -> list[int]:
        """Returns the next data steps, one for each remaining step."""
        skipped = set(self.guard.skipped)
        numbers: list[int] = []
        number = self.data_step
        while len(numbers) < self.config.training.steps - self.step:
            if number not in skipped:
                numbers.append(number)
            number += 1
        return numbers

    def _one_step(self, data_step: int, batch: Batch) -> bool:
        """Does one step. Returns False if the step did not count and the caller must call `_upcoming` again."""
        started = time.perf_counter()
        # Dropout is a function of (seed, step), so a resumed run draws the same numbers as the killed run.
        seed = int(mix64(self.config.seed * 1_000_003 + self.step, 17)[0] >> 1)
        # torch.manual_seed would store a traceback of every call on a machine without a GPU, in case a GPU appears.
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        self.model.train()
        for module in self.optimizers.frozen:
            module.eval()
        share = self.optimizers.prepare(self.step)
        if not batch.has_targets():
            self.data_step = data_step + 1  # This batch has no targets: continue after it.
            return False
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_half):
            output = self.model.loss(batch)
        loss = output.loss
        value = float(loss.detach())
        if reason := self.guard.judge_loss(value):
            self._skip(data_step, reason)
            if self.has_state_beyond_parameters:
                self._roll_back()  # The model may have counted this batch already.
            return False
        loss.backward()
        norm = self.optimizers.clip()
        if reason := self.guard.judge_norm(norm):
            self._skip(data_step, reason)
            self._roll_back()
            return False
        self.optimizers.step()
        self.is_compiling = False
        self.step += 1
        self.data_step = data_step + 1
        self.num_tokens += batch.num_tokens
        self.last_loss = value
        if self.step % self.config.training.log_every == 0 or self.step == self.config.training.steps:
            seconds = time.perf_counter() - started
            figures = {"loss": value, "grad_norm": norm, "lr_share": share, "tokens": self.num_tokens} | output.metrics
            self.run.log_metrics(self.step, **figures, tokens_per_s=round(batch.num_tokens / seconds, 1))
        return True

    def _skip(self, data_step: int, reason: str) -> None:
        self.run.log_event("bad_step", step=self.step, data_step=data_step, reason=reason)
        say(f"warning: {reason} at step {self.step}: skipping data step {data_step}")
        self.guard.skip(data_step, reason)

    def _roll_back(self) -> None:
        checkpoint = self.store.find_latest()
        if checkpoint is None:
            raise DivergedError(f"there is no checkpoint to go back to in {self.run.checkpoints}")
        self._load(checkpoint)
        self.run.cut_metrics_after(self.step)
        self.run.log_event("rolled_back", step=self.step)

    def _resume_or_start(self) -> None:
        checkpoint = self.store.find_latest(self._verified)
        self._verified = None  # Mapped files take disk space as long as an object refers to them.
        if checkpoint is None:
            self.run.cut_metrics_after(self.step)  # Old metrics exist if every checkpoint was damaged.
            num_taken = take_parameters(self.model, self.config.start)
            self.run.log_event(
                "start",
                parameters=sum(p.numel() for p in self.model.parameters()),
                parameters_taken=num_taken,
                features=self.source.features.hash,
                trimming=dict(self.source.trimming),
            )
            self.save()
        else:
            before = self._load(checkpoint).get("num_threads", self.num_threads)
            if before != self.num_threads:
                # Sums over another number of threads are rounded differently; everything else stays the same.
                say(f"warning: the run had {before} threads and has {self.num_threads} now: results differ in rounding")
            # After a kill between the two renames of a save, or with a damaged checkpoint, `latest` points elsewhere.
            self.store.point_latest(checkpoint.path)
            self.store.point_best(self.validation.best_step)
            self.run.cut_metrics_after(self.step)
            self.run.log_event("resume", step=self.step)

    def save(self) -> None:
        """Writes a checkpoint of the present state. Raises DivergedError if a parameter is not finite."""
        if name := find_non_finite(self.model):
            # A non-finite row spreads slowly and shows late. So a table with such a row is never saved.
            raise DivergedError(
                f"{name} holds non-finite values at step {self.step}",
                allowed="the last checkpoint is intact",
                fix="start a new run with lower learning rates",
            )
        parameters = {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}
        groups = {
            "dense": {name: tensor for name, tensor in parameters.items() if name not in self.tables},
            "tables": {name: tensor for name, tensor in parameters.items() if name in self.tables},
            "optimizer": {name: tensor.cpu() for name, tensor in self.optimizers.state().items()},
        }
        try:
            best = self.validation.best_step
            self.store.save(self.step, groups, self._state(), {FILE_NAME: self.source.features.to_json()}, best=best)
        except OSError as error:
            got = f"the checkpoint of step {self.step} could not be written"
            fix = f"free some space or repair the disk, then continue with: --resume {self.run.path}"
            known = storage_error(error, got, allowed="the checkpoints before it are intact", fix=fix)
            raise (known or error) from None
        self.run.log_event("checkpoint", step=self.step)

    def _state(self) -> dict[str, Any]:
        vocabulary = self.source.vocabulary
        return {
            "format_version": 1,
            "step": self.step,
            "data_step": self.data_step,
            "order_version": ORDER_VERSION,
            "num_tokens": self.num_tokens,
            "num_threads": self.num_threads,
            "last_loss": self.last_loss if self.step else None,
            "guard": self.guard.state(),
            **({"validation": self.validation.state()} if self.judges is not None else {}),
            "config": config_to_json(self.config),
            "model": describe_model(self.config.model),
            "vocabulary": {"actions": list(vocabulary.actions), "surfaces": list(vocabulary.surfaces)},
            "id_type": self.source.dataset.item_type,
            "user_type": self.source.dataset.user_type,
            "lineage": self.source.lineage(),
        }

    def _load(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Loads a checkpoint into this trainer; returns the checkpoint's state."""
        load_trained(checkpoint, ("dense", "tables", "optimizer"))
        path = checkpoint.path
        now = self.source.lineage()
        for name in ("snapshot", "judged_snapshot"):
            # Another snapshot has another order of data, and perhaps another vocabulary.
            if (recorded := checkpoint.state["lineage"].get(name)) != now.get(name):
                raise UsageError(
                    f"{self.run.path} was started on snapshot {recorded}, not on {now.get(name)}",
                    allowed="a run continues with the data that it was started on",
                    fix="start a new run with --resume never",
                )
        if checkpoint.state.get("order_version", 1) < ORDER_VERSION and self.steps.plan.num_windows > 1:
            raise UsageError(
                f"{self.run.path} was started by an older tackboard, which read large datasets in another order",
                allowed="its checkpoints can be evaluated and exported",
                fix="start a new run with --resume never",
            )
        features = read_features(path)
        if features is not None and features.hash != self.source.features.hash:
            raise UsageError(
                f"{self.run.path} was started with other features ({features.hash[:12]})",
                allowed=f"the model would now read {self.source.features.hash[:12]}",
                fix="restore the file of features, or start a new run with --resume never",
            )
        parameters = checkpoint.tensors["dense"] | checkpoint.tensors["tables"]
        check_tensors(self.model, parameters, path)
        self.model.load_state_dict(parameters)
        with blaming(path / "optimizer.safetensors"):
            self.optimizers.load_state(checkpoint.tensors["optimizer"])
        self.guard.load_state(checkpoint.state["guard"])
        self.validation.load_state(checkpoint.state.get("validation", {}))
        self.step = int(checkpoint.state["step"])
        self.data_step = int(checkpoint.state["data_step"])
        self.num_tokens = int(checkpoint.state["num_tokens"])
        self.last_loss = checkpoint.state["last_loss"] if self.step else float("nan")
        return checkpoint.state


def choose_device(name: str) -> torch.device:
    """Returns the device that a config's `device` names. Raises UsageError if it names a missing GPU."""
    if name == "auto":
        is_there = torch.cuda.is_available()
        if not is_there and has_nvidia_driver():
            say("warning: an NVIDIA driver is loaded, but torch sees no GPU, so the CPU is used: run tackboard doctor")
        return torch.device("cuda" if is_there else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"training.device = {name}, but torch sees no GPU", fix="--set training.device=cpu")
    return torch.device(name)


def shall_compile(wanted: str, device: torch.device) -> bool:
    """Returns whether to compile on this device. Raises UsageError if `training.compile` is on without a compiler."""
    if wanted == "off" or (wanted == "auto" and device.type != "cuda"):
        return False
    names = (os.environ.get("CXX", "g++"), os.environ.get("CC", "gcc"))
    missing = [name for name in names if shutil.which(name) is None]
    if missing and wanted == "on":
        raise UsageError(
            f"training.compile is on, but there is no {' and no '.join(missing)}",
            allowed="torch compiles with a C++ compiler",
            fix="install one (apt-get install g++), or --set training.compile=off",
        )
    if missing:
        say(f"warning: training.compile = auto does not compile: there is no {' and no '.join(missing)}")
    return not missing


def _shared_rows(hashing: HashConfig, source: SequenceSource) -> list[str]:
    """Returns a warning if items of a plain table share rows."""
    if hashing.method != "modulo":
        return []
    num_rows = len(torch.unique(item_rows(source.catalogue, hashing)))
    if num_rows == len(source.catalogue):
        return []
    return [
        f"{len(source.catalogue):,} items share {num_rows:,} rows: raise model.tables.num_rows above the largest id"
    ]


@contextmanager
def _only_process(run: RunDirectory) -> Iterator[None]:
    """Holds the run's lock, because a second process on the same run would damage its files.

    A trainer that died on another host looks alive until its lease ends, so this function waits until then.
    """
    path = run.path / "lock"
    patience_s = silence_to_wait_for(path)
    if patience_s:
        say(f"another host held {path} a moment ago: waiting {patience_s:.0f} s for a sign of life")
    with wait_for_lock(path, patience_s) as held:
        if not held:
            raise UsageError(f"{run.path} is being trained by another process", fix="wait for it, or stop it")
        yield


@contextmanager
def _stop_signals(has_nothing_to_save: Callable[[], bool]) -> Iterator[list[int]]:
    """Yields a list that receives the signal number when the run is asked to stop (SIGTERM, SIGINT)."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if received:  # Asked a second time: the user means it.
            raise KeyboardInterrupt
        received.append(number)
        if has_nothing_to_save():
            raise _StopNow

    previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
