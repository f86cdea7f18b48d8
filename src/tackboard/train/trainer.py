"""The training loop: it takes a config, a run directory and a source of data, and writes checkpoints and metrics.

The trainer gives each batch to `model.loss` without knowing what the batch contains; only the data config and the model
know this. A step reads the batch of a numbered data step and computes the loss and the gradients. The guard checks both
on the device. The optimisers then move all parameters, or none if the step is bad (guard.py). On a GPU the host does
not wait for the verdict: it reads the verdicts of several steps together when a step is logged, judged or saved. A
checkpoint stores the step, the next data step, parameters, buffers, states of optimisers and guard, and judgements.
Nothing else is needed, because the seed and the data step determine the order of the data and dropout. So a killed and
resumed run ends with the same bits. A judgement (the loss on held-out users) is made before the checkpoint of its step.
The checkpoint stores the judgement, so no judgement is lost or made twice.
"""

from __future__ import annotations

import functools
import math
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

import torch

from tackboard.batch import HashConfig, RequestBatch, item_rows
from tackboard.batch.batches import Batch
from tackboard.checkpoint.store import Checkpoint, CheckpointStore
from tackboard.checkpoint.trained import FORMAT_VERSION, load_trained
from tackboard.core.errors import DivergedError, Preempted, TackboardError, UsageError
from tackboard.core.hashing import mix64
from tackboard.core.locks import silence_to_wait_for, wait_for_lock
from tackboard.core.machine import keep_freed_memory, usable_cores
from tackboard.core.progress import Progress, say
from tackboard.core.rundir import RunDirectory
from tackboard.data.cluster import ClusterSteps
from tackboard.data.prefetch import on_device
from tackboard.data.source import SequenceSource
from tackboard.data.steps import NumberedSteps
from tackboard.features.feature_set import FILE_NAME, read_features
from tackboard.models.description import describe_model
from tackboard.models.interface import build_model, compile_parts
from tackboard.models.tables import rows_on
from tackboard.parallel.exchange import share_items
from tackboard.parallel.gradients import GradientSum, mean_figures, part_of_mean
from tackboard.parallel.roll_call import broken_by
from tackboard.parallel.sharded_tables import ShardedTables, shard_tables
from tackboard.parallel.training_world import ALONE, TrainingWorld
from tackboard.train.compilation import CompilationWatch
from tackboard.train.config import RunConfig, config_to_json
from tackboard.train.devices import choose_device, shall_compile, shall_pad, shall_replay
from tackboard.train.guard import Guard
from tackboard.train.optimizers import Optimizers
from tackboard.train.resume import newest_checkpoint
from tackboard.train.saving import Saver
from tackboard.train.start import take_parameters
from tackboard.train.step_graphs import StepReplay
from tackboard.train.validation import Validation, mean_loss

ORDER_VERSION = 2
"""Version of the order of data. Version 1 had no windows, so 1 and 2 differ only for datasets of several windows."""
WARM_UP_STEPS = 10
"""Number of steps, from the start of a process, in which parts of the model may be compiled without a message."""


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
        world: TrainingWorld = ALONE,
        quiet: bool = True,
        on_checkpoint: Callable[[Trainer], None] | None = None,
    ) -> None:
        """`source` is the opened data of the config. `steps` holds its numbered steps, or None if there are none yet.

        `checkpoint` is the run's newest checkpoint if the caller has verified it, else None. `world` holds the
        processes that train together; each makes its own Trainer. `on_checkpoint` is called after each checkpoint, for
        example to evaluate the model.
        """
        self.config = config
        self.run = run
        self.source = source
        self.world = world
        self.device = choose_device(config.training.device) if world.is_alone else world.device
        self.sharded = self._make_model()
        """The tables that several processes share, by module name."""
        self.has_state_beyond_parameters = len(self.model.state_dict()) > sum(
            1 for _ in self.model.named_parameters(remove_duplicate=False)
        )
        """Whether the model has state other than its parameters, for example streaming frequencies."""
        self.optimizers = Optimizers(
            self.model, config.optimizer, config.training.steps, seed=config.seed, sharded=self.sharded
        )
        self.gradients = None if world.is_alone else GradientSum(list(self.optimizers.dense.values()), world)
        is_replayed = shall_replay(config.training.cuda_graphs, self.model, self.device, pads=self.pads)
        self.replay = StepReplay(self._compute, self.optimizers.recording) if is_replayed else None
        self.on_checkpoint = on_checkpoint
        self.guard = Guard(config.guard, self.device)
        self._open_steps(steps, quiet=quiet)
        self.store = CheckpointStore(run.checkpoints)
        self.saver = Saver(
            *(self.model, self.optimizers, self.store, run),
            world=world,
            token=world.from_first(secrets.token_hex(8)),
            timeout_s=config.parallel.timeout_s,
        )
        self._verified = checkpoint
        self.started_from: dict[str, Any] = {}  # The run, step and snapshot from which the first parameters came.
        for warning in [
            *config.warnings(),
            *_shared_rows(config.model.tables, source),
            *_batch_norms(self.model, config),
        ]:
            say(f"warning: {warning}")
        self.step = 0
        self.num_made = 0
        """Number of steps that this process has made."""
        self.data_step = self.num_tokens = 0
        self.is_stopping = False
        """Whether any of several processes has been asked to stop."""
        self._stop: list[int] = []
        """The signals that asked this process to stop."""
        self._tokens = 0
        """Number of tokens of the present step, in all processes."""
        self._own_tokens = 0
        """The part of these tokens that this process has read."""
        self.is_compiling = False
        """Whether the first step of a compiled model is running. Compiling makes this step slow."""
        self.last_loss = self._last_norm = float("nan")
        self.reads_every_step = self.device.type == "cpu"
        """Whether the host reads each verdict right after its step. On a CPU this costs no waiting."""
        self._unread: list[tuple[int, int, torch.Tensor]] = []
        """Data step, number of tokens and packed verdict of each step whose verdict the host has not read yet."""
        self._metrics: Mapping[str, float | torch.Tensor] = {}
        self._logged = 0.0, 0
        """Time and number of tokens at the last line of metrics."""
        self.tokens_per_s = 0.0
        """Tokens per second of this process. The time includes loading, checkpoints and steps that were rolled back."""
        self.began = 0.0
        """Time (`time.perf_counter`) at which this process was ready to make its first step."""

    def _make_model(self) -> dict[str, ShardedTables]:
        """Sets torch up and makes the model. Returns the tables that several processes share, by module name."""
        if self.device.type == "cpu":
            keep_freed_memory()
        precision = self.config.training.precision
        self.is_half = precision == "bf16" or (precision == "auto" and self.device.type == "cuda")
        # Beside a GPU, tensors on the CPU are small, and starting more threads would take longer than the work itself.
        has_cores = self.device.type == "cpu" and self.world.is_alone  # The processes of a host share its cores.
        self.num_threads = self.config.training.num_threads or (usable_cores() if has_cores else 1)
        torch.set_num_threads(self.num_threads)
        torch.use_deterministic_algorithms(self.device.type == "cpu")
        torch.manual_seed(self.config.seed)
        # The processes of a world make their parts of the tables in `shard_tables`.
        with rows_on(self.device if self.world.is_alone else "meta"):
            model = build_model(self.config.model, self.source.vocabulary)
        sharded = {} if self.world.is_alone else _shared_among(model, self.config, self.world)
        self.model: Any = model.to(self.device)
        self.is_compiled = shall_compile(self.config.training.compile, self.device)
        self.watch: CompilationWatch | None = None
        if self.is_compiled:
            compile_parts(self.model)
            self.watch = CompilationWatch(self.model)
        self.pads = self.world.is_alone and shall_pad(
            self.config.training.pad_shapes, self.model, self.device, is_compiled=self.is_compiled
        )
        return sharded

    def _open_steps(self, steps: NumberedSteps[Any] | None, *, quiet: bool) -> None:
        """Opens the numbered steps of training and of validation, or this process's share of them."""
        tables, place = self.config.model.tables, {"rank": self.world.rank, "world_size": self.world.size}
        self.steps: NumberedSteps[Any] = steps or self.config.data.steps(
            self.source, tables, self.config.seed, quiet=quiet, **place
        )
        self.batches: NumberedSteps[Any] | ClusterSteps = self.steps
        if self.config.data.ray_address:
            self.batches = ClusterSteps(self.steps, self.config.data.ray_address)  # type: ignore[arg-type]
        self.validation = Validation(self.config.training.patience)
        self.judges: NumberedSteps[Any] | None = None
        if self.config.training.validate_every:
            self.judges = self.config.data.steps(
                self.source, tables, self.config.seed, part="validation", quiet=quiet, **place
            )

    def train(self, *, quiet: bool = False) -> None:
        """Trains to the last step. Raises DivergedError, Preempted (with the state saved), or any other error."""
        lock = _only_process(self.run) if self.world.is_first else nullcontext()
        with lock, _stop_signals(lambda: self.is_compiling) as stop:
            if self.world.is_first:
                self.run.clean()
                self.store.clean()
            self.world.wait_for_all()
            self._stop = stop
            self._resume_or_start()
            # `latest` moves only now, because a run that starts from `runs/latest` must first read that run.
            self.run.make_latest()
            self.run.set_status("running")
            try:
                self._train_until_done(stop, quiet=quiet)
            except BaseException as caught:
                if not self.world.is_alone and broken_by(caught):
                    self.saver.lost.set()
                if not isinstance(caught, KeyboardInterrupt):  # After a second request to stop, do not wait.
                    self._let_writer_finish()
                error = self._preempted(stop[0]) if isinstance(caught, _StopNow) else caught
                reason = error.got if isinstance(error, TackboardError) else f"{type(error).__name__}: {error}"
                if not self.world.is_alone and broken_by(error):
                    reason = "another process of the run was lost"
                with suppress(OSError):  # If the disk is full, this second error must not hide the first.
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
        self.began, tokens_before = time.perf_counter(), self.num_tokens
        self._logged = self.began, tokens_before
        self.is_compiling = self.is_compiled
        if stop and self.is_compiling:
            raise _StopNow
        with Progress(f"training {self.config.name}", total=total, unit="steps", quiet=quiet) as progress:
            progress.advance(self.step)
            while self.step < total and not self.validation.is_over:
                upcoming = self.batches.iterate(self._upcoming(), self.config.data.num_workers)
                for data_step, batch in on_device(upcoming, self.device, self._prepared):
                    if not self._one_step(data_step, batch):
                        break  # Data was skipped or the state went back, so the upcoming steps have changed.
                    # The host reads the first loss only when the first step is logged.
                    progress.advance(1, note="" if math.isnan(self.last_loss) else f"loss {self.last_loss:.3f}")
                    is_judged = self._validate()
                    if is_judged or self.step % every == 0 or self.step == total:
                        self.save()
                        if self.on_checkpoint is not None:
                            self.saver.wait()
                            with self.uncompiled():
                                self.on_checkpoint(self)
                    if stop if self.world.is_alone else self.is_stopping:
                        self._settle()
                        self.save()
                        self.saver.wait()
                        raise self._preempted((stop or [signal.SIGTERM])[0])
                    if self.validation.is_over:
                        self.run.log_event("stopped_early", step=self.step, best_step=self.validation.best_step)
                        break
                progress.advance(self.step - progress.done)
            self.saver.wait()
        self.tokens_per_s = (self.num_tokens - tokens_before) / (time.perf_counter() - self.began)

    def _validate(self) -> bool:
        """Computes the validation loss if it is due; returns whether it was due."""
        every = self.config.training.validate_every
        if self.judges is None or self.step % every:
            return False
        with self.uncompiled(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_half):
            loss = mean_loss(self.model, self.judges, self.device, self.config.training.validation_steps, self.world)
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
        """Returns a context in which the model runs uncompiled. Compiling it for another use would take too long."""
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
        """Does one step. Returns False if a step did not count and the caller must call `_upcoming` again."""
        if not int(self.world.sum_(torch.tensor(batch.num_examples()))):
            self.data_step = data_step + 1  # This batch has nothing to predict: continue after it.
            return False
        seed = self._seed_of(data_step)
        # torch.manual_seed would store a traceback of every call on a machine without a GPU, in case a GPU appears.
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        self.model.train()
        for module in self.optimizers.frozen:
            module.eval()
        self.optimizers.prepare(data_step)
        self._tokens = self._own_tokens = batch.num_tokens
        verdict, self._metrics = self._compute(batch) if self.replay is None else self.replay(batch)
        self._unread.append((data_step, self._tokens, verdict))
        self.is_compiling = False
        self._tell_recompilations()
        self.num_made += 1
        self.step += 1
        self.data_step = data_step + 1
        return self._settle() if self.reads_every_step or self._is_boundary() else True

    def _compute(self, batch: Batch) -> tuple[torch.Tensor, Mapping[str, float | torch.Tensor]]:
        """Computes loss and gradients, lets the guard check both and moves parameters. Returns verdict and metrics."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_half):
            output = self.model.loss(batch)
        loss = output.loss
        if self.gradients is not None and not getattr(self.model, "share_items", None):
            # The loss is a mean over the examples of this process. It becomes its part of the mean over all examples.
            loss, _ = part_of_mean(output, batch.num_examples(), self.world)
        loss.backward()
        if self.gradients is not None:
            # Processes see a signal at different times, so all stop after the step in which one process reports it.
            agreed = self.gradients.agree(self._tokens, is_stopping=bool(self._stop))
            self._tokens, self.is_stopping, has_gradient = agreed
            loss = self.gradients.add(loss, has_gradient)
        verdict = self.guard.judge(loss, self.optimizers.clip())
        self.optimizers.step(verdict.keep)
        return verdict.packed(), output.metrics

    def _tell_recompilations(self) -> None:
        """Writes a line for each part of the model that torch has compiled again in this step, after the warm-up."""
        for part, reason in [] if self.watch is None else self.watch.news():
            if self.num_made >= WARM_UP_STEPS:
                self.run.log_event("recompiled", step=self.step, part=part, reason=reason)
                say(f"warning: torch compiled {part} again at step {self.step}, which takes seconds: {reason}")

    def _seed_of(self, data_step: int) -> int:
        """Returns the seed of dropout and of a batch's random targets: a function of (seed, data step)."""
        stream = 17 + (self.world.rank << 32)  # Each process drops and draws other numbers.
        return int(mix64(self.config.seed * 1_000_003 + data_step, stream)[0] >> 1)

    def _prepared(self, data_step: int, batch: Batch) -> Batch:
        """Returns the batch with what the model prepares on the CPU. Another thread may call this."""
        prepare = getattr(self.model, "prepare", None)
        if prepare is None:
            return batch
        generator = torch.Generator().manual_seed(self._seed_of(data_step))
        return prepare(batch, generator, pad=True) if self.pads else prepare(batch, generator)

    def _is_boundary(self) -> bool:
        """Returns whether this step is logged, judged or saved. If so, the host must read the verdicts first."""
        training = self.config.training
        intervals = (training.log_every, training.checkpoint_every, training.validate_every or training.steps)
        return self.step == training.steps or any(self.step % interval == 0 for interval in intervals)

    def _settle(self) -> bool:
        """Reads the verdicts of the steps since the last call; returns False if one of the steps was dropped.

        Before this call, `step` and `data_step` count every step as good, because only the device knows the verdicts.
        """
        unread, self._unread = self._unread, []
        if not unread:
            return True
        verdicts = torch.stack([packed for _, _, packed in unread]).tolist()
        bad = []
        step = self.step - len(unread)
        for (data_step, num_tokens, _), (loss, norm, limit, keep) in zip(unread, verdicts, strict=True):
            if keep:
                step += 1
                self.num_tokens += num_tokens
                self.last_loss, self._last_norm = loss, norm
            else:
                bad.append((step, data_step, Guard.reason(loss, norm, limit)))
        self.step = step
        for step, data_step, reason in bad:
            self.run.log_event("bad_step", step=step, data_step=data_step, reason=reason)
            say(f"warning: {reason} at step {step}: skipping data step {data_step}")
            self.guard.skip(data_step, reason)
        if bad and self.has_state_beyond_parameters:
            self._roll_back()  # The forward pass of the bad step may have changed this state.
        elif self.step % self.config.training.log_every == 0 or self.step == self.config.training.steps:
            self._log(is_new=bool(verdicts[-1][3]))
        return not bad

    def _log(self, *, is_new: bool) -> None:
        """Writes a line of metrics if `is_new`. After a bad step `is_new` is False, because the line exists already."""
        if not is_new:
            return
        now = time.perf_counter()
        tokens_per_s = (self.num_tokens - self._logged[1]) / max(1e-9, now - self._logged[0])
        self._logged = now, self.num_tokens
        share = float(self.optimizers.share)
        figures = {"loss": self.last_loss, "grad_norm": self._last_norm, "lr_share": share, "tokens": self.num_tokens}
        figures |= mean_figures(self._metrics, self._own_tokens, self.world)
        self.run.log_metrics(self.step, **figures, tokens_per_s=round(tokens_per_s, 1))

    def _let_writer_finish(self) -> None:
        """After an error, waits until the checkpoint is written. A further error is only printed as a warning."""
        try:
            self.saver.wait()
        except Exception as error:  # noqa: BLE001 - the first error is the one that is raised.
            say(f"warning: {error}")

    def _roll_back(self) -> None:
        self.saver.wait()
        checkpoint = newest_checkpoint(self.store, self.world)
        if checkpoint is None:
            raise DivergedError(f"there is no checkpoint to go back to in {self.run.checkpoints}")
        self._load(checkpoint)
        self.run.cut_metrics_after(self.step)
        self.run.log_event("rolled_back", step=self.step)

    def _resume_or_start(self) -> None:
        checkpoint = newest_checkpoint(self.store, self.world, self._verified)
        self._verified = None  # Mapped files take disk space, even after removal, while an object refers to them.
        if checkpoint is None:
            self.run.cut_metrics_after(self.step)  # If every checkpoint was damaged, old metrics exist.
            sums = {name: table.sums for name, table in self.optimizers.tables.items()}
            self.started_from = take_parameters(self.model, self.config, self.source, sums)
            self.saver.begin()
            self.run.log_event(
                "start",
                parameters=sum(p.numel() for p in self.model.parameters()),
                parameters_taken=self.started_from.get("parameters", 0),
                features=self.source.features.hash,
                trimming=dict(self.source.trimming),
            )
            self.save()
            self.saver.wait()  # From here on, there is a checkpoint to go back to.
        else:
            before = self._load(checkpoint).get("num_threads", self.num_threads)
            if before != self.num_threads:
                # Sums over another number of threads are rounded differently; everything else stays the same.
                say(f"warning: the run had {before} threads and has {self.num_threads} now: results differ in rounding")
            # `latest` may name another checkpoint: after a kill between the two renames of a save, or after damage.
            if self.world.is_first:
                self.store.point_latest(checkpoint.path)
                self.store.point_best(self.validation.best_step)
            self.run.cut_metrics_after(self.step)
            self.run.log_event("resume", step=self.step)

    def save(self) -> None:
        """Copies the present state and begins to write its checkpoint; `saver.wait` waits until it is complete.

        Raises DivergedError if a parameter is not finite, and the error of the previous checkpoint if that failed.
        """
        documents = {FILE_NAME: self.source.features.to_json()}
        self.saver.save(self.step, self._state(), documents, best=self.validation.best_step)

    def _state(self) -> dict[str, Any]:
        vocabulary = self.source.vocabulary
        return {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "data_step": self.data_step,
            "order_version": ORDER_VERSION,
            "num_tokens": self.num_tokens,
            "num_threads": self.num_threads,
            "last_loss": self.last_loss if self.step else None,
            "fresh_rows": self.saver.describe(),
            "guard": self.guard.state(),
            **({"validation": self.validation.state()} if self.judges is not None else {}),
            "config": config_to_json(self.config),
            "model": describe_model(self.config.model),
            "vocabulary": {"actions": list(vocabulary.actions), "surfaces": list(vocabulary.surfaces)},
            "id_type": self.source.dataset.item_type,
            "user_type": self.source.dataset.user_type,
            "lineage": self.source.lineage(),
            **({"started_from": self.started_from} if self.started_from else {}),
        }

    def _load(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Loads a checkpoint into this trainer; returns the checkpoint's state."""
        if self.replay is not None:
            self.replay.forget()  # The states of optimisers will lie elsewhere in memory.
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
        self.saver.load(checkpoint)
        self.guard.load_state(checkpoint.state["guard"])
        self.validation.load_state(checkpoint.state.get("validation", {}))
        self.started_from = checkpoint.state.get("started_from", {})
        self.step = int(checkpoint.state["step"])
        self._unread.clear()
        self.optimizers.applied.fill_(self.step)
        self.data_step = int(checkpoint.state["data_step"])
        self.num_tokens = int(checkpoint.state["num_tokens"])
        self.last_loss = checkpoint.state["last_loss"] if self.step else float("nan")
        return checkpoint.state


def _shared_among(model: torch.nn.Module, config: RunConfig, world: TrainingWorld) -> dict[str, ShardedTables]:
    """Divides the tables of a model among the processes of a world, and lets its loss share items if it can."""
    if hasattr(model, "share_items"):
        # On a GPU, a thread prepares the next batches while this one trains.
        ahead = None if world.device.type == "cpu" else world.for_another_thread()
        model.share_items = functools.partial(share_items, world=world, ahead=ahead)  # type: ignore[assignment]
    return shard_tables(model, world, config.parallel)


def _shared_rows(hashing: HashConfig, source: SequenceSource) -> list[str]:
    """Returns a list of one warning if items of a `modulo` table share rows, else an empty list."""
    if hashing.method != "modulo":
        return []
    num_rows = len(torch.unique(item_rows(source.catalogue, hashing)))
    if num_rows == len(source.catalogue):
        return []
    return [
        f"{len(source.catalogue):,} items share {num_rows:,} rows: raise model.tables.num_rows above the largest id"
    ]


def _batch_norms(model: torch.nn.Module, config: RunConfig) -> list[str]:
    """Returns a list of one warning if a model of requests normalises by the statistics of a batch, else an empty list.

    A batch of requests has many candidates of few users, so its statistics are those of few users.
    """
    if config.data.batch_type is not RequestBatch:
        return []
    kinds, synced = torch.nn.modules.batchnorm._BatchNorm, torch.nn.SyncBatchNorm
    names = [name for name, part in model.named_modules() if isinstance(part, kinds) and not isinstance(part, synced)]
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"{names[0]}{more} normalises by the statistics of a batch, but a batch of requests holds few users: use "
        "nn.LayerNorm, or nn.SyncBatchNorm on several processes and a larger data.tokens_per_step"
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
        if received:  # The second request to stop: do not save first.
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
