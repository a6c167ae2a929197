"""Long series as few points: what stands out stays, on the page and in pictures alike."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataflow.draw.charts import MOST_POINTS, decimate, thin


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=400),
    st.integers(min_value=4, max_value=90),
)
def test_of_a_long_series_the_ends_and_what_stands_out_stay_and_there_are_no_more_points_than_asked(
    values: list[float], most: int
) -> None:
    xs, ys = np.arange(len(values), dtype=np.float64), np.array(values)
    found_xs, found_ys = decimate(xs, ys, most)
    assert len(found_xs) == len(found_ys) <= max(most, min(most, len(values)))
    assert (found_xs[0], found_xs[-1]) == (xs[0], xs[-1]) and (found_ys[0], found_ys[-1]) == (
        ys[0],
        ys[-1],
    )
    assert found_ys.min() == ys.min() and found_ys.max() == ys.max()
    assert (np.diff(found_xs) > 0).all() and (ys[found_xs.astype(int)] == found_ys).all()


def test_a_picture_of_a_long_series_has_its_one_spike() -> None:
    values = [float(step % 3) for step in range(20 * MOST_POINTS)]
    values[12_347], values[12_348] = 90.0, -90.0
    drawn = thin(list(enumerate(values)))
    assert len(drawn) <= MOST_POINTS and {(12_347, 90.0), (12_348, -90.0)} <= set(drawn)
    assert drawn[0] == (0.0, values[0]) and drawn[-1] == (len(values) - 1.0, values[-1])
    assert thin(drawn[:5]) == drawn[:5]
