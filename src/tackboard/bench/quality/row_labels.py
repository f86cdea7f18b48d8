"""Names a row of a table of `tackboard bench quality`: its model, the items of its softmax, and its tuning.

The functions take a cell (cells.py), whose config says what was trained. The name of a method alone does not say this:
a recipe differs by dataset, and --set may change everything. A wrong word here is a wrong claim, so each word is read
from the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tackboard.bench.quality.cells import Cell
from tackboard.bench.quality.methods import METHODS, overrides_of
from tackboard.bench.quality.study_plan import StudyContext

LAYERS = {"gpt": "GPT", "hstu": "HSTU", "sasrec": "SASRec"}


def title_of(cell: Cell) -> str:
    """Returns the title of the cell's method. The title of a PinFM also names its layers, maps and losses."""
    title = METHODS[cell.method].title
    if cell.config is None or "maps" not in (model := cell.config["model"]["config"]):
        return title
    maps = "MLP" if model["maps"] == "mlp" else model["maps"]
    return f"{title}: {LAYERS[model['backbone']['kind']]} layers, {maps} maps, {losses_of(model['loss'])}"


def losses_of(loss: Mapping[str, Any]) -> str:
    """Names the losses of PinFM. A weight that is not 1 follows the name."""
    weights = {"multi-token": loss["multi_token_weight"], "future-token": loss["future_token_weight"]}
    parts = ["next-token"] + [name if at == 1 else f"{name} × {at:g}" for name, at in weights.items() if at]
    return f"{' + '.join(parts)} loss"


def softmax_of(cell: Cell, num_items: int = 0) -> str:
    """Says how items are scored, and over which items the softmax of the loss runs; "" for a cell without a config.

    `num_items` is the number of items of the catalogue, or 0 if it is unknown.
    """
    if cell.config is None:
        return ""
    loss, num_drawn = cell.config["model"]["config"]["loss"], int(cell.config["data"]["uniform_negatives"])
    kind = loss.get("kind", "contrastive")
    if kind == "sampled":
        return f"cosines, {loss['num_negatives']:,} drawn items"
    if kind == "full":
        return "inner products, all items"
    drawn = "all items" if 0 < num_items <= num_drawn else f"{num_drawn:,} drawn items"
    if kind == "mixed":
        return f"inner products, the batch's items and {drawn}, logQ"
    over = drawn
    if loss["in_batch_negatives"]:
        over = f"the batch's items and {drawn}" if num_drawn else "the batch's items"
        over += ", logQ" if loss["correct_popularity"] else ", uncorrected"
    own = "earlier" if loss["later_negatives"] else "own" if loss["mask_same_user"] else ""
    return f"cosines, {over}" + (f", without the user's {own} items" if own else "")


def tries_of(context: StudyContext, cell: Cell) -> str:
    """Returns the number of tries from which the settings of a cell were chosen, with a note; "" if nothing is fit."""
    method, options = METHODS[cell.method], context.options
    if cell.config is None:
        return ""
    if options.quick:
        return "0: --quick"
    words = "0: as published" if method.is_published else method.tuned(context.bench.name).words()
    return words + (", changed by --set" if overrides_of(method.name, options.overrides) else "")
