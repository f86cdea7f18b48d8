"""Trains the arms of a plan (the ways to rank that are compared) period by period, ranks the events of each period, and
compares the arms.

Models are trained with `tackboard train`, as a user would: `--continue` goes on with the run of the period before. All
arms rank the same events of the same users. The live head of the arm `continued, live` is fitted on the events of the
period before, with a model that was not trained on these events. If a period is a day, the scores of yesterday's model
for yesterday's events give the weights for today. The window of recent popularity is chosen on the period before, too.
Finished runs and ranks stay in the folder of the bench, so a second call continues from them.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.bench.daily.periods import DailyPlan, check_length, find_dataset, find_plan
from tackboard.bench.report import where_and_when
from tackboard.checkpoint.store import find_checkpoint
from tackboard.checkpoint.trained import STATE, load_trained, stored_parameters
from tackboard.core import keyed_random
from tackboard.core.errors import DataError
from tackboard.core.files import read_json, write_bytes_atomic, write_json_atomic
from tackboard.core.progress import say
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.source import open_sequences
from tackboard.data.time_split import HOUR_MS, shown_instant
from tackboard.evaluation.baselines import WINDOWS_H, RecentlySeen, RecentPopularity
from tackboard.evaluation.judged_events import JudgedEvents, events_between, first_seen
from tackboard.evaluation.live_counts import LiveCounts
from tackboard.evaluation.live_head import LiveFeatures, fit_live_head
from tackboard.evaluation.ranking import ScoreEvents, rank_model, target_ranks
from tackboard.events.dataset import open_dataset
from tackboard.features.feature_set import read_features
from tackboard.flow.command import run_command
from tackboard.flow.jobs import step_name
from tackboard.metrics.paired import gains, hits, paired_bootstrap
from tackboard.models.stored_parameters import restore_model
from tackboard.train.config import config_from_json

LIVE, COUNTED = "recent popularity, live", "recent popularity, frozen"
SEEN, ALONE = "recently seen", "live head without a model"
FROZEN, RETRAINED, CONTINUED, HEAD = "frozen", "retrained", "continued", "continued, live"
ARMS = (LIVE, COUNTED, SEEN, FROZEN, RETRAINED, CONTINUED, ALONE, HEAD)
USER_STREAM = 45
"""Random stream of the draw of judged users."""
NUM_FITTED = 1000
"""Largest number of events on which the head of a period is fitted."""
NUM_CHOOSING = 300
"""Largest number of these events on which the window of recent popularity is chosen."""
CHUNK = 64
TOP = 10
NUM_RESAMPLES = 1000
Ranks = NDArray[np.int64]


def measure(
    folder: Path,
    dataset: str,
    *,
    data: Path | None = None,
    periods: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
    quick: bool = False,
) -> dict[str, Any]:
    """Returns the result of all arms. Raises UsageError or DataError for a plan that does not fit the log."""
    plan = find_plan(dataset, periods=periods, tokens=tokens, quick=quick)
    folder.mkdir(parents=True, exist_ok=True)
    path = find_dataset(dataset, folder, data)
    first_ms, last_ms = (int(open_dataset(path, verify=False).statistics[name]) for name in ("first_ms", "last_ms"))
    check_length(plan, first_ms, last_ms)
    study = DailyStudy(plan, folder, path, plan.cuts(last_ms), seed)
    rows = [study.period(place) for place in range(plan.periods)]
    return {
        "bench": "daily",
        "quick": quick,
        "seed": seed,
        "plan": dataclasses.asdict(plan),
        "first_cut": shown_instant(study.cuts[0]),
        "end": shown_instant(study.cuts[-1]),
        "periods": rows,
        "arms": pooled([study.ranks(place)[0] for place in range(plan.periods)]),
        "training": study.costs(),
        **where_and_when(),
    }


class DailyStudy:
    """The runs and ranks of one plan in a folder."""

    def __init__(self, plan: DailyPlan, folder: Path, dataset: Path, cuts: list[int], seed: int) -> None:
        self.plan, self.folder, self.dataset, self.cuts, self.seed = plan, folder, dataset, cuts, seed
        self.period_ms = plan.hours * HOUR_MS
        self._judges: dict[str, PeriodJudge] = {}

    # ---- training ----

    def run_of(self, arm: str, place: int) -> Path:
        """Returns the run whose model an arm uses in a period, counted from 0. Trains the run if it does not exist yet.

        The first run of the arm `continued` has the place -1. Its training ends one period before the first cut.
        """
        plan, place = self.plan, 0 if arm == FROZEN else place
        share = {FROZEN: 1.0, RETRAINED: 1.0 / plan.periods}.get(arm, 0.5 if place < 0 else 0.5 / plan.periods)
        steps = max(1, round(plan.tokens * share / plan.tokens_per_step))
        settings = {
            "data.dataset": str(self.dataset),
            "data.split": "time",
            "data.cut": shown_instant(self.cuts[0] + place * self.period_ms),
            "data.tokens_per_step": plan.tokens_per_step,
            "training.steps": steps,
            "training.checkpoint_every": steps,
            "training.device": "cpu",
            "seed": self.seed,
        }
        words = [*plan.settings, *(f"{name}={value}" for name, value in settings.items())]
        arguments = ["train", plan.recipe, *(word for setting in words for word in ("--set", setting))]
        if arm == CONTINUED and place >= 0:
            arguments += ["--continue", str(self.run_of(arm, place - 1))]
        home = self.folder / step_name(f"{plan.dataset}-{arm}-{place}", {"arguments": arguments})
        if not (home / "train.json").exists():
            say(f"{plan.dataset}: training {arm}, period {place + 1} of {plan.periods}")
            home.mkdir(exist_ok=True)
            finished = run_command("train", [*arguments, "--runs", str(home), "--json"], log=home / "train.log")
            found = {name: finished.require(name) for name in ("run", "tokens", "final_loss")}
            write_json_atomic(home / "train.json", found | {"cpu_s": finished.cpu_seconds})
        return Path(read_json(home / "train.json")["run"])

    def costs(self) -> list[dict[str, Any]]:
        """Returns the tokens and the CPU time of each trained arm."""
        costs = []
        for arm in (FROZEN, RETRAINED, CONTINUED):
            places = range(-1 if arm == CONTINUED else 0, self.plan.periods)
            runs = {self.run_of(arm, place) for place in places}
            found = [read_json(run.parent / "train.json") for run in runs]
            tokens, cpu_s = (sum(one[name] for one in found) for name in ("tokens", "cpu_s"))
            costs.append({"arm": arm, "runs": len(runs), "tokens": tokens, "cpu_s": round(cpu_s, 1)})
        return costs

    # ---- judging ----

    def period(self, place: int) -> dict[str, Any]:
        """Judges all arms on a period; returns HR@10 and NDCG@10 of each, and facts about the period."""
        ranks, facts = self.ranks(place)
        figures = {
            arm: {"hr@10": float(hits(ranks[arm], TOP).mean()), "ndcg@10": float(gains(ranks[arm], TOP).mean())}
            for arm in ARMS
        }
        return {"begin": shown_instant(self.cuts[place]), **facts, "arms": figures}

    def ranks(self, place: int) -> tuple[dict[str, Ranks], dict[str, Any]]:
        """Returns the ranks of all arms in a period, with each judged event's user, and facts about the period."""
        name = step_name(f"{self.plan.dataset}-ranks", {"plan": dataclasses.asdict(self.plan), "seed": self.seed})
        file = self.folder / f"{name}-{place}.npz"
        if not file.with_suffix(".json").exists():
            arrays, facts = self._rank(place)
            buffer = io.BytesIO()
            np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
            write_bytes_atomic(file, buffer.getvalue())
            write_json_atomic(file.with_suffix(".json"), facts)
        with np.load(file, allow_pickle=False) as kept:
            return dict(kept), read_json(file.with_suffix(".json"))

    def _rank(self, place: int) -> tuple[dict[str, Ranks], dict[str, Any]]:
        begin, end = self.cuts[place], self.cuts[place + 1]
        before_ms = begin - self.period_ms
        runs = {arm: self.run_of(arm, place) for arm in (FROZEN, RETRAINED, CONTINUED)}
        yesterday = self.run_of(CONTINUED, place - 1)
        judge = self._judge_of(runs[CONTINUED])
        judged = judge.events(begin, end)
        if not len(judged):
            raise DataError(f"{self.plan.dataset} has no event to judge in the period from {shown_instant(begin)}")
        say(f"{self.plan.dataset}: judging period {place + 1} of {self.plan.periods}, {len(judged):,} events")
        fitted = judge.events(before_ms, begin, at_most=NUM_FITTED)
        choosing = judge.events(before_ms, begin, at_most=NUM_CHOOSING)
        live_h, live = judge.recent(choosing, known_until=begin)
        frozen_h, counted = judge.recent(choosing, known_until=begin, frozen=(before_ms, begin))
        counts = {LIVE: live, COUNTED: counted, SEEN: RecentlySeen(judge.sequences).score}
        ranks = {arm: judge.ranks(score, judged) for arm, score in counts.items()}
        for arm, run in runs.items():
            own = self._judge_of(run)
            ranks[arm] = own.ranks(own.model(run), judged)
        own = self._judge_of(yesterday)
        for arm, before, now in (
            (HEAD, own.model(yesterday), judge.model(runs[CONTINUED])),
            (ALONE, judge.no_model, judge.no_model),
        ):
            head = fit_live_head(own.features(before_ms), before, fitted)
            if head is None:
                raise DataError(f"{self.plan.dataset} has no event before {shown_instant(begin)} to fit the head on")
            ranks[arm] = judge.ranks(head.scores(judge.features(begin), now), judged)
        ages = judge.sequences.events.times[judged.events] - judge.appears_ms[judged.items(judge.sequences)]
        facts = {
            "num_events": len(judged),
            "num_users": len(np.unique(judged.users)),
            "never_seen_share": float((ages <= judge.sequences.events.times[judged.events] - begin).mean()),
            "item_age_h": float(np.median(ages) / HOUR_MS),
            "live_h": live_h,
            "frozen_h": frozen_h,
        }
        return {**ranks, "users": judged.users}, facts

    def _judge_of(self, run: Path) -> PeriodJudge:
        """Returns the judge for the names that a run knows. Judges are kept, because reading a large log takes long."""
        names = json.dumps(load_trained(find_checkpoint(run)).state["vocabulary"])
        if names not in self._judges:
            self._judges[names] = PeriodJudge(self.plan, self.dataset, run)
        return self._judges[names]


class PeriodJudge:
    """Ranks events of the whole log by models that know the same names of actions and surfaces."""

    def __init__(self, plan: DailyPlan, dataset: Path, run: Path) -> None:
        """`run` is one of the runs to judge."""
        self.plan = plan
        checkpoint = load_trained(find_checkpoint(run))
        features, names = read_features(checkpoint.path), Vocabulary.from_dict(checkpoint.state["vocabulary"])
        assert features is not None
        source = open_sequences(dataset, held_out=0, vocabulary=names, features=lambda _: features)
        self.sequences = source.read()
        self.appears_ms = first_seen(self.sequences)
        self.counts = LiveCounts.of(self.sequences)

    def events(self, begin_ms: int, end_ms: int, at_most: int | None = None) -> JudgedEvents:
        """Returns the judged events of a period, for users drawn by their ids. `at_most` limits their number."""
        judged = events_between(self.sequences, begin_ms, end_ms, self.plan.judged)
        users = np.unique(judged.users)
        draw = keyed_random.bits(0, USER_STREAM, self.sequences.user_ids[users])
        chosen = users[np.argsort(draw, kind="stable")[: self.plan.max_users]]
        judged = judged.take(np.flatnonzero(np.isin(judged.users, chosen)))
        if at_most is not None and len(judged) > at_most:
            judged = judged.take(np.linspace(0, len(judged) - 1, at_most).astype(np.int64))
        return judged

    def model(self, run: Path) -> ScoreEvents:
        """Returns the scores of a run's model. Items that it was not trained on get the lowest score."""
        checkpoint = load_trained(find_checkpoint(run))
        config = config_from_json(checkpoint.state["config"])
        names = Vocabulary.from_dict(checkpoint.state["vocabulary"])
        parameters = stored_parameters(checkpoint)
        model = restore_model(config.model, names, parameters, checkpoint.path / STATE, "cpu")
        known = self.appears_ms < checkpoint.state["lineage"]["until_ms"]
        return rank_model(model, self.sequences, config.model.tables, config.model.max_history, known=known)

    def no_model(self, judged: JudgedEvents) -> NDArray[np.float32]:
        """Returns zeros as the scores of all items."""
        return np.zeros((len(judged), len(self.appears_ms)), dtype=np.float32)

    def features(self, until_ms: int) -> LiveFeatures:
        """Returns the features of the head for a model that was trained on events before `until_ms`."""
        return LiveFeatures(self.sequences, self.counts, self.appears_ms, self.appears_ms < until_ms)

    def recent(
        self, choosing: JudgedEvents, *, known_until: int, frozen: tuple[int, int] | None = None
    ) -> tuple[float, ScoreEvents]:
        """Returns the window (in hours) that ranks `choosing` best, and recent popularity with this window.

        `frozen` holds the instants at which the counts end, for `choosing` and for the events to judge. If it is
        None, counts go on until each event.
        """
        trained = self.counts.window(known_until).at(known_until).astype(np.int64)
        rivals = {
            hours: [
                RecentPopularity(self.sequences, self.counts, trained, hours, frozen_ms=at).score
                for at in frozen or (None, None)
            ]
            for hours in WINDOWS_H
        }
        best = max(WINDOWS_H, key=lambda hours: float(hits(self.ranks(rivals[hours][0], choosing), TOP).mean()))
        return best, rivals[best][1]

    def ranks(self, score: ScoreEvents, judged: JudgedEvents) -> Ranks:
        """Returns the rank of each event's item among the items that had appeared."""
        return target_ranks(
            score, self.sequences, judged, filter_seen=False, chunk_users=CHUNK, appears_ms=self.appears_ms
        )


def _interval(mine: NDArray[np.float64], base: NDArray[np.float64]) -> list[float]:
    found = paired_bootstrap(mine, base, num_resamples=NUM_RESAMPLES)
    return [found.mean, found.low, found.high]


def pooled(periods: list[dict[str, Ranks]]) -> list[dict[str, Any]]:
    """Returns the figures of each arm over all periods, and its difference to live recent popularity.

    The figures are means over users; a user's figure is the mean over the user's judged events.
    """
    users = np.concatenate([period["users"] for period in periods])
    position = np.unique(users, return_inverse=True)[1]
    counts = np.bincount(position)

    def per_user(arm: str, measure: Callable[[Ranks, int], NDArray[np.float64]]) -> NDArray[np.float64]:
        values = np.concatenate([measure(period[arm], TOP) for period in periods])
        return np.asarray(np.bincount(position, weights=values) / counts)

    rows = []
    for arm in ARMS:
        row: dict[str, Any] = {"arm": arm}
        for name, measure in (("hr@10", hits), ("ndcg@10", gains)):
            mine, base = per_user(arm, measure), per_user(LIVE, measure)
            row[name] = float(mine.mean())
            if arm != LIVE:
                row[f"{name}_difference"] = _interval(mine, base)
            if arm == HEAD:
                row[f"{name}_over_alone"] = _interval(mine, per_user(ALONE, measure))
        row["periods_won"] = sum(
            bool(hits(period[arm], TOP).mean() > hits(period[LIVE], TOP).mean()) for period in periods
        )
        rows.append(row)
    return rows
