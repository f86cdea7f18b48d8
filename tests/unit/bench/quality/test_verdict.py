"""A difference counts where it stands out from users and from seeds; that there is none has to be seen, too."""

import pytest

from tackboard.bench.quality.verdict import Measured, difference_cells, figures_of, verdict

CLEAR = Measured(0.02, 0.01, 0.03, (0.31, 0.32, 0.315), (0.29, 0.30, 0.295))
OF_USERS = Measured(0.02, -0.001, 0.03, (0.31, 0.32, 0.315), (0.29, 0.30, 0.295))
OF_SEEDS = Measured(0.02, 0.01, 0.03, (0.25, 0.35, 0.345), (0.24, 0.35, 0.295))
# 2.4 standard errors of 3 and 3 seeds: less than the 2.776 of t with 4 degrees of freedom.
NEARLY = Measured(0.024, 0.01, 0.03, (0.3117, 0.324, 0.3363), (0.2877, 0.3, 0.3123))
ONE_SEED = Measured(-0.02, -0.03, -0.01, (0.30,), (0.32,))
SAME = Measured(0.001, -0.002, 0.004, (0.3, 0.301, 0.302), (0.299, 0.3, 0.301))
UNKNOWN = Measured(0.0052, -0.006, 0.017, (0.0223,), (0.0171,))


@pytest.mark.parametrize(
    ("measured", "published", "word"),
    [
        (CLEAR, 1, "agree"),
        (CLEAR, -1, "disagree"),
        (CLEAR, 0, "disagree"),
        (CLEAR, None, "better"),
        (OF_USERS, 1, "within noise"),
        (OF_USERS, 0, "cannot tell"),
        (OF_SEEDS, 1, "within noise"),
        (OF_SEEDS, 0, "cannot tell"),
        (OF_SEEDS, None, "within noise"),
        (NEARLY, None, "within noise"),
        (ONE_SEED, -1, "agree, one seed"),
        (ONE_SEED, None, "worse, one seed"),
        (SAME, 0, "agree"),
        (UNKNOWN, 0, "cannot tell"),
        (UNKNOWN, 1, "within noise"),
    ],
)
def test_verdict(measured: Measured, published: int | None, word: str) -> None:
    assert verdict(measured, published) == word


def test_lower_may_be_better() -> None:
    assert verdict(CLEAR, None, is_lower_better=True) == "worse"
    assert verdict(CLEAR, 1, is_lower_better=True) == "disagree"
    assert verdict(SAME, 0, is_lower_better=True) == "agree"


def test_seed_error_is_that_of_a_difference_of_means() -> None:
    # Variances 1 and 4 of two seeds each: √(1/2 + 4/2).
    measured = Measured(1.0, 0.5, 2.0, (0.0, 2**0.5), (0.0, 8**0.5))
    assert measured.seed_error == pytest.approx(2.5**0.5)
    # Welch: (1/2 + 4/2)² / ((1/2)² + (4/2)²) = 1.47 degrees of freedom, 1 in whole numbers.
    assert measured.reach[1] == pytest.approx(1.0 + 12.706 * 2.5**0.5)
    assert ONE_SEED.seed_error is None and ONE_SEED.reach == (-0.03, -0.01)


def test_a_side_without_seeds_adds_no_error() -> None:
    measured = Measured(0.1, 0.05, 0.15, (0.4, 0.41, 0.42), (0.31,), is_fixed=True)
    assert measured.seed_error == pytest.approx(0.01 / 3**0.5)
    assert measured.reach == (0.05, 0.15)
    wide = Measured(0.1, 0.05, 0.15, (0.3, 0.41, 0.52), (0.31,), is_fixed=True)
    # Two degrees of freedom.
    assert wide.reach[1] == pytest.approx(0.1 + 4.303 * 0.11 / 3**0.5)
    same = Measured(0.1, 0.05, 0.15, (0.4, 0.4), (0.3, 0.3))
    assert same.seed_error == 0.0 and verdict(same, None) == "better"


def test_cells_of_a_table() -> None:
    assert difference_cells(figures_of(CLEAR)) == ["+0.0200", "+0.0100", "+0.0300", "0.0041"]
    assert difference_cells(figures_of(ONE_SEED)) == ["-0.0200", "-0.0300", "-0.0100", ""]
    assert figures_of(ONE_SEED)["verdict"] == "worse, one seed"
