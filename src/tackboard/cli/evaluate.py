"""`tackboard evaluate RUN` measures a trained model and the baselines on held-out events or requests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    import torch

    from tackboard.checkpoint.store import Checkpoint
    from tackboard.data.request_loader import RequestSource
    from tackboard.data.source import SequenceSource
    from tackboard.data.stream import StreamSource
    from tackboard.events.dataset import Dataset
    from tackboard.train.config import RunConfig


def evaluate(
    run: Path = typer.Argument(..., help="Evaluate this run or checkpoint folder."),
    dataset: Path | None = typer.Option(
        None, "--dataset", help="Evaluate on this dataset; default: the dataset that the run was trained on."
    ),
    filter_seen: bool | None = typer.Option(
        None, "--filter-seen/--keep-seen", help="Take items of the history out of the ranking; default: the recipe's."
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

    A retrieval model gets HR@k and NDCG@k over the whole catalogue, and is compared with popularity, item-to-item and,
    on a synthetic world, the oracle. On a stream (events made while training reads them), a fixed sample of items takes
    the place of the catalogue, and the log-loss of a softmax over the sample is measured too. A ranker gets AUC,
    log-loss, normalised entropy, calibration and HIT@3 for each label on requests of held-out users, and is compared
    with each item's mean label in training.
    """
    from tackboard.evaluation.ranking import better_baseline

    options: dict[str, Any] = {"filter_seen": filter_seen, "max_users": max_users, "device": device}
    options["item_time"] = item_time
    result = evaluate_run(run, dataset=dataset, code_file=code, **options)
    if json_output:
        typer.echo(json.dumps(result))
        return
    if "num_candidates" in result:
        _print_requests(result)
        return
    names = [key for key in result["rows"][0] if key != "name"]
    typer.echo(
        f"{result['num_users']:,} users, {result['num_items']:,} items; {result['protocol']}; step {result['step']:,}"
    )
    typer.echo("items of the history are " + ("taken out" if result["filter_seen"] else "kept in the ranking"))
    typer.echo(" " * 14 + "".join(f"{name:>9}" for name in names))
    for row in result["rows"]:
        typer.echo(f"{row['name']:<14}" + "".join(f"{row[name]:9.4f}" for name in names))
    if result["gap_closed"] is not None:
        typer.echo(_gap_sentence(result["gap_closed"], "log-loss" if "log_loss" in names else "HR@10"))
    if better := better_baseline(result["rows"]):
        typer.echo(f"{better} ranks better than the model here (HR@10); docs/training.md says what to try")


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
    filter_seen: bool | None = None,
    item_time: str | None = None,
    max_users: int | None = None,
    code_file: Path | None = None,
    device: str = "cpu",
    quiet: bool = False,
) -> dict[str, Any]:
    """Evaluates one checkpoint and returns its metrics, which are also written to step-N.json in the run's eval folder.

    metrics.json holds the metrics of the last evaluation. If `run` is a `Checkpoint`, it is not verified again. If the
    caller has already opened the snapshot that the run was trained on, `verified` is this snapshot, and it is not
    verified again. `filter_seen` and `item_time` replace settings of the run's config. `code_file` is the file of a
    user's own model, if the user named it.
    """
    import torch

    from tackboard.checkpoint.store import find_checkpoint
    from tackboard.checkpoint.trained import STATE, load_trained, stored_parameters
    from tackboard.core.documents import blaming
    from tackboard.core.errors import UsageError
    from tackboard.core.files import write_json_atomic
    from tackboard.core.machine import usable_cores
    from tackboard.core.vocabulary import Vocabulary
    from tackboard.data.request_loader import RequestConfig, RequestSource
    from tackboard.data.stream import StreamConfig, StreamSource
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
    if filter_seen is not None and isinstance(config.data, RequestConfig | StreamConfig):
        reason = "to a run on a stream, whose users return to items"
        if isinstance(config.data, RequestConfig):
            reason = "to a ranker, which scores the candidates of each request"
        raise UsageError(f"--filter-seen and --keep-seen do not apply {reason}", fix="leave the option out")
    if item_time is not None and not isinstance(config.data, RequestConfig):
        raise UsageError("--item-time applies only to a ranker", fix="leave the option out")
    model = restore_model(config.model, vocabulary, stored_parameters(checkpoint), checkpoint.path / STATE, place)
    data = config.data.at(trained_on)
    source = data.open(lambda _vocabulary: features, dataset=dataset or verified, vocabulary=vocabulary)
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
        result = _judge_rankings(model, config, source, filter_seen, max_users=max_users, quiet=quiet)
    step = int(checkpoint.state["step"])
    result |= {"checkpoint": str(checkpoint.path), "step": step}
    folder = checkpoint.path.parent.parent / "eval"
    folder.mkdir(exist_ok=True)
    for name in (f"step-{step:08d}.json", "metrics.json"):
        write_json_atomic(folder / name, result)
    return result


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
    filter_seen: bool | None,
    *,
    max_users: int | None,
    quiet: bool,
) -> dict[str, Any]:
    """Ranks the whole catalogue for every held-out event."""
    from tackboard.evaluation.ranking import baselines, evaluate_rankings, gap_closed, rank_model
    from tackboard.evaluation.truth import oracle

    _check_retrieval(model)
    sequences = source.read()
    rivals = baselines(sequences)
    rivals["model"] = rank_model(model, sequences, config.model.tables, config.model.max_history)
    if (truth := oracle(sequences)) is not None:
        rivals["oracle"] = truth
    result = evaluate_rankings(
        sequences,
        rivals,
        cutoffs=config.evaluation.cutoffs,
        filter_seen=config.evaluation.filter_seen if filter_seen is None else filter_seen,
        chunk_users=config.evaluation.chunk_users,
        max_users=max_users,
        quiet=quiet,
    )
    return result | {"gap_closed": gap_closed(result["rows"])}


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
    import dataclasses

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
