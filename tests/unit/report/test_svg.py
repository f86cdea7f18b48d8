"""Charts: ticks are round numbers, marks stand where the data is, text is escaped, a chart can be read aloud."""

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tackboard.report.svg import (
    TONES,
    Bars,
    Dots,
    Line,
    MatrixRow,
    Svg,
    bar_chart,
    clean,
    dot_chart,
    format_number,
    histogram,
    line_chart,
    log_ticks,
    matrix,
    nice_ticks,
    percentile,
)

NAMED = {"title": "t", "description": "d", "x_label": "x"}


def parse(svg: Svg) -> ElementTree.Element:
    return ElementTree.fromstring(svg.markup)


def texts(svg: Svg) -> list[str]:
    return [element.text or "" for element in parse(svg).iter("text")]


def simple_line(**options: object) -> Svg:
    arguments: dict[str, object] = {"title": "t", "description": "d", "x_label": "x", "y_label": "y", **options}
    line = Line(name="a", x=[1, 10, 100], y=[1, 10, 100])
    return line_chart([line], **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 0.3, [0, 0.1, 0.2, 0.3]),
        (2.1, 7.4, [2, 4, 6, 8]),
        (-3, 3, [-4, -2, 0, 2, 4]),
        (0, 12_000, [0, 5000, 10_000, 15_000]),
    ],
)
def test_ticks_are_round_and_cover_the_data(low: float, high: float, expected: list[float]) -> None:
    assert nice_ticks(low, high) == expected


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 10))
def test_ticks_always_cover_and_stay_few(low: float, extent: float, count: int) -> None:
    high = low + extent
    ticks = nice_ticks(low, high, count)
    slack = 1e-6 * max(abs(low), abs(high), 1)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert len(ticks) <= count + 3


def test_equal_limits_still_give_an_axis() -> None:
    assert nice_ticks(5, 5)[0] < 5 < nice_ticks(5, 5)[-1]
    assert nice_ticks(0, 0)[0] < 0 < nice_ticks(0, 0)[-1]


def test_logarithmic_ticks() -> None:
    assert log_ticks(1, 1e6) == [1, 10, 100, 1000, 1e4, 1e5, 1e6]
    assert log_ticks(3, 40) == [2, 5, 10, 20, 50]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1200, "1,200"), (0.05, "0.05"), (0.30000000000000004, "0.3"), (3.14e8, "3.1e+08")]
)
def test_numbers_are_written_as_people_write_them(value: float, text: str) -> None:
    assert format_number(value) == text


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-6)


def test_chart_carries_title_description_and_role() -> None:
    svg = simple_line(title="Loss & more", description="falls <fast>")
    root = parse(svg)
    title, description = root.find("title"), root.find("desc")
    assert title is not None and title.text == "Loss & more"
    assert description is not None and description.text == "falls <fast>"
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"


def test_charts_have_ids_of_their_own_that_never_change() -> None:
    first, second = simple_line(title="one"), simple_line(title="two")
    names = {re.findall(r'id="([^"]+)"', svg.markup)[0] for svg in (first, second)}
    assert len(names) == 2
    assert simple_line(title="one") == first


def test_line_runs_from_corner_to_corner() -> None:
    path = next(parse(simple_line()).iter("path")).get("d") or ""
    points = [tuple(map(float, pair.split())) for pair in re.split("[ML]", path)[1:]]
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)


def test_logarithmic_axes_space_powers_evenly() -> None:
    path = next(parse(simple_line(log_x=True, log_y=True)).iter("path")).get("d") or ""
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, pair.split())) for pair in re.split("[ML]", path)[1:]]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2)


def test_a_value_that_is_not_finite_breaks_the_line() -> None:
    line = Line(name="a", x=[0, 1, 2, 3, 4], y=[1, 2, math.nan, 2, 1])
    svg = line_chart([line], title="t", description="d", x_label="x", y_label="y")
    assert (next(parse(svg).iter("path")).get("d") or "").count("M") == 2
    with pytest.raises(ValueError, match="no point that can be drawn"):
        line_chart([Line(name="a", x=[0], y=[math.nan])], title="t", description="d", x_label="x", y_label="y")


def test_several_lines_get_a_legend_one_does_not() -> None:
    lines = [Line(name=name, x=[0, 1], y=[0, 1]) for name in ("raw", "smooth")]
    svg = line_chart(lines, title="t", description="d", x_label="steps", y_label="loss")
    assert {"raw", "smooth", "steps", "loss"} <= set(texts(svg))
    assert "a" not in texts(simple_line())


def test_bars_are_as_long_as_their_values_and_labelled() -> None:
    bars = [Bars(name="baseline", values=[0.1, 0.2]), Bars(name="model", values=[0.2, 0.4])]
    svg = bar_chart(["HR@1", "HR@10"], bars, title="t", description="d", x_label="HR")
    lengths = [float(rect.get("width") or 0) for rect in parse(svg).iter("rect") if rect.get("height") == "17"]
    assert lengths[1] == pytest.approx(2 * lengths[0], rel=0.01)
    assert lengths[3] == pytest.approx(4 * lengths[0], rel=0.01)
    assert {"0.100", "0.200", "0.400", "HR@1", "HR@10", "baseline", "model"} <= set(texts(svg))


def test_histogram_counts_every_value_and_marks_percentiles() -> None:
    values = [float(value) for value in range(1, 101)]
    svg = histogram(values, title="t", description="d", x_label="ms", num_bins=10)
    rects = list(parse(svg).iter("rect"))
    heights = [float(rect.get("height") or 0) for rect in rects]
    assert len(rects) == 10
    assert max(heights) == pytest.approx(min(heights), rel=0.25)
    assert {"p50 50.5", "p90 90.1", "p99 99"} <= set(texts(svg))


def test_histogram_of_equal_values() -> None:
    assert "p50 3" in texts(histogram([3.0, 3.0], title="t", description="d", x_label="ms"))


def test_text_is_escaped_and_holds_no_address() -> None:
    svg = simple_line(title="</title><script>", x_label="http://example.org <b>")
    assert "<script>" not in svg.markup
    assert "://" not in svg.markup
    assert "http://example.org <b>" in texts(svg)
    assert clean("a://b") == "a&#58;//b"


def _luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_four_rows_of_a_comparison_differ_by_luminance() -> None:
    levels = sorted(_luminance(TONES[tone][1]) for tone in ("accent", "strong", "second", "soft"))
    assert min(after - before for before, after in pairwise(levels)) > 0.02


def test_a_matrix_has_a_dot_for_every_mark() -> None:
    rows = [
        MatrixRow(name=f"<row {number}> {'x' * 40}", anchor=f"a{number}", left={number % 3: True}, right={0: False})
        for number in range(100)
    ]
    svg = matrix(rows, ["a & b", "b", "c"], ["m"], title="t", description="d")
    root = parse(svg)
    circles = list(root.iter("circle"))
    assert len(circles) == 200
    assert sum(circle.get("fill") == "none" for circle in circles) == 100
    assert len({circle.get("cy") for circle in circles}) == 100
    assert len({circle.get("cx") for circle in circles}) == 4
    assert [link.get("href") for link in root.iter("a")] == [f"#a{number}" for number in range(100)]
    assert max(len(text) for text in texts(svg)) == 32
    assert f"width: {root.get('width')}px" in svg.markup


def test_dots_stand_at_their_values_with_the_mean_and_named_marks() -> None:
    rows = [Dots(name="ours", values=[0.3, 0.4]), Dots(name="theirs", values=[0.2])]
    chart = dot_chart(rows, title="t", description="d", x_label="HR@10", marks={"published": 0.35, "edge": 0.4})
    places = [float(dot.get("cx", "")) for dot in parse(chart).iter("circle")]
    first, second, third = places
    [mean, _] = [float(stroke.get("x", "")) + 1 for stroke in parse(chart).iter("rect")]
    assert third < first < mean < second and mean == pytest.approx((first + second) / 2, abs=0.2)
    dashed = [float(line.get("x1", "")) for line in parse(chart).iter("line") if line.get("stroke-dasharray")]
    assert dashed == [pytest.approx(mean, abs=0.2), pytest.approx(second, abs=0.2)]
    assert {"ours", "theirs", "published 0.35", "edge 0.4", "HR@10"} <= set(texts(chart))


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: nice_ticks(math.nan, 1), "finite"),
        (lambda: nice_ticks(0, math.inf), "finite"),
        (lambda: log_ticks(0, 1), "above zero"),
        (lambda: percentile([], 50), "at least one"),
        (lambda: histogram([], **NAMED), "finite values"),
        (lambda: matrix([], ["a"], [], title="t", description="d"), "no rows"),
        *(
            (lambda values=values: dot_chart(values, **NAMED), "finite values")
            for values in ([], [Dots(name="a", values=[math.nan])])
        ),
        *(
            (lambda values=values: bar_chart(["one", "two"], [Bars(name="a", values=values)], **NAMED), "bar|value")
            for values in ([1.0], [-1.0, 1.0], [math.nan, 1.0])
        ),
        (lambda: bar_chart(["one", "two"], [], **NAMED), "nothing to draw"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        draw()
