"""`tackboard data synth`: a world's parameters in, a dataset with known ground truth out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def data_synth(
    world: Annotated[str, typer.Option(help="A shipped world (`demo`) or a JSON file of settings.")] = "demo",
    name: Annotated[str | None, typer.Option(help="Name of the dataset; the world's name by default.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of datasets.")] = Path("datasets"),
    seed: Annotated[int | None, typer.Option(help="Another seed than the world's own.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="A setting, e.g. num_users=100; repeatable.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Make a synthetic world with known ground truth."""
    from json import dumps

    from tackboard.core.config import apply_overrides
    from tackboard.events.dataset import check_name, open_dataset
    from tackboard.events.synthetic.world_config import load_world_config
    from tackboard.events.synthetic.world_dataset import write_world

    config = apply_overrides(load_world_config(world), set_ or [])
    if seed is not None:
        config = apply_overrides(config, [f"seed={seed}"])
    dataset_name = name or Path(world).name.removesuffix(".json")
    check_name(dataset_name)
    dataset = open_dataset(write_world(config, out, dataset_name, quiet=False))
    if json:
        typer.echo(dumps({"dataset": str(dataset.path), "statistics": dict(dataset.statistics)}))
        return
    popularity, repeats = dataset.statistics["popularity"], dataset.statistics["repeats"]
    lines = [
        f"events       {dataset.num_events:>12,}",
        f"users        {dataset.num_users:>12,}",
        f"items        {dataset.num_items:>12,}",
        f"actions      {', '.join(dataset.actions)}",
        f"surfaces     {', '.join(dataset.surfaces)}",
        f"popularity   {popularity['top_10_percent_share']:>12.1%}  of events fall on a tenth of the items",
        f"repeats      {repeats['share']:>12.1%}  of events repeat an item of the user",
        f"dataset      {dataset.path}",
    ]
    typer.echo("\n".join(lines))
