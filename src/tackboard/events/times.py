"""This module converts times in any usual form to milliseconds UTC.

The rules are also in docs/events.md. The magnitude of a number decides whether it means seconds, milliseconds,
microseconds or nanoseconds. Text is ISO 8601, and text without a zone means UTC. A time at or before 1970-01-01 is
unusable, because logs write zero for a missing time. A time in late 5138 or later is unusable, because its number of
seconds would be read as milliseconds. A column that mixes units raises DataError, because the right unit is unknown.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tackboard.core.errors import DataError
from tackboard.events.columns import Place, as_int64, in_row, is_text, plain, refuse_control, trimmed

UNITS = (("seconds", 1e11), ("milliseconds", 1e14), ("microseconds", 1e17), ("nanoseconds", np.inf))
"""Units with their upper bounds. A number has the first unit whose bound is above it. (1e11 s is in the year 5138.)"""
LATEST_MS = 10**14
"""Times of this number of ms (in the year 5138) or more are unusable."""
_LARGEST_NUMBER = float(1 << 63)
_NUMBER = r"^\s*\+?\d{1,19}(\.\d+)?\s*$"
_ISO = r"^\s*\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d([.,]\d{1,9})?)?)?\s*(Z|z|UTC|[+-]\d\d(:?\d\d)?)?\s*$"
_ZONE = r"\d\d:\d\d.*(Z|[+-]\d\d(:?\d\d)?)$"


@dataclasses.dataclass(frozen=True)
class Times:
    """The parsed times of a column. Each array has one value per row."""

    ms: NDArray[np.int64]
    """Milliseconds since 1970 UTC. If `good` is False for a row, its value is 0."""
    good: NDArray[np.bool_]
    unit: str
    """The unit or format of the column, in words."""


def parse_times(column: pa.ChunkedArray, name: str, place: Place = in_row) -> Times:
    """Parses a column of numbers, text, dates or timestamps.

    Mixed units and other types raise DataError, which names the `place` of a row.
    """
    column = plain(column)
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        # Arrow stores a timestamp with a zone in UTC. A timestamp without a zone is taken as UTC.
        moments = column.cast(pa.timestamp("ms")) if pa.types.is_date(kind) else column
        per_ms = {"s": 0.001, "ms": 1, "us": 1_000, "ns": 1_000_000}[moments.type.unit]
        raw = moments.cast(pa.int64())
        good = raw.is_valid().to_numpy()
        values = raw.fill_null(0).to_numpy()
        if per_ms < 1:
            # The values are clipped before the conversion, because an overflow could give a plausible time.
            return _checked(np.clip(values, 0, LATEST_MS) * 1000, good, "timestamps")
        return _checked(values if per_ms == 1 else values // per_ms, good, "timestamps")
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        good = column.is_valid().to_numpy()
        return _from_numbers(column.fill_null(0).to_numpy(), good, name, place)
    if is_text(kind):
        return _from_text(column.cast(pa.string()).fill_null(""), name, place)
    raise DataError(
        f"{place(0)}: the time column {name!r} has type {kind}", allowed="allowed: numbers, text, dates or timestamps"
    )


def parse_milliseconds(column: pa.ChunkedArray, name: str, place: Place = in_row) -> Times:
    """Parses a column of milliseconds. Unlike in `parse_times`, 0 and negative integers are usable.

    Text is usable if it is an integer of at most 18 digits. Columns of other types are passed to `parse_times`.
    """
    column = plain(column)
    if is_text(column.type):
        text = trimmed(column.cast(pa.string()))
        whole = pc.match_substring_regex(text, r"^-?\d{1,18}$")
        column = pc.if_else(whole, text, pa.scalar(None, pa.string())).cast(pa.int64())
    elif not pa.types.is_integer(column.type):
        return parse_times(column, name, place)
    ms = as_int64(column, name, place)
    return Times(ms=ms.fill_null(0).to_numpy(), good=ms.is_valid().to_numpy(), unit="milliseconds")


def _from_text(column: pa.ChunkedArray, name: str, place: Place) -> Times:
    is_number = pc.match_substring_regex(column, _NUMBER).to_numpy()
    is_iso = pc.match_substring_regex(column, _ISO).to_numpy()
    neither = ~(is_number | is_iso)
    if neither.any():
        # A text with a line break would count as one bad row, although it may contain many later rows of the file.
        refuse_control(column.filter(pa.array(neither)), name, _place_of(place, neither))
    if is_number.any() and is_iso.any():
        raise _mixed(name, place, {"numbers": int(is_number.argmax()), "ISO 8601 text": int(is_iso.argmax())})
    ms, good = np.zeros(len(column), dtype=np.int64), np.zeros(len(column), dtype=bool)
    if is_number.any():
        text = pc.utf8_trim_whitespace(column.filter(pa.array(is_number)))
        usable = np.ones(len(text), dtype=bool)
        times = _from_numbers(_numbers_of(text), usable, name, _place_of(place, is_number))
        ms[is_number], good[is_number] = times.ms, times.good
        return Times(ms=ms, good=good, unit=times.unit)
    if is_iso.any():
        text = pc.utf8_trim_whitespace(column.filter(pa.array(is_iso))).combine_chunks()
        text = pc.replace_substring_regex(text, r"\s*(UTC|z)$", "Z")
        text = pc.replace_substring(text, ",", ".")
        text = pc.replace_substring_regex(text, r"\s+(Z|[+-]\d\d(:?\d\d)?)$", r"\1")
        zoned = pc.match_substring_regex(text, _ZONE).to_numpy(zero_copy_only=False)
        part_ms, part_good = np.zeros(len(text), dtype=np.int64), np.zeros(len(text), dtype=bool)
        for mask, type_ in ((zoned, pa.timestamp("ns", "UTC")), (~zoned, pa.timestamp("ns"))):
            part_ms[mask], part_good[mask] = _cast_text(text.filter(pa.array(mask)), type_)
        ms[is_iso], good[is_iso] = part_ms, part_good
    return _checked(ms, good, "ISO 8601 text")


def _place_of(place: Place, chosen: NDArray[np.bool_]) -> Place:
    """Returns a function that takes n and returns the place of the n-th row that `chosen` marks."""
    rows = np.flatnonzero(chosen)
    return lambda row: place(int(rows[row]))


def _numbers_of(text: pa.ChunkedArray) -> NDArray[Any]:
    """Converts texts that are numbers to int64 if all of them are integers that fit, else to float64."""
    if not pc.any(pc.match_substring(text, ".")).as_py():
        # If a number does not fit into int64, the cast fails. All numbers then become floats; this number is unusable.
        with contextlib.suppress(pa.ArrowInvalid):
            return np.asarray(text.cast(pa.int64()).to_numpy())
    return np.asarray(text.cast(pa.float64()).to_numpy())


def _cast_text(text: pa.Array, type_: pa.DataType) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns the times of ISO texts in ms, and a mask of the valid texts.

    If one text has the right form but is not a date, such as 31 February, Arrow's cast of the whole block fails. A
    block that fails is halved until each bad text is in a block of its own.
    """
    if not len(text):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool)
    try:
        return text.cast(type_).cast(pa.int64()).to_numpy() // 1_000_000, np.ones(len(text), dtype=bool)
    except pa.ArrowInvalid:
        if len(text) == 1:
            return np.zeros(1, dtype=np.int64), np.zeros(1, dtype=bool)
    half = len(text) // 2
    parts = [_cast_text(part, type_) for part in (text.slice(0, half), text.slice(half))]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def _from_numbers(values: NDArray[Any], good: NDArray[np.bool_], name: str, place: Place) -> Times:
    with np.errstate(invalid="ignore"):
        good = good & (values > 0)
        if np.issubdtype(values.dtype, np.floating):
            good &= values < _LARGEST_NUMBER
    if not good.any():
        return Times(ms=np.zeros(len(values), dtype=np.int64), good=good, unit="numbers")
    usable = values if good.all() else values[good]
    bounds = np.array([bound for _, bound in UNITS[:-1]])
    lowest, highest = np.searchsorted(bounds, [float(usable.min()), float(usable.max())], side="right").tolist()
    if lowest != highest:
        units = np.searchsorted(bounds, usable.astype(np.float64), side="right")
        found, first = np.unique(units, return_index=True)
        rows = np.flatnonzero(good)[first]
        raise _mixed(name, place, {UNITS[unit][0]: int(row) for unit, row in zip(found, rows, strict=True)})
    whole = np.issubdtype(values.dtype, np.integer)
    if highest == 0:
        # The numbers are converted to 64 bits first, because 32 bits can hold seconds but not milliseconds.
        in_ms = usable.astype(np.int64) * 1000 if whole else np.round(usable * 1000.0)
    else:
        in_ms = usable if highest == 1 and whole else usable // 1000 ** (highest - 1)
    if len(usable) == len(values):
        return _checked(in_ms, good, UNITS[highest][0])
    ms = np.zeros(len(values), dtype=np.int64)
    ms[good] = in_ms
    return _checked(ms, good, UNITS[highest][0])


def _checked(ms: NDArray[Any], good: NDArray[np.bool_], unit: str) -> Times:
    ms = np.asarray(ms, dtype=np.int64)
    good = good & (ms > 0) & (ms < LATEST_MS)
    return Times(ms=ms if good.all() else np.where(good, ms, 0), good=good, unit=unit)


def _mixed(name: str, place: Place, first_rows: dict[str, int]) -> DataError:
    """Returns the error for a column that mixes units or formats. `first_rows` maps each unit or format to a row."""
    where = ", ".join(f"{unit} from {place(row)}" for unit, row in first_rows.items())
    return DataError(
        f"the time column {name!r} mixes {' and '.join(first_rows)}: {where}",
        allowed="allowed: one unit (seconds below 1e11, ms below 1e14, µs below 1e17, else ns) or ISO 8601 text",
        fix="convert the column to one unit, or to ISO 8601 text",
    )
