"""Turns numbers into charts as inline SVG, without any library.

A report must open in ten years, in a mail client and without a network. So a chart here is plain SVG text: no script,
no web font, no plotting library. Colours are CSS variables with a fallback. So the page decides between light and dark,
and a chart that is saved as a separate file still has colours. Series differ in luminance as well as in hue (palette of
Okabe and Ito), and every chart has a title and a description for a screen reader.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

Tone = Literal["accent", "second", "third", "strong", "soft", "raw"]

# Maps each tone to the CSS variable that the page defines, and to the colour in a chart that is saved on its own.
TONES: dict[Tone, tuple[str, str]] = {
    "accent": ("--chart-accent", "#0072b2"),
    "second": ("--chart-second", "#e69f00"),
    "third": ("--chart-third", "#009e73"),
    "strong": ("--chart-strong", "#6b7785"),
    "soft": ("--chart-soft", "#b4bdc7"),
    "raw": ("--chart-raw", "#9ecae8"),
}
SERIES_TONES: tuple[Tone, ...] = ("accent", "second", "third", "strong", "soft")
INK = "var(--ink, #1b1f24)"
MUTED = "var(--muted, #5c6773)"
GRID = "var(--grid, #e3e7eb)"
FONT_SIZE = 13
# Width of one character as a share of the font size. This is exact enough to place labels without measuring a font.
CHARACTER_WIDTH = 0.56
BOLD_CHARACTER_WIDTH = 0.72


@dataclass(frozen=True)
class Svg:
    """Markup made in this module. It is the only text that a page takes without escaping it."""

    markup: str

    @property
    def document(self) -> str:
        """The chart as the text of a separate file. Image viewers recognise the file by its namespace."""
        return self.markup.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" style="background: white" ', 1)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series of a line chart. Points that are not finite, or not above zero on a log axis, break the line."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    tone: Tone | None = None
    """The colour. If it is None, the position of the series in the chart decides the colour."""
    width: float = 2.0
    """Stroke width in pixels."""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """One series of a grouped bar chart, with one value per group."""

    name: str
    values: Sequence[float]
    tone: Tone | None = None


@dataclass(frozen=True, kw_only=True)
class Dots:
    """One row of a dot chart, which shows repeated measurements of the same quantity."""

    name: str
    values: Sequence[float]
    tone: Tone = "accent"


@dataclass(frozen=True, kw_only=True)
class MatrixRow:
    """One row of a matrix: its name, the anchor that it links to, and its marks on either side of the name.

    `left` and `right` map a column to True for a full mark, or to False for a hollow mark.
    """

    name: str
    anchor: str
    left: Mapping[int, bool]
    right: Mapping[int, bool]


@dataclass(frozen=True)
class _Axis:
    """A scale from data to pixels, and its ticks."""

    low: float
    high: float
    start: float
    end: float
    log: bool
    ticks: list[float] = field(default_factory=list)

    def place(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        position = math.log10(value) if self.log else value
        return self.start + (position - low) / (high - low) * (self.end - self.start)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns about ``count`` ticks that cover [low, high], at a distance of 1, 2 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"an axis needs finite limits, got {low} and {high}")
    if high < low:
        low, high = high, low
    if high == low:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / max(1, count)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1.0, 2.0, 5.0, 10.0) if factor * magnitude >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Ticks are multiples of the step and not running sums, because 0.1 + 0.1 + 0.1 is 0.30000000000000004.
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Returns ticks of a log axis over [low, high]. Both limits must be above zero.

    Ticks are powers of ten, and also 2 and 5 times these powers if the axis spans at most three powers of ten.
    """
    if not 0 < low <= high:
        raise ValueError(f"a logarithmic axis needs values above zero, got {low} to {high}")
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    powers = [10.0**exponent for exponent in range(first, last + 1)]
    if last - first > 3:
        return powers
    dense = sorted(factor * power for power in powers for factor in (1.0, 2.0, 5.0))
    begin = max(value for value in dense if value <= low * (1 + 1e-9))
    finish = min((value for value in dense if value >= high * (1 - 1e-9)), default=powers[-1])
    return [value for value in dense if begin <= value <= finish]


def format_number(value: float) -> str:
    """Formats a number in a short form, such as 1,200 or 0.05 or 3.1e+07, without digits of rounding noise."""
    if value == 0:
        return "0"
    if abs(value) >= 1e7 or abs(value) < 1e-4:
        return f"{value:.2g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def clean(text: str) -> str:
    """Escapes text for HTML and SVG, quotes included. "://" becomes an entity, so that no literal address remains."""
    return escape(text).replace("://", "&#58;//")


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    description: str,
    x_label: str,
    y_label: str,
    width: int = 900,
    height: int = 320,
    log_x: bool = False,
    log_y: bool = False,
) -> Svg:
    """Draws lines over a common pair of axes.

    Raises ValueError if no point can be drawn: points must be finite, and above zero on a log axis.
    """
    points = [
        (float(x), float(y))
        for line in lines
        for x, y in zip(line.x, line.y, strict=True)
        if _drawable(x, y, log_x=log_x, log_y=log_y)
    ]
    if not points:
        raise ValueError(f"chart {title!r} has no point that can be drawn")
    legend_height = 26 if len(lines) > 1 else 0
    top, bottom = 14 + legend_height, height - 46
    y_axis = _axis([y for _, y in points], bottom, top, count=5, log=log_y)
    left = 34 + max(len(format_number(tick)) for tick in y_axis.ticks) * FONT_SIZE * CHARACTER_WIDTH
    x_axis = _axis([x for x, _ in points], left, width - 16, count=7, log=log_x, tight=True)
    parts = [*_grid(y_axis, left, width - 16, y_label), *_scale(x_axis, bottom, height, x_label)]
    tones = [line.tone or SERIES_TONES[index % len(SERIES_TONES)] for index, line in enumerate(lines)]
    for line, tone in zip(lines, tones, strict=True):
        path = _path(line, x_axis, y_axis)
        if path:
            parts.append(
                f'<path d="{path}" fill="none" stroke="{_colour(tone)}" stroke-width="{line.width:g}" '
                'stroke-linejoin="round" stroke-linecap="round"/>'
            )
    if legend_height:
        parts.append(_legend([line.name for line in lines], tones, left, 16))
    return _chart(parts, width, height, title, description)


def bar_chart(
    groups: Sequence[str],
    bars: Sequence[Bars],
    *,
    title: str,
    description: str,
    x_label: str,
    width: int = 900,
    value_format: str = "{:.3f}",
) -> Svg:
    """Draws horizontal bars in groups, each with its value. Raises ValueError if a value is negative or not finite."""
    for series in bars:
        if len(series.values) != len(groups):
            raise ValueError(f"series {series.name!r} has {len(series.values)} values for {len(groups)} groups")
        if any(not math.isfinite(value) or value < 0 for value in series.values):
            raise ValueError(f"series {series.name!r} of chart {title!r} has a value that is negative or not finite")
    if not groups or not bars:
        raise ValueError(f"chart {title!r} has nothing to draw")
    bar_height, gap, group_gap, top = 17, 3, 16, 40
    group_height = len(bars) * (bar_height + gap) + group_gap
    bottom = top + group_height * len(groups) - group_gap + 8
    height = bottom + 46
    left = 24 + max(len(group) for group in groups) * FONT_SIZE * BOLD_CHARACTER_WIDTH
    labels = [[value_format.format(value) for value in series.values] for series in bars]
    right = width - 10 - max(len(text) for row in labels for text in row) * FONT_SIZE * BOLD_CHARACTER_WIDTH
    axis = _axis([0.0, max(1e-12, *(value for series in bars for value in series.values))], left, right, count=6)
    parts = _columns(axis, top - 6, bottom)
    tones = [series.tone or SERIES_TONES[index % len(SERIES_TONES)] for index, series in enumerate(bars)]
    for group_index, group in enumerate(groups):
        start = top + group_index * group_height
        middle = start + (group_height - group_gap - gap) / 2
        parts.append(_text(left - 10, middle + 4.5, group, anchor="end", fill=INK, weight=600))
        for index, series in enumerate(bars):
            y = start + index * (bar_height + gap)
            length = axis.place(series.values[group_index]) - left
            parts.append(
                f'<rect x="{left:.1f}" y="{y:.1f}" width="{max(length, 0.5):.1f}" height="{bar_height}" rx="2" '
                f'fill="{_colour(tones[index])}"/>'
            )
            bold = tones[index] == "accent"
            parts.append(
                _text(
                    left + length + 6,
                    y + 13,
                    labels[index][group_index],
                    fill=INK if bold else MUTED,
                    weight=600 if bold else 400,
                )
            )
    parts.append(_rule(left, top - 6, left, bottom, MUTED))
    parts.append(_text((left + right) / 2, height - 8, x_label, anchor="middle", fill=MUTED))
    parts.append(_legend([series.name for series in bars], tones, left, 16))
    return _chart(parts, width, height, title, description)


def dot_chart(
    rows: Sequence[Dots],
    *,
    title: str,
    description: str,
    x_label: str,
    marks: Mapping[str, float] | None = None,
    width: int = 900,
) -> Svg:
    """Draws the values of each row as dots, and their mean as a stroke, over one axis for all rows.

    `marks` holds named values for comparison, which are drawn as dashed lines. Raises ValueError if there are no rows,
    if a row has no values, or if a value is not finite.
    """
    marks = marks or {}
    values = [float(value) for row in rows for value in row.values] + list(marks.values())
    if not rows or not all(row.values for row in rows) or any(not math.isfinite(value) for value in values):
        raise ValueError(f"chart {title!r} needs rows of finite values")
    step, top = 26, 16 + 17 * len(marks)
    bottom = top + step * len(rows) + 8
    left = 24 + max(len(row.name) for row in rows) * FONT_SIZE * BOLD_CHARACTER_WIDTH
    # The label of the last tick is centred on the end of the axis, so half of the label needs room to the right.
    right = width - 24
    axis = _axis(values, left, right, count=8)
    parts = _columns(axis, top, bottom)
    for number, (name, value) in enumerate(sorted(marks.items(), key=lambda mark: mark[1])):
        parts += _mark(axis.place(value), number, bottom, f"{name} {format_number(value)}", right=right)
    for number, row in enumerate(rows):
        y, colour = top + step * (number + 0.5), _colour(row.tone)
        mean = axis.place(sum(row.values) / len(row.values))
        parts.append(_text(left - 10, y + 4.5, row.name, anchor="end", weight=600))
        parts.append(f'<rect x="{mean - 1:.1f}" y="{y - 9:.1f}" width="2" height="18" fill="{INK}"/>')
        for value in row.values:
            x = axis.place(value)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}" fill-opacity="0.75"/>')
    parts.append(_rule(left, bottom, right, bottom, MUTED))
    parts.append(_text((left + right) / 2, bottom + 38, x_label, anchor="middle", fill=MUTED))
    return _chart(parts, width, math.ceil(bottom + 46), title, description)


def matrix(
    rows: Sequence[MatrixRow], left: Sequence[str], right: Sequence[str], *, title: str, description: str
) -> Svg:
    """Draws rows with marks in some columns. The columns `left` and `right` lie on the two sides of the row names.

    Many rows only make a matrix longer. A drawing with lines between many names would be unreadable. The matrix is
    shown in its natural size. Raises ValueError if there are no rows.
    """
    if not rows:
        raise ValueError(f"matrix {title!r} has no rows")
    step, slant = 20, 0.82
    reach = max((len(_shortened(name)) for name in (*left, *right)), default=0) * FONT_SIZE * CHARACTER_WIDTH
    top, middle = 24 + reach * slant, 12 + step * len(left)
    width_of_names = 28 + max(len(_shortened(row.name)) for row in rows) * FONT_SIZE * CHARACTER_WIDTH
    end = middle + width_of_names + step * len(right)
    height = math.ceil(top + step * len(rows) + 12)
    places = [12 + step * (index + 0.5) for index in range(len(left))]
    places += [middle + width_of_names + step * (index + 0.5) for index in range(len(right))]
    parts = []
    for x, name in zip(places, (*left, *right), strict=True):
        parts.append(_rule(x, top - 4, x, height - 12, GRID))
        turned = _text(x + 4, top - 10, _shortened(name), fill=MUTED)
        parts.append(f'<g transform="rotate(-55 {x + 4:.1f} {top - 10:.1f})"><title>{clean(name)}</title>{turned}</g>')
    for number, row in enumerate(rows):
        y = top + step * (number + 0.5)
        parts.append(_rule(12, y + step / 2, end, y + step / 2, GRID))
        name = _text(middle + 14, y + 4.5, _shortened(row.name))
        parts.append(f'<a href="#{clean(row.anchor)}"><title>{clean(row.name)}</title>{name}</a>')
        for marks, shift, colour in ((row.left, 0, _colour("accent")), (row.right, len(left), _colour("third"))):
            for column, is_full in marks.items():
                style = f'fill="{colour}"' if is_full else f'fill="none" stroke="{colour}" stroke-width="1.5"'
                parts.append(f'<circle cx="{places[shift + column]:.1f}" cy="{y:.1f}" r="4.5" {style}/>')
    return _chart(parts, math.ceil(end + reach * 0.6 + 12), height, title, description, natural_size=True)


def _shortened(name: str) -> str:
    return name if len(name) <= 32 else name[:31] + "…"


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns a percentile (0 to 100) of at least one value, interpolated linearly, as NumPy does by default."""
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(float(value) for value in values)
    position = (len(ordered) - 1) * percent / 100
    lower = math.floor(position)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (ordered[upper] - ordered[lower]) * (position - lower)


def histogram(
    values: Sequence[float],
    *,
    title: str,
    description: str,
    x_label: str,
    y_label: str = "count",
    marks: Sequence[float] = (50, 90, 99),
    num_bins: int = 40,
    width: int = 900,
    height: int = 280,
) -> Svg:
    """Draws the counts of values in bins of equal width, and marks percentiles.

    Raises ValueError if there are no values, or if a value is not finite.
    """
    if not values or any(not math.isfinite(value) for value in values):
        raise ValueError(f"histogram {title!r} needs finite values")
    top, bottom, left = 26 + 17 * len(marks), height - 46, 62.0
    x_axis = _axis([float(value) for value in values], left, width - 16, count=8)
    counts = [0] * num_bins
    for value in values:
        share = (value - x_axis.low) / (x_axis.high - x_axis.low)
        counts[min(num_bins - 1, int(share * num_bins))] += 1
    y_axis = _axis([0.0, float(max(counts))], bottom, top, count=4)
    parts = _grid(y_axis, left, width - 16, y_label)
    bin_width = (width - 16 - left) / num_bins
    for index, count in enumerate(counts):
        if count:
            y = y_axis.place(count)
            parts.append(
                f'<rect x="{left + index * bin_width + 0.5:.1f}" y="{y:.1f}" width="{bin_width - 1:.1f}" '
                f'height="{bottom - y:.1f}" rx="1" fill="{_colour("accent")}"/>'
            )
    parts += _scale(x_axis, bottom, height, x_label)
    for row, percent in enumerate(marks):
        value = percentile(values, percent)
        text = f"p{percent:g} {format_number(float(f'{value:.3g}'))}"
        parts += _mark(x_axis.place(value), row, bottom, text, right=width - 16, stroke=INK, weight=600)
    return _chart(parts, width, height, title, description)


def _axis(
    values: Sequence[float], start: float, end: float, *, count: int, log: bool = False, tight: bool = False
) -> _Axis:
    low, high = min(values), max(values)
    ticks = log_ticks(low, high) if log else nice_ticks(low, high, count)
    if tight and high > low:
        # The x axis ends at the last data point, so that there is no empty strip after it.
        return _Axis(low, high, start, end, log, [tick for tick in ticks if low <= tick <= high])
    return _Axis(ticks[0], ticks[-1], start, end, log, ticks)


def _grid(axis: _Axis, left: float, right: float, label: str) -> list[str]:
    """Draws horizontal lines with the numbers of a vertical axis, and the label of the axis."""
    parts = [_text(14, (axis.start + axis.end) / 2, label, anchor="middle", fill=MUTED, rotate=True)]
    for tick in axis.ticks:
        y = axis.place(tick)
        parts.append(_rule(left, y, right, y, GRID))
        parts.append(_text(left - 8, y + 4.5, format_number(tick), anchor="end", fill=MUTED))
    return parts


def _scale(axis: _Axis, bottom: float, height: int, label: str) -> list[str]:
    """Draws a horizontal axis with ticks, numbers and its label."""
    parts = []
    for tick in axis.ticks:
        x = axis.place(tick)
        parts.append(_rule(x, bottom, x, bottom + 5, MUTED))
        parts.append(_text(x, bottom + 20, format_number(tick), anchor="middle", fill=MUTED))
    parts.append(_rule(axis.start, bottom, axis.end, bottom, MUTED))
    return [*parts, _text((axis.start + axis.end) / 2, height - 8, label, anchor="middle", fill=MUTED)]


def _columns(axis: _Axis, top: float, bottom: float) -> list[str]:
    """Draws vertical lines with the numbers of a horizontal axis."""
    parts = []
    for tick in axis.ticks:
        x = axis.place(tick)
        parts.append(_rule(x, top, x, bottom, GRID))
        parts.append(_text(x, bottom + 18, format_number(tick), anchor="middle", fill=MUTED))
    return parts


def _mark(
    x: float, row: int, bottom: float, text: str, *, right: float, stroke: str = MUTED, weight: int = 400
) -> list[str]:
    """Draws a dashed vertical line with a label. Each label has its own row, because close labels would overlap."""
    y = 16 + 17 * row
    is_near_edge = x + 4 + len(text) * FONT_SIZE * (CHARACTER_WIDTH if weight == 400 else BOLD_CHARACTER_WIDTH) > right
    place, anchor = (x - 4, "end") if is_near_edge else (x + 4, "start")
    line = f'<line x1="{x:.1f}" y1="{y + 5:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="{stroke}" stroke-width="1" '
    return [line + 'stroke-dasharray="4 3"/>', _text(place, y, text, anchor=anchor, weight=weight)]


def _drawable(x: float, y: float, *, log_x: bool, log_y: bool) -> bool:
    return math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y)


def _path(line: Line, x_axis: _Axis, y_axis: _Axis) -> str:
    commands: list[str] = []
    pen_down = False
    for x, y in zip(line.x, line.y, strict=True):
        if not _drawable(x, y, log_x=x_axis.log, log_y=y_axis.log):
            pen_down = False
            continue
        commands.append(f"{'L' if pen_down else 'M'}{x_axis.place(x):.1f} {y_axis.place(y):.1f}")
        pen_down = True
    return "".join(commands)


def _colour(tone: Tone) -> str:
    variable, fallback = TONES[tone]
    return f"var({variable}, {fallback})"


def _rule(x1: float, y1: float, x2: float, y2: float, stroke: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" stroke-width="1"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", fill: str = INK, weight: int = 400, rotate: bool = False
) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if rotate else ""
    bold = f' font-weight="{weight}"' if weight != 400 else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"{bold}{turn}>{clean(text)}</text>'


def _legend(names: Sequence[str], tones: Sequence[Tone], x: float, y: float) -> str:
    parts = []
    for name, tone in zip(names, tones, strict=True):
        parts.append(f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12" rx="2" fill="{_colour(tone)}"/>')
        parts.append(_text(x + 18, y, name))
        x += 18 + len(name) * FONT_SIZE * CHARACTER_WIDTH + 24
    return "".join(parts)


def _chart(
    parts: Sequence[str], width: int, height: int, title: str, description: str, *, natural_size: bool = False
) -> Svg:
    body = "".join(parts)
    size = f' style="width: {width}px"' if natural_size else ""
    # Ids must differ between the charts of one page, and must be the same each time the page is made.
    name = "chart-" + hashlib.blake2b(f"{title}\0{description}\0{body}".encode(), digest_size=5).hexdigest()
    return Svg(
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}"{size} role="img" '
        f'aria-labelledby="{name}-title {name}-text" font-size="{FONT_SIZE}" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif">'
        f'<title id="{name}-title">{clean(title)}</title>'
        f'<desc id="{name}-text">{clean(description)}</desc>{body}</svg>\n'
    )
