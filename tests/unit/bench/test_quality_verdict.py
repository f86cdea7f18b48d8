"""A difference counts where it stands out from users and from seeds."""

import pytest

from tackboard.bench.quality_verdict import Measured, verdict

CLEAR = Measured(0.02, 0.01, 0.03, (0.31, 0.32, 0.315), (0.29, 0.30, 0.295))
OF_USERS = Measured(0.02, -0.001, 0.03, (0.31, 0.32, 0.315), (0.29, 0.30, 0.295))
OF_SEEDS = Measured(0.02, 0.01, 0.03, (0.25, 0.35, 0.345), (0.24, 0.35, 0.295))
ONE_SEED = Measured(-0.02, -0.03, -0.01, (0.30,), (0.32,))


@pytest.mark.parametrize(
    ("measured", "published", "word"),
    [
        (CLEAR, 1, "agree"),
        (CLEAR, -1, "disagree"),
        (CLEAR, 0, "disagree"),
        (CLEAR, None, "better"),
        (OF_USERS, 1, "within noise"),
        (OF_SEEDS, 1, "within noise"),
        (OF_SEEDS, 0, "agree"),
        (OF_SEEDS, None, "within noise"),
        (ONE_SEED, -1, "agree"),
        (ONE_SEED, None, "worse"),
    ],
)
def test_verdict(measured: Measured, published: int | None, word: str) -> None:
    assert verdict(measured, published) == word


def test_seed_error_is_that_of_a_difference_of_means() -> None:
    # Variances 1 and 4 of two seeds each: √(1/2 + 4/2).
    measured = Measured(1.0, 0.5, 2.0, (0.0, 2**0.5), (0.0, 8**0.5))
    assert measured.seed_error == pytest.approx(2.5**0.5)
    assert ONE_SEED.seed_error == 0.0
