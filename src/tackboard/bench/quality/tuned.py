"""Lists how many tries each method has had on each dataset, and the settings that were chosen from them.

A try is a fit that was judged on the validation event before a setting was chosen. Fits that diverged or were cut short
count. `methods.py` applies the settings of this file, except with --quick, and every row of a table shows the number
of tries. A family is a method without its inputs: `sasrec-fair` stands for `sasrec-fair-history` and
`sasrec-fair-request`, which share their settings, as the recipes of PinFM do. The settings of PinFM are in
recipes/public.py.

`tackboard bench quality --study tune` prints the entry of a family when its tries are finished. The numbers below were
counted from the rows of the tables in docs/log.md, in the sections of the given dates. The log of the first sweep on
ml-1m also mentions fits of 620 steps (two table rates, a multi-token weight). These fits are not counted.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """The tries of a family on a dataset."""

    tries: int
    """Number of tries, for all inputs together."""
    note: str = ""
    """What a reader of the number should know."""
    settings: tuple[str, ...] = ()
    """The chosen settings, each as `a.b=c`."""
    commit: str = ""
    """The commit that ran the tries; empty for the tries of docs/log.md, which several commits ran."""
    date: str = ""
    """The day or days of the tries."""

    def words(self) -> str:
        """Returns the number of tries and the note, for a table."""
        return f"{self.tries}: {self.note}" if self.note else str(self.tries)


NOT_TUNED = Tuned(tries=0, note="not tuned")
_SAME = "settings of sasrec-wide"
_ML_1M = ("optimizer.dense_learning_rate=1e-3", "model.dropout=0.3", "training.steps=3700")
_READS = ("optimizer.dense_learning_rate=3e-3",)
_DESKDROP = ("optimizer.dense_learning_rate=1e-2", "model.dropout=0.3")

TUNED: dict[tuple[str, str], Tuned] = {
    # 12 fits of the first sweep, 11 of the second and 19 of the third.
    ("pinfm", "ml-1m"): Tuned(tries=42, note="both inputs", date="2026-11-15, 2026-11-16"),
    ("pinfm-published", "ml-1m"): Tuned(tries=0, note="rates, dropout and steps of the recipe"),
    # 3 fits of the second sweep and 9 of the third.
    ("sasrec-wide", "ml-1m"): Tuned(
        tries=12, note="both inputs, 3 diverged", settings=_ML_1M, date="2026-11-15, 2026-11-16"
    ),
    ("hstu-wide", "ml-1m"): Tuned(tries=3, note="both inputs, cut short", settings=_ML_1M, date="2026-11-15"),
    ("sasrec-fair", "ml-1m"): Tuned(tries=0, note=_SAME, settings=_ML_1M),
    ("hstu-fair", "ml-1m"): Tuned(tries=0, note=_SAME, settings=_ML_1M),
    ("pinfm", "kakao-brunch"): Tuned(tries=3, date="2026-11-16"),
    ("pinfm-published", "kakao-brunch"): Tuned(tries=0, note="rates, dropout and steps of the recipe"),
    ("sasrec-wide", "kakao-brunch"): Tuned(
        tries=2, note="with a softmax over 128 items", settings=_READS, date="2026-11-16"
    ),
    **{
        (family, "kakao-brunch"): Tuned(tries=0, note="rate of sasrec-wide", settings=_READS)
        for family in ("sasrec", "hstu-large", "hstu-wide", "sasrec-fair", "hstu-fair")
    },
    # 6 and 8 fits of the first day and 12 of the second. The log gives the total as "some twenty-five".
    ("pinfm", "deskdrop"): Tuned(tries=26, date="2026-11-15, 2026-11-16"),
    ("pinfm-published", "deskdrop"): Tuned(tries=0, note="rates, dropout and steps of the recipe"),
    ("sasrec-wide", "deskdrop"): Tuned(tries=10, settings=_DESKDROP, date="2026-11-15, 2026-11-16"),
    **{
        (family, "deskdrop"): Tuned(tries=0, note="rate of sasrec-wide", settings=_DESKDROP[:1])
        for family in ("sasrec", "hstu-large")
    },
    **{
        (family, "deskdrop"): Tuned(tries=0, note=_SAME, settings=_DESKDROP)
        for family in ("hstu-wide", "sasrec-fair", "hstu-fair")
    },
}
"""(family, dataset) → tries. A family that is missing here is not tuned."""
