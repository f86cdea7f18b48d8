"""Operators on times: seconds between two times, and the hour, weekday and minute of the day in a time zone.

The kernels take time columns, in ms since 1970 in UTC, and return floats and ints.

Decided: time zones come only from the package `tzdata`. The function `database_version` returns the version of this
package. The machine's own /usr/share/zoneinfo is never read, because then two machines could compute different hours
for the same row. Each zone is read once into two arrays, transitions and offsets. A binary search finds the offset of a
time. The last rule of a zone is valid forever. The transitions of this rule are written out for 400 years, because
after 400 years the Gregorian calendar repeats itself, weekdays included. A time after these 400 years is moved back by
a multiple of 400 years before the lookup. A time before the first transition gets the first offset of the zone. So
every int64 time has an hour.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import functools
import importlib
import importlib.resources
import re
import struct

import numpy as np
from numpy.typing import NDArray

from tackboard.core.errors import DataError, UsageError
from tackboard.features.column import Column
from tackboard.features.kernels.arithmetic import joined
from tackboard.features.operators import Example, Params, TypeClash, gives, register
from tackboard.features.types import FLOAT, INT

DAY_S = 86_400
CYCLE_YEARS = 400
CYCLE_S = 146_097 * DAY_S
"""400 Gregorian years in seconds. This is a whole number of weeks, so "the last Sunday in March" repeats exactly."""
EPOCH_DAY = datetime.date(1970, 1, 1).toordinal()
EPOCH_WEEKDAY = 3
"""The weekday of 1 January 1970, which was a Thursday (Monday is 0)."""

_HEADER = struct.Struct(">4sc15x6l")
_KIND = np.dtype([("offset_s", ">i4"), ("is_dst", "u1"), ("name", "u1")])
_NAME = r"(?:[A-Za-z]{3,}|<[A-Za-z0-9+-]+>)"
_TIME = r"[+-]?\d{1,3}(?::\d{2}){0,2}"
_DATE = r"M\d{1,2}\.\d\.\d|J?\d{1,3}"
_RULE = re.compile(
    rf"{_NAME}(?P<standard>{_TIME})"
    rf"(?:{_NAME}(?P<summer>{_TIME})?,(?P<start>{_DATE})(?:/(?P<start_time>{_TIME}))?"
    rf",(?P<end>{_DATE})(?:/(?P<end_time>{_TIME}))?)?"
)
_register = functools.partial(register, family="time", elementwise=True)


@dataclasses.dataclass(frozen=True)
class Zone:
    """The offsets of one time zone from UTC, in seconds. Offsets to the east are positive.

    `offsets_s[i]` is valid from `transitions_s[i - 1]` until just before `transitions_s[i]`, so there is one more
    offset than there are transitions. From `cycle_start_s` on, the offsets repeat every `CYCLE_S`. The transitions
    cover the first cycle.
    """

    transitions_s: NDArray[np.int64]
    offsets_s: NDArray[np.int64]
    cycle_start_s: int

    def local_seconds(self, times_ms: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the local time of the zone, in whole seconds since 1970, for times in ms since 1970 in UTC."""
        if len(times_ms) == 1:
            return np.array([self._local_second(int(times_ms[0]) // 1000)], dtype=np.int64)
        seconds: NDArray[np.int64] = times_ms // 1000
        if len(self.transitions_s) == 0:
            return seconds + int(self.offsets_s[0])
        lookup = seconds
        late = seconds >= self.cycle_start_s + CYCLE_S
        if late.any():
            lookup = np.where(late, self.cycle_start_s + (seconds - self.cycle_start_s) % CYCLE_S, seconds)
        offsets_s: NDArray[np.int64] = self.offsets_s[np.searchsorted(self.transitions_s, lookup, side="right")]
        return seconds + offsets_s

    def _local_second(self, second: int) -> int:
        """Does the work of `local_seconds` for one time. For one time, plain ints are much faster than arrays."""
        lookup = second
        if second >= self.cycle_start_s + CYCLE_S:
            lookup = self.cycle_start_s + (second - self.cycle_start_s) % CYCLE_S
        return second + int(self.offsets_s[self.transitions_s.searchsorted(lookup, side="right")])


def database_version() -> str:
    """Returns the version of the installed tzdata, such as 2026.6. Every hour and weekday depends on this version."""
    try:
        return str(importlib.import_module("tzdata").__version__)
    except ModuleNotFoundError:
        raise UsageError(
            "the package tzdata is not installed, and time zones come only from this package", fix="make install"
        ) from None


@functools.cache
def zone_names() -> frozenset[str]:
    """Returns the names of all time zones in tzdata, such as Europe/Berlin."""
    database_version()
    return frozenset((importlib.resources.files("tzdata") / "zones").read_text(encoding="utf-8").split())


@functools.cache
def zone(name: str) -> Zone:
    """Returns the time zone of an IANA name, read once per process. Raises TypeClash for an unknown name."""
    # The name becomes part of a path below, so only a listed name may pass.
    if name not in zone_names():
        raise TypeClash(
            f"{name[:80]!r} is not a time zone of tzdata {database_version()}",
            allowed="it takes an IANA name, such as 'Europe/Berlin' or 'UTC'",
            fix=f"did you mean {_nearest(name)!r}?",
        )
    path = importlib.resources.files("tzdata").joinpath("zoneinfo", *name.split("/"))
    return parse_zone(path.read_bytes())


def parse_zone(data: bytes) -> Zone:
    """Reads a TZif file (RFC 9636) of version 2 or newer. Raises DataError if `data` is anything else."""
    try:
        magic, version, *counts = _HEADER.unpack_from(data, 0)
        if magic != b"TZif" or version < b"2":
            raise DataError("the time zone file is not TZif of version 2 or newer")
        # The first block is a 32-bit copy of the second block.
        second = _HEADER.size + _block_bytes(counts, time_bytes=4)
        counts = list(_HEADER.unpack_from(data, second)[2:])
        num_times, num_kinds = counts[3], counts[4]
        at = second + _HEADER.size
        times = np.frombuffer(data, ">i8", num_times, at).astype(np.int64)
        chosen = np.frombuffer(data, "u1", num_times, at + 8 * num_times)
        kinds = np.frombuffer(data, _KIND, num_kinds, at + 9 * num_times)
        footer = data[at + _block_bytes(counts, time_bytes=8) :].decode("ascii").strip("\n")
        kind_offsets_s = kinds["offset_s"].astype(np.int64)
        offsets_s = np.concatenate([kind_offsets_s[:1], kind_offsets_s[chosen]])
    except (struct.error, ValueError, IndexError) as problem:
        raise DataError(f"the time zone file cannot be read: {problem}") from None
    return _with_rule(times, offsets_s, footer)


def _block_bytes(counts: list[int], *, time_bytes: int) -> int:
    num_ut, num_standard, num_leaps, num_times, num_kinds, num_chars = counts
    leaps = num_leaps * (time_bytes + 4)
    return num_times * (time_bytes + 1) + num_kinds * _KIND.itemsize + num_chars + leaps + num_standard + num_ut


def _with_rule(times: NDArray[np.int64], offsets_s: NDArray[np.int64], footer: str) -> Zone:
    """Returns a zone with the listed transitions, followed by those of the rule in `footer` (POSIX TZ, or empty)."""
    # If a file lists no transitions, its rule is valid from 1970 on. In tzdata, these rules have no summer time.
    last = times[-1] if len(times) else np.int64(-1)
    year = 1970 + int(last.astype("datetime64[s]").astype("datetime64[Y]").astype(np.int64))
    cycle_start_s = (datetime.date(year + 1, 1, 1).toordinal() - EPOCH_DAY) * DAY_S
    rule = _RULE.fullmatch(footer)
    if footer and rule is None:
        raise DataError(f"the time zone file ends with {footer[:80]!r}, which is not a POSIX TZ rule")
    if rule is None or rule["start"] is None:
        # A rule without summer time adds nothing: the last listed offset is already the offset of that rule.
        return Zone(times, offsets_s, cycle_start_s)
    # In POSIX, offsets to the west are positive.
    standard_s = -_seconds(rule["standard"])
    summer_s = standard_s + 3600 if rule["summer"] is None else -_seconds(rule["summer"])
    start_s, end_s = _seconds(rule["start_time"] or "2"), _seconds(rule["end_time"] or "2")
    later: list[tuple[int, int]] = []
    for each_year in range(year, year + CYCLE_YEARS + 2):
        later.append((_day(each_year, rule["start"]) * DAY_S + start_s - standard_s, summer_s))
        later.append((_day(each_year, rule["end"]) * DAY_S + end_s - summer_s, standard_s))
    table = np.array(sorted(later), dtype=np.int64)
    if len(times):
        table = table[table[:, 0] > last]
    return Zone(np.concatenate([times, table[:, 0]]), np.concatenate([offsets_s, table[:, 1]]), cycle_start_s)


def _seconds(text: str) -> int:
    """Converts a text of the form [+-]h[:mm[:ss]] to seconds; hours may be above 24."""
    hours, minutes, seconds = [*(int(part) for part in text.lstrip("+-").split(":")), 0, 0][:3]
    return (-1 if text.startswith("-") else 1) * (hours * 3600 + minutes * 60 + seconds)


def _day(year: int, date: str) -> int:
    """Returns the number of days from 1 January 1970 to a POSIX date in `year`.

    A date is M<month>.<week>.<weekday>, J1 to J365 (29 February is not counted), or 0 to 365 (29 February counts).
    """
    january = datetime.date(year, 1, 1).toordinal() - EPOCH_DAY
    if date.startswith("J"):
        leap_day = _days_of_month(year, 2) == 29 and int(date[1:]) >= 60
        return january + int(date[1:]) - 1 + leap_day
    if not date.startswith("M"):
        return january + int(date)
    month, week, weekday = (int(part) for part in date[1:].split("."))
    first = datetime.date(year, month, 1)
    day = (weekday - first.isoweekday()) % 7 + 7 * (week - 1)
    if day >= _days_of_month(year, month):  # week 5 means the last week
        day -= 7
    return first.toordinal() - EPOCH_DAY + day


def _days_of_month(year: int, month: int) -> int:
    after = datetime.date(year + month // 12, month % 12 + 1, 1)
    return (after - datetime.date(year, month, 1)).days


def _nearest(name: str) -> str:
    """Returns the zone that the user most likely meant by a mistyped name or by a city without its region."""
    given = name[:80].strip().replace(" ", "_").lower()
    by_text: dict[str, str] = {}
    for known in sorted(zone_names()):
        by_text[known.lower()] = known
        by_text.setdefault(known.rpartition("/")[2].lower(), known)
    near = difflib.get_close_matches(given, by_text, n=1, cutoff=0.5)
    return by_text[near[0]] if near else "UTC"


def _check_zone(params: Params) -> None:
    name = params.get("zone")
    if not isinstance(name, str):
        raise TypeClash(
            f"its time zone is {str(name)[:80]!r}", allowed="it takes an IANA name, such as 'Europe/Berlin' or 'UTC'"
        )
    zone(name)


@_register(
    "seconds_since",
    "a.seconds_since(b)",
    gives(FLOAT, ("time",), ("time",)),
    Example(
        "a.seconds_since(b)", [60.5, -0.25, None], {"a": ("time", [90_500, 0, 0]), "b": ("time?", [30_000, 250, None])}
    ),
)
def seconds_since(a: Column, b: Column) -> Column:
    """The seconds from `b` to `a`, negative if `a` is earlier. Missing if either time is missing.

    The difference is computed as a 64-bit number of milliseconds, which wraps around beyond 292 million years.
    """
    seconds = (a.values - b.values) / 1000.0
    return joined(FLOAT, seconds, a, b)


# The example: Berlin on 31 March 2024, the last ms before summer time (01:59) and the first ms of summer time (03:00).
@_register(
    "hour",
    "t.hour(zone)",
    gives(INT, ("time",), check=_check_zone),
    Example('t.hour("Europe/Berlin")', [1, 3, None], {"t": ("time?", [1_711_846_799_999, 1_711_846_800_000, None])}),
)
def hour(a: Column, *, zone: str) -> Column:
    """The hour of the day, 0 to 23, on a clock in the time zone `zone`, summer time included.

    Missing stays missing.
    """
    return Column(INT, _local_seconds(a, zone) // 3600 % 24, present=a.present)


# The first time of the example is 00:00 UTC on Thursday 1 January 1970, when it was still Wednesday in New York.
@_register(
    "weekday",
    "t.weekday(zone)",
    gives(INT, ("time",), check=_check_zone),
    Example('t.weekday("America/New_York")', [2, 3, None], {"t": ("time?", [0, 5 * 3_600_000, None])}),
)
def weekday(a: Column, *, zone: str) -> Column:
    """The day of the week in the time zone `zone`: Monday is 0, Sunday is 6. Missing stays missing."""
    return Column(INT, (_local_seconds(a, zone) // DAY_S + EPOCH_WEEKDAY) % 7, present=a.present)


@_register(
    "minute_of_day",
    "t.minute_of_day(zone)",
    gives(INT, ("time",), check=_check_zone),
    Example(
        't.minute_of_day("Asia/Kathmandu")',
        [238, 0, None],
        {"t": ("time?", [1_700_000_000_000, 1_699_985_700_000, None])},
    ),
)
def minute_of_day(a: Column, *, zone: str) -> Column:
    """The minutes from 00:00 to the local time in the time zone `zone`, 0 to 1439. Missing stays missing.

    Local time jumps when summer time begins and ends, and so does this number.
    """
    return Column(INT, _local_seconds(a, zone) // 60 % 1440, present=a.present)


def _local_seconds(column: Column, name: str) -> NDArray[np.int64]:
    return zone(name).local_seconds(column.values)
