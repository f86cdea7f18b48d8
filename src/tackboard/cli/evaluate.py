"""`tackboard evaluate RUN`: ranks the whole catalogue for every held-out event, beside the baselines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer


def evaluate(
    run: Path = typer.Argument(..., help="A run or checkpoint folder."),
    dataset: Path | None = typer.Option(None, "--dataset", help="Another dataset than the run was trained on."),
    filter_seen: bool | None = typer.Option(
        None, "--filter-seen/--keep-seen", help="Take items of the history out of the ranking; default: the recipe's."
    ),
    max_users: int | None = typer.Option(None, "--max-users", min=1, help="Rank only the first so many users."),
    code: Path | None = typer.Option(
        None, help="The Python file of a model of your own; it is run. Needed for a run of somebody else's."
    ),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """HR@k and NDCG@k of a trained model, popularity, item-to-item and, on a synthetic world, the oracle."""
    from tackboard.evaluation.ranking import better_baseline

    result = evaluate_run(run, dataset=dataset, filter_seen=filter_seen, max_users=max_users, code_file=code)
    if json_output:
        typer.echo(json.dumps(result))
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
        typer.echo(_gap_sentence(result["gap_closed"]))
    if better := better_baseline(result["rows"]):
        typer.echo(f"{better} ranks better than the model here (HR@10); docs/training.md says what to try")


def _gap_sentence(closed: float) -> str:
    if closed >= 0:
        return f"the model goes {closed:.0%} of the way from the better baseline to the oracle (HR@10)"
    return f"the model is behind the better baseline by {-closed:.0%} of the way from there to the oracle (HR@10)"


def evaluate_run(
    run: Path,
    *,
    dataset: Path | None = None,
    filter_seen: bool | None = None,
    max_users: int | None = None,
    code_file: Path | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """The table of one checkpoint, kept in the run's eval folder: step-N.json for every step that was evaluated.

    metrics.json is the one that was evaluated last. `code_file` is the file of a user's own model, where it was named.
    """
    import torch

    from tackboard.checkpoint.store import find_checkpoint
    from tackboard.checkpoint.trained import STATE, load_trained
    from tackboard.core.documents import blaming
    from tackboard.core.files import write_json_atomic
    from tackboard.core.machine import usable_cores
    from tackboard.core.progress import say
    from tackboard.core.vocabulary import Vocabulary
    from tackboard.data.source import load_sequences, snapshot_path
    from tackboard.evaluation.ranking import baselines, evaluate_rankings, gap_closed, rank_model
    from tackboard.evaluation.truth import oracle
    from tackboard.features.feature_set import FILE_NAME as FEATURES
    from tackboard.features.feature_set import read_features
    from tackboard.features.standard import check_reads, features_for_model
    from tackboard.models.interface import build_model
    from tackboard.models.stored import check_fit
    from tackboard.train.config import config_from_json

    torch.set_num_threads(usable_cores())
    checkpoint = load_trained(find_checkpoint(run))
    trained_on = checkpoint.state["lineage"]
    vocabulary = Vocabulary.from_dict(checkpoint.state["vocabulary"])
    features = read_features(checkpoint.path)
    with blaming(checkpoint.path / STATE):
        config = config_from_json(checkpoint.state["config"], code_file)
        features = features or features_for_model(config.model.reads, vocabulary, config.model.max_history)
    check_reads(config.model.reads, features, checkpoint.path / FEATURES)
    parameters = checkpoint.tensors["dense"] | checkpoint.tensors["tables"]
    check_fit(config.model, vocabulary, parameters, checkpoint.path / STATE)
    source = dataset or snapshot_path(trained_on)
    sequences = load_sequences(
        source,
        config.data.positive_actions,
        vocabulary=vocabulary,
        features=lambda _vocabulary: features,
        held_out=config.data.held_out,
    )
    found = sequences.source.dataset
    for name, present, known in (
        ("action", found.actions, vocabulary.actions),
        ("surface", found.surfaces, vocabulary.surfaces),
    ):
        if f"history.{name}" in features.reads() and (unseen := sorted(set(present) - set(known))):
            say(f"warning: {name}s that training never saw count as unknown: {', '.join(unseen)[:120]}")
    model = build_model(config.model, vocabulary)
    model.load_state_dict(parameters)
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
    step = int(checkpoint.state["step"])
    result |= {"gap_closed": gap_closed(result["rows"]), "checkpoint": str(checkpoint.path), "step": step}
    folder = checkpoint.path.parent.parent / "eval"
    folder.mkdir(exist_ok=True)
    for name in (f"step-{step:08d}.json", "metrics.json"):
        write_json_atomic(folder / name, result)
    return result
