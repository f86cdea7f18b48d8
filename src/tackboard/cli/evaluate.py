"""`tackboard evaluate RUN` measures a trained model and the baselines on held-out events or requests."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    import torch

    from tackboard.checkpoint.store import Checkpoint
    from tackboard.core.vocabulary import Vocabulary
    from tackboard.data.request_loader import RequestSource
    from tackboard.data.source import SequenceSource
    from tackboard.data.stream import StreamSource
    from tackboard.events.dataset import Dataset
    from tackboard.features.feature_set import FeatureSet
    from tackboard.train.config import RunConfig


def evaluate(
    run: Path = typer.Argument(..., help="Evaluate this run or checkpoint folder."),
    dataset: Path | None = typer.Option(
        None, "--dataset", help="Evaluate on this dataset; default: the dataset that the run was trained on."
    ),
    filter_seen: bool | None = typer.Option(
        None, "--filter-seen/--keep-seen", help="Take items of the history out of the ranking; default: the recipe's."
    ),
    cut: str | None = typer.Option(
        None, "--cut", help="Judge events from this instant on, with a run that was trained on earlier events only."
    ),
    judged: str | None = typer.Option(
        None,
        "--judged",
        help="Judge each user's first event from the cut on, the last, or all; default: the recipe's.",
    ),
    cutoffs: str | None = typer.Option(
        None, "--cutoffs", help="Compute HR@k and NDCG@k for these k, such as 5,10,100; default: the recipe's."
    ),
    item_time: str | None = typer.Option(
        None,
        "--item-time",
        help="Show a ranker's HIT@3 by item age, the time since this attribute of the item; default: the recipe's.",
    ),
    max_users: int | None = typer.Option(None, "--max-users", min=1, help="Evaluate at most this many users."),
    code: Path | None = typer.Option(
        None, help="Run this Python file, which holds a model of your own. Needed for somebody else's run."
    ),
    device: str = typer.Option("auto", "--device", help="Compute on cpu, cuda, or auto: a GPU if there is one."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object instead of text."),
) -> None:
    """Measure how good a trained model is, and compare it with simple baselines.

    A retrieval model gets HR@k and NDCG@k over the whole catalogue, and is compared with popularity, recent popularity,
    item-to-item, the user's own recent items and, on a synthetic world, the oracle. Each evaluation writes a page with
    plots beside its figures. On a stream (events made while training reads them), a fixed sample of items takes
    the place of the catalogue, and the log-loss of a softmax over the sample is measured too. A ranker gets AUC,
    log-loss, normalised entropy, calibration and HIT@3 for each label on requests of held-out users, and is compared
    with each item's mean label in training.
    """
    settings = {
        "filter_seen": filter_seen,
        "judged": judged,
        "cutoffs": None if cutoffs is None else _whole_numbers(cutoffs),
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    options: dict[str, Any] = {"max_users": max_users, "device": device, "item_time": item_time, "cut": cut}
    result = evaluate_run(run, dataset=dataset, code_file=code, settings=settings, **options)
    if json_output:
        typer.echo(json.dumps(result))
        return
    if "num_candidates" in result:
        _print_requests(result)
        return
    _print_rankings(result)


def _whole_numbers(text: str) -> tuple[int, ...]:
    from tackboard.core.errors import UsageError

    if not re.fullmatch(r"[1-9]\d{0,6}(,[1-9]\d{0,6})*", text):
        raise UsageError(
            f"--cutoffs {text} is no list of whole numbers", allowed="allowed: 1 or more, such as 5,10,100"
        )
    return tuple(sorted({int(number) for number in text.split(",")}))


def _print_rankings(result: dict[str, Any]) -> None:
    from tackboard.evaluation.ranking import better_baseline

    names = [key for key in result["rows"][0] if key != "name"]
    ranked = [name for name in names if re.match(r"hr@|ndcg@|log_loss", name)]
    typer.echo(
        f"{result['num_users']:,} users, {result['num_items']:,} items; {result['protocol']}; step {result['step']:,}"
    )
    typer.echo(
        "items of the history are " + ("taken out of the ranking" if result["filter_seen"] else "kept in the ranking")
    )
    for columns in (ranked, [name for name in names if name not in ranked]):
        if columns:
            typer.echo(" " * 14 + "".join(f"{name:>{max(9, len(name) + 2)}}" for name in columns))
            for row in result["rows"]:
                cells = "".join(f"{row[name]:{max(9, len(name) + 2)}.4f}" for name in columns)
                typer.echo(f"{row['name']:<14}{cells}")
    for name, hours in result.get("windows_h", {}).items():
        typer.echo(f"{name}: counts the events of {hours:g} hours, the best window on earlier events")
    if share := result.get("never_seen_share"):
        typer.echo(
            f"{share:.1%} of the judged events are on items that training never saw, so the model knows nothing of them"
        )
    if result["gap_closed"] is not None:
        typer.echo(_gap_sentence(result["gap_closed"], "log-loss" if "log_loss" in names else "HR@10"))
    if better := better_baseline(result["rows"]):
        typer.echo(f"{better} ranks better than the model here (HR@10); docs/training.md says what to try")
    if "page" in result:
        typer.echo(f"slices and plots: {result['page']}")


def _print_requests(result: dict[str, Any]) -> None:
    names = [key for key in result["rows"][0] if key not in ("name", "label")]
    counts = f"{result['num_candidates']:,} candidates of {result['num_users']:,} users"
    typer.echo(f"{counts}; {result['protocol']}; step {result['step']:,}")
    width = max(len(f"{row['label']}, {row['name']}") for row in result["rows"]) + 2
    typer.echo(" " * width + "".join(f"{name:>18}" for name in names))
    for row in result["rows"]:
        typer.echo(f"{row['label']}, {row['name']}".ljust(width) + "".join(f"{row[name]:18.4f}" for name in names))
    for mean, model in zip(result["rows"][::2], result["rows"][1::2], strict=True):
        if mean["auc"] >= model["auc"]:
            typer.echo(f"each item's mean label is better than the model here (AUC of {model['label']})")
    if result["ages"]:
        _print_ages(result, width)


def _print_ages(result: dict[str, Any], width: int) -> None:
    """Prints HIT@3 by item age. A label has a line for the model, one for the baseline, and one with request counts."""
    names = list(dict.fromkeys(row["age"] for row in result["ages"]))
    typer.echo(f"\nHIT@3 by item age ({result['item_time']})")
    typer.echo(" " * width + "".join(f"{name:>18}" for name in names))
    lines: dict[str, list[str]] = {}
    for row in result["ages"]:
        share = "-" if row["hit@3"] is None else f"{row['hit@3']:.4f}"
        lines.setdefault(f"{row['label']}, {row['name']}", []).append(share)
        if row["name"] == "model":
            lines.setdefault(f"{row['label']}, requests", []).append(f"{row['num_requests']:,}")
    for title, values in lines.items():
        typer.echo(title.ljust(width) + "".join(f"{value:>18}" for value in values))


def _gap_sentence(closed: float, metric: str = "HR@10") -> str:
    if closed >= 0:
        return f"the model goes {closed:.0%} of the way from the better baseline to the oracle ({metric})"
    gap = f"{-closed:.0%} of this baseline's gap to the oracle ({metric})"
    return f"the model is worse than the better baseline, by {gap}"


def evaluate_run(
    run: Path | Checkpoint,
    *,
    dataset: Path | None = None,
    verified: Dataset | None = None,
    settings: Mapping[str, Any] | None = None,
    cut: str | None = None,
    item_time: str | None = None,
    max_users: int | None = None,
    code_file: Path | None = None,
    device: str = "cpu",
    quiet: bool = False,
) -> dict[str, Any]:
    """Evaluates one checkpoint and returns its metrics, which are also written to the run's eval folder.

    The file of an evaluation is named after the step and, for rankings, after everything that decides the figures.
    metrics.json holds the metrics of the last evaluation. If `run` is a `Checkpoint`, it is not verified again. If the
    caller has already opened the snapshot that the run was trained on, `verified` is this snapshot, and it is not
    verified again. `settings` and `item_time` replace settings of the run's evaluation, and `cut` replaces the split of
    its data. `code_file` is the file of a user's own model, if the user named it.
    """
    import torch

    from tackboard.checkpoint.store import find_checkpoint
    from tackboard.checkpoint.trained import STATE, load_trained, stored_parameters
    from tackboard.core.documents import blaming
    from tackboard.core.machine import usable_cores
    from tackboard.core.vocabulary import Vocabulary
    from tackboard.data.request_loader import RequestSource
    from tackboard.data.stream import StreamSource
    from tackboard.features.feature_set import FILE_NAME as FEATURES
    from tackboard.features.feature_set import read_features
    from tackboard.features.standard import check_reads, features_for_model
    from tackboard.models.stored_parameters import restore_model
    from tackboard.train.config import config_from_json

    place = device_named(device)
    torch.set_num_threads(usable_cores())
    checkpoint = load_trained(find_checkpoint(run) if isinstance(run, Path) else run)
    trained_on = checkpoint.state["lineage"]
    vocabulary = Vocabulary.from_dict(checkpoint.state["vocabulary"])
    features = read_features(checkpoint.path)
    with blaming(checkpoint.path / STATE):
        config = config_from_json(checkpoint.state["config"], code_file)
        features = features or features_for_model(config.model.reads, vocabulary, config.model.max_history)
    check_reads(config.model.reads, features, checkpoint.path / FEATURES)
    _check_options(config, settings or {}, cut, item_time)
    config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, **(settings or {})))
    model = restore_model(config.model, vocabulary, stored_parameters(checkpoint), checkpoint.path / STATE, place)
    data = config.data.at(trained_on)
    judging = data if cut is None else dataclasses.replace(data, split="time", cut=cut, validation_hours=0.0)
    source = judging.open(lambda _vocabulary: features, dataset=dataset or verified, vocabulary=vocabulary)
    warn_of_unseen(source)
    if isinstance(source, RequestSource):
        trained = source
        if dataset is not None:
            trained = data.open(lambda _: features, vocabulary=vocabulary)
        item_time = config.evaluation.item_time if item_time is None else item_time
        result = _judge_requests(model, config, source, trained, item_time=item_time, max_users=max_users, quiet=quiet)
    elif isinstance(source, StreamSource):
        result = _judge_stream(model, config, source, max_users=max_users, quiet=quiet)
    else:
        fitted = None
        if dataset is not None or cut is not None:
            fitted = _opened_for_training(data, lambda _: features, vocabulary)
        if cut is not None:
            check_unseen_events(source, trained_on, fitted)
        result = _judge_rankings(model, config, source, fitted, max_users=max_users, quiet=quiet)
    return _written(checkpoint, result)


def _check_options(config: RunConfig, settings: Mapping[str, Any], cut: str | None, item_time: str | None) -> None:
    """Raises UsageError for an option that does not apply to this kind of run."""
    from tackboard.core.errors import UsageError
    from tackboard.data.request_loader import RequestConfig
    from tackboard.data.stream import StreamConfig

    given = [*settings, *([] if cut is None else ["cut"])]
    if given and isinstance(config.data, RequestConfig | StreamConfig):
        reason = "to a run on a stream, whose users return to items"
        if isinstance(config.data, RequestConfig):
            reason = "to a ranker, which scores the candidates of each request"
        option = "--filter-seen and --keep-seen do" if given[0] == "filter_seen" else f"--{given[0]} does"
        raise UsageError(f"{option} not apply {reason}", fix="leave the option out")
    if cut == "":
        raise UsageError("--cut is empty", allowed="allowed: an instant such as 2024-05-01T12:00:00Z, or a share")
    if "judged" in settings and cut is None and getattr(config.data, "split", "") != "time":
        raise UsageError(
            "--judged applies only to a split by time; this run predicts each user's last positive event",
            fix="name a cut and a dataset with later events: --cut INSTANT --dataset DATASET, or leave the option out",
        )
    if item_time is not None and not isinstance(config.data, RequestConfig):
        raise UsageError("--item-time applies only to a ranker", fix="leave the option out")


def _written(checkpoint: Checkpoint, result: dict[str, Any]) -> dict[str, Any]:
    """Writes a result into the eval folder of its run, and a page if it has slices. Adds the checkpoint and step."""
    from tackboard.core.files import write_json_atomic, write_text_atomic
    from tackboard.evaluation.evaluation_page import evaluation_page

    step = int(checkpoint.state["step"])
    result = result | {"checkpoint": str(checkpoint.path), "step": step}
    folder = checkpoint.path.parent.parent / "eval"
    folder.mkdir(exist_ok=True)
    name = "_".join([f"step-{step:08d}", *([result["name"]] if "name" in result else [])])
    if "slices" in result:
        result["page"] = str(folder / f"{name}.html")
        write_text_atomic(folder / f"{name}.html", evaluation_page(result))
    for file in (f"{name}.json", "metrics.json"):
        write_json_atomic(folder / file, result)
    return result


def _opened_for_training(
    data: Any, features: Callable[[Any], FeatureSet], vocabulary: Vocabulary
) -> SequenceSource | None:
    """Opens the data that the run was trained on, for the baselines. Returns None, with a warning, if it is gone."""
    from tackboard.core.errors import DataError
    from tackboard.core.progress import say

    try:
        source: SequenceSource = data.open(features, vocabulary=vocabulary)
    except DataError as error:
        say(f"warning: the baselines are fitted on the judged dataset, not on the dataset of the run: {error.got}")
        return None
    return source


def check_unseen_events(source: SequenceSource, trained_on: Mapping[str, Any], trained: SequenceSource | None) -> None:
    """Raises UsageError if training read events at or after the cut."""
    from tackboard.core.errors import UsageError
    from tackboard.data.time_split import shown_instant

    # Runs of older versions did not record their end.
    end_ms = trained_on.get("end_ms", None if trained is None else trained.end_ms)
    split = source.time_split
    if split is not None and end_ms is not None and split.cut_ms < end_ms:
        raise UsageError(
            f"--cut {shown_instant(split.cut_ms)} lies before the end of training, {shown_instant(end_ms)}",
            allowed="a run is judged only on events that it was not trained on",
            fix="train with --set data.split=time --set data.cut=INSTANT, or name a newer dataset: --dataset DATASET",
        )


def device_named(device: str) -> torch.device:
    """Returns the device that the option --device names."""
    from tackboard.core.errors import UsageError
    from tackboard.train.devices import choose_device

    if device != "auto" and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UsageError(f"--device {device} is no device", allowed="allowed: auto, cpu, cuda")
    return choose_device(device, "--device", "--device ")


def warn_of_unseen(source: SequenceSource) -> None:
    """Prints a warning if the dataset has actions or surfaces that the model reads and that training never saw."""
    from tackboard.core.progress import say

    for name, present, known in (
        ("action", source.dataset.actions, source.vocabulary.actions),
        ("surface", source.dataset.surfaces, source.vocabulary.surfaces),
    ):
        if f"history.{name}" in source.features.reads() and (unseen := sorted(set(present) - set(known))):
            say(f"warning: {name}s that training never saw count as unknown: {', '.join(unseen)[:120]}")


def _judge_rankings(
    model: Any,
    config: RunConfig,
    source: SequenceSource,
    trained: SequenceSource | None,
    *,
    max_users: int | None,
    quiet: bool,
) -> dict[str, Any]:
    """Ranks the whole catalogue for every judged event. The baselines are fitted on `trained`; None means `source`."""
    from tackboard.data.config import PartOfUsers
    from tackboard.evaluation.catalogue import judge_catalogue

    _check_retrieval(model)
    return judge_catalogue(
        model,
        source.read(),
        config.model.tables,
        config.model.max_history,
        config.evaluation,
        trained=None if trained is None else trained.read(),
        part=PartOfUsers("train", config.data.validation_share),
        max_users=max_users,
        quiet=quiet,
    )


def _judge_stream(
    model: Any, config: RunConfig, source: StreamSource, *, max_users: int | None, quiet: bool
) -> dict[str, Any]:
    """Predicts the last event of held-out users of a stream."""
    from tackboard.evaluation.sampled_softmax import evaluate_stream

    _check_retrieval(model)
    return evaluate_stream(
        model,
        source,
        config.model.tables,
        config.model.max_history,
        num_items=config.data.evaluated_items,
        cutoffs=config.evaluation.cutoffs,
        chunk_users=config.evaluation.chunk_users,
        max_users=max_users,
        quiet=quiet,
    )


def _check_retrieval(model: Any) -> None:
    from tackboard.core.errors import UsageError
    from tackboard.models.interface import can_retrieve

    if not can_retrieve(model):
        raise UsageError(
            f"{type(model).__name__} gives no vectors of users and items, so it cannot rank the whole catalogue",
            allowed="a model that was trained on segments needs encode_users and encode_items",
            fix="derive the model from RetrievalModel, or train it on labelled requests",
        )


def _judge_requests(
    model: Any,
    config: RunConfig,
    source: RequestSource,
    trained: RequestSource,
    *,
    item_time: str,
    max_users: int | None,
    quiet: bool,
) -> dict[str, Any]:
    """Scores the requests of held-out users (data.test_share). On another dataset, scores the requests of all users."""
    from tackboard.core.errors import UsageError
    from tackboard.evaluation.labelled_requests import evaluate_requests

    data, is_other = config.data, source is not trained
    if not data.test_share and not is_other:
        raise UsageError(
            "data.test_share is 0, so the run held out no users to test on",
            fix="name other labelled requests: --dataset DATASET, or train with --set data.test_share=0.1",
        )
    training = data.steps(trained, config.model.tables, config.seed)
    if is_other:
        data = dataclasses.replace(data, validation_share=0.0, test_share=1.0, judged_on="")
    steps = data.steps(source, config.model.tables, config.seed, part="test")
    return evaluate_requests(model, steps, training, item_time=item_time, max_users=max_users, quiet=quiet)
