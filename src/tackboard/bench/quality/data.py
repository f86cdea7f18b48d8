"""Prepares public datasets for `tackboard bench quality`: turns a publisher's files into a dataset in which the order
of events is fixed.

A leave-one-out figure depends on which event of a user is the last. In MovieLens-1M, 42% of users have several events
in their last second. So the events of one user at one instant are ordered by a tie rule: file order (`file`), reverse
file order (`reverse`) or a seeded random order (`random`). In this order, 0, 1, 2, … ms are added to their times, so
every reader of the dataset sees the same order. A prepared dataset is one snapshot under WORK/datasets. The name of the
snapshot tells its content, so a run can continue on any machine that prepared the same files in the same way.

Decided: items are renumbered from 1 if the publisher's ids are not small numbers, so that every method can use a plain
table of one row per item. The publisher's id stays in the item table.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tackboard.core import keyed_random
from tackboard.core.config import did_you_mean
from tackboard.core.errors import DataError, UsageError
from tackboard.core.files import staging_directory
from tackboard.core.progress import say
from tackboard.events.dataset import open_dataset, write_dataset
from tackboard.events.public import listing
from tackboard.events.public.publisher import PublicData, PublicDataset, read_public
from tackboard.events.schema import encode, numpy_column, starts_of_users

Value = TypeVar("Value")
TIE_RULES = ("file", "reverse", "random")
TIE_SEED = 20261115
TIE_STREAM = 31
"""Random stream for the tie rule. No other draw uses this stream."""
SPARSE_IDS = 4
"""Integer ids are renumbered if the largest id is at least this many times the number of ids."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """The protocol and the sizes that are used for one public dataset."""

    name: str
    filter_seen: bool
    """If true, items of the history are taken out of the ranking."""
    max_length: int
    """A method reads at most this many events of a history."""
    max_users: int = 0
    """Rank at most this many users, the same users for every method; 0 ranks all users."""
    ties: tuple[str, ...] = TIE_RULES
    """Tie rules that make sense for the dataset. The first rule is the default."""
    quick_stride: int = 1
    """With `--quick`, only every n-th user is kept; this setting is n."""
    quick_max_users: int = 0
    """The value of `max_users` in a run with `--quick`; 0 leaves `max_users` unchanged."""
    instant: str = "second"
    """The unit of the publisher's times. Events with the same time are in the same second, or in the same hour."""
    note: str = ""
    """A note about the protocol, for the reader of the table."""

    @property
    def public(self) -> PublicDataset:
        return listing.find_public(self.name)


BENCHES = {
    bench.name: bench
    for bench in (
        Bench(
            name="ml-1m",
            filter_seen=True,
            max_length=200,
            quick_stride=6,
            note="All ratings are positives. The catalogue contains every film of movies.dat.",
        ),
        Bench(
            name="kakao-brunch",
            filter_seen=False,
            max_length=200,
            max_users=20_000,
            ties=("file",),
            quick_stride=150,
            quick_max_users=1_000,
            instant="hour",
            note="Users read articles again (one read in five is of the same article as the user's previous read), so "
            "the history stays in the ranking. Times are whole hours; reads of one hour keep the publisher's order.",
        ),
        Bench(
            name="deskdrop",
            filter_seen=False,
            max_length=200,
            ties=("file",),
            note="All actions are positives. Users return to the same article, so the history stays in the ranking.",
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class DatasetFacts:
    """Facts about a prepared dataset. A method may compute its sizes from these facts."""

    path: Path
    num_items: int
    """Number of items in the catalogue, including items without events."""
    num_rows: int
    """The largest id plus 1: the number of rows that a table with one row per id needs."""
    events_per_user: NDArray[np.int64]
    actions: tuple[str, ...]
    last_tied_share: float
    """Share of users with several events at their last instant. For these users the tie rule chooses the last event."""

    @property
    def num_users(self) -> int:
        return len(self.events_per_user)

    @property
    def num_events(self) -> int:
        return int(self.events_per_user.sum())

    def newest_tokens(self, max_length: int, held_out: int = 1) -> int:
        """Returns the number of training events if only the newest `max_length` events of each user are read."""
        return int(np.clip(self.events_per_user - held_out, 0, max_length).sum())


def find_bench(name: str) -> Bench:
    """Returns the dataset with this name."""
    return of_dataset(name, BENCHES)


def of_dataset(name: str, known: Mapping[str, Value]) -> Value:
    """Returns the entry of a dataset. An unknown name raises UsageError, which suggests the closest name."""
    if name not in known:
        raise UsageError(
            f"--dataset {name} does not exist",
            allowed=f"allowed: {', '.join(known)}",
            fix=did_you_mean(name, known),
        )
    return known[name]


def prepared_name(bench: Bench, ties: str, stride: int = 1) -> str:
    """Returns the name of a prepared dataset: its source, its tie rule, and its stride if users were left out."""
    return f"{bench.name}-{ties}" + (f"-every{stride}" if stride > 1 else "")


def prepare(bench: Bench, rules: Sequence[str], datasets: Path, data: Path | None, stride: int = 1) -> dict[str, Path]:
    """Returns tie rule → path of the prepared dataset. Makes missing datasets from the files in `data`.

    The files are first read and compared with the published counts of users, items and events. Nothing is written
    before this check, not even the folder `datasets`.
    """
    check_ties(bench, rules)
    paths = {rule: datasets / prepared_name(bench, rule, stride) for rule in rules}
    missing = [rule for rule, path in paths.items() if not path.exists()]
    if not missing:
        return paths
    whole = read_public(bench.public, find_files(bench.public, data))
    content = every_nth_user(whole, stride)
    events, items = renumber_items(content.events, content.items)
    about = {"kind": "public", "dataset": bench.name, "every_nth_user": stride}
    about["last_tied_share"] = round(last_tied_share(events), 4)
    datasets.mkdir(parents=True, exist_ok=True)
    for rule in missing:
        say(f"preparing {paths[rule].name}")
        with staging_directory(paths[rule]) as making:
            snapshot = write_dataset(
                making,
                bench.name,
                settle_ties(events, rule),
                item_attributes=items,
                user_attributes=content.users,
                source=about | {"ties": rule},
            )
            if not paths[rule].exists():
                os.rename(snapshot, paths[rule])
    return paths


def check_ties(bench: Bench, rules: Sequence[str]) -> None:
    """Raises UsageError if a tie rule does not exist or makes no sense for the dataset."""
    for rule in rules:
        if rule not in bench.ties:
            raise UsageError(
                f"--ties {rule} does not fit {bench.name}",
                allowed=f"allowed: {', '.join(bench.ties)}",
                fix=did_you_mean(rule, bench.ties),
            )


def expected_facts(bench: Bench, stride: int = 1) -> DatasetFacts:
    """Estimates the result of `read_facts` from the publisher's counts, so that cells can be planned without data."""
    counts = bench.public.counts
    lengths = np.full(max(1, counts.users // stride), max(1, counts.events // counts.users), dtype=np.int64)
    return DatasetFacts(Path(), counts.items, counts.items + 1, lengths, (), 0.0)


def read_facts(path: Path) -> DatasetFacts:
    """Reads the facts of a prepared dataset."""
    dataset = open_dataset(path, verify=False)
    counts = numpy_column(dataset.read_users(["num_events"]), "num_events")
    items = numpy_column(dataset.read_items(["item_id"]), "item_id")
    return DatasetFacts(
        path=path,
        num_items=len(items),
        num_rows=int(items.max()) + 1,
        events_per_user=counts[counts > 0],
        actions=tuple(dataset.actions),
        last_tied_share=float(dataset.manifest["source"]["last_tied_share"]),
    )


def find_files(public: PublicDataset, data: Path | None) -> list[Path]:
    """Finds the downloaded files. `data` is a file, the folder of the dataset, or a folder that holds that folder."""
    where = {"allowed": f"needed: {public.files}", "fix": f"download it from {public.source}"}
    if data is None:
        raise UsageError(f"the files of {public.name} are not given: use --data DIR or set TACKBOARD_DATA", **where)
    if not data.exists():
        raise UsageError(f"--data {data} does not exist", **where)
    if data.is_file():
        return [data]
    folder = data / public.name if (data / public.name).is_dir() else data
    archives = sorted(folder.glob("*.zip"))
    if not archives and not any(path.is_file() for path in folder.rglob("*")):
        raise UsageError(f"{folder} is empty", **where)
    return archives or [folder]


def every_nth_user(content: PublicData, stride: int) -> PublicData:
    """Keeps all items, and the events and attributes of every `stride`-th user in the order of user ids."""
    if stride == 1:
        return content
    kept = pa.array(distinct_ids(content.events["user"])[::stride])

    def of_kept(table: pa.Table) -> pa.Table:
        column = table["user"] if pa.types.is_integer(table["user"].type) else table["user"].cast(pa.string())
        return table.filter(pc.is_in(column, value_set=kept))

    users = None if content.users is None else of_kept(content.users)
    return PublicData(events=of_kept(content.events), items=content.items, users=users)


def distinct_ids(column: pa.ChunkedArray) -> list[Any]:
    """Returns the distinct ids of a column, sorted."""
    if pa.types.is_integer(column.type):
        found: list[Any] = np.unique(column.to_numpy()).tolist()
        return found
    array = encode(column)
    return sorted(array.dictionary.take(pc.unique(array.indices)).to_pylist())


def settle_ties(events: pa.Table, rule: str) -> pa.Table:
    """Adds 0, 1, 2, … ms to events of one user at one instant, in the order of `rule`, to make all times differ."""
    users = _codes(events["user"])
    times, order = numpy_column(events, "time_ms"), numpy_column(events, "order")
    by_time = np.lexsort((order, times, users))
    same_user = users[by_time][1:] == users[by_time][:-1]
    is_tied = same_user & (times[by_time][1:] == times[by_time][:-1])
    starts = np.flatnonzero(np.append(True, ~is_tied))[: len(users)]
    group = np.cumsum(np.append(True, ~is_tied))[: len(users)] - 1
    if rule == "reverse":
        by_rule = by_time[np.lexsort((-order[by_time], group))]
    elif rule == "random":
        by_rule = by_time[np.lexsort((keyed_random.bits(TIE_SEED, TIE_STREAM, order[by_time]), group))]
    else:
        by_rule = by_time
    settled = times.copy()
    settled[by_rule] += np.arange(len(users)) - starts[group]
    if len(users) and not (np.diff(settled[by_rule]) > 0)[same_user].all():
        raise DataError(
            "a user has more events at one instant than there are ms until the user's next instant with an event",
            allowed="allowed: one event per ms",
        )
    column = pa.array(settled)
    for name in ("time_ms", "received_ms"):
        events = events.set_column(events.schema.get_field_index(name), name, column)
    return events


def renumber_items(events: pa.Table, items: pa.Table | None) -> tuple[pa.Table, pa.Table | None]:
    """Returns both tables with items numbered from 1, unless the ids are already small numbers."""
    listed = [] if items is None else items["item"].to_pylist()
    published = sorted({*distinct_ids(events["item"]), *listed})
    if not published or (
        isinstance(published[0], int) and published[0] >= 0 and published[-1] < SPARSE_IDS * len(published)
    ):
        return events, items
    ids = pa.array(published)
    table = items if items is not None else pa.table({"item": ids})
    table = table.append_column("published_item", table["item"].cast(pa.string()))
    return _renumbered(events, ids), _renumbered(table, ids)


def _renumbered(table: pa.Table, ids: pa.Array) -> pa.Table:
    """Returns `table` with each item replaced by its position in `ids`, counted from 1."""
    column = table["item"]
    plain = column if pa.types.is_integer(column.type) else column.cast(pa.string())
    places = pc.add(pc.index_in(plain, value_set=ids).cast(pa.int64()), 1)
    return table.set_column(table.schema.get_field_index("item"), "item", places)


def _codes(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Returns a number for each row. Two numbers are equal if and only if the ids of the rows are equal."""
    if pa.types.is_integer(column.type):
        return np.asarray(column.to_numpy(), dtype=np.int64)
    return np.asarray(encode(column).indices.to_numpy(), dtype=np.int64)


def last_tied_share(events: pa.Table) -> float:
    """Returns the share of users with more than one event at their last instant, before a tie rule changes times."""
    users, times = _codes(events["user"]), numpy_column(events, "time_ms")
    by_time = np.lexsort((times, users))
    users, times = users[by_time], times[by_time]
    ends = np.append(starts_of_users(users)[1:], len(users)) - 1
    tied = (ends > 0) & (users[ends - 1] == users[ends]) & (times[ends - 1] == times[ends])
    return float(tied.mean()) if len(ends) else 0.0
