"""Points go where a straight line between the measured ones is wrong."""

import pytest

from dflop.profiling.adaptive import Gap, Sample, choose, gaps_of, largest_error, split_of, strays_of


def refine(curve, sizes, *, rounds, noise=0.0, unit=1, threshold=0.01):
    """Sizes that were measured after some rounds on a curve that is known."""
    points = {size: Sample(curve(size), noise * curve(size), 4) for size in sizes}
    for _ in range(rounds):
        wanted = choose(
            {"a": gaps_of(points)},
            {"a": 1.0},
            lambda _, size: round(size / unit) * unit,
            threshold=threshold,
            limit=1,
        )
        if not wanted:
            break
        for _, size in wanted:
            points[size] = Sample(curve(size), noise * curve(size), 4)
    return points


def worst_error(points, curve):
    """The largest error of the interpolation, over all sizes."""
    sizes = sorted(points)
    worst = 0.0
    for low, high in zip(sizes, sizes[1:], strict=False):
        for size in range(low, high):
            share = (size - low) / (high - low)
            expected = points[low].time_ns + share * (points[high].time_ns - points[low].time_ns)
            worst = max(worst, abs(expected - curve(size)) / curve(size))
    return worst


def test_a_straight_line_needs_no_more_points():
    assert sorted(refine(lambda size: 50.0 + 3.0 * size, [1, 40, 1000], rounds=20)) == [1, 40, 1000]


def test_points_gather_at_a_kink():
    def curve(size):
        return 1000.0 + size + max(0, size - 700) * 20.0

    points = refine(curve, [8, 180, 4000], rounds=12)
    assert sum(400 <= size <= 1200 for size in points) >= 3
    assert worst_error(points, curve) < 0.1
    assert worst_error(points, curve) < worst_error({s: points[s] for s in (8, 180, 4000)}, curve) / 5


def test_a_jump_is_bracketed():
    def curve(size):
        return 1000.0 + size + (2000.0 if size >= 768 else 0.0)

    sizes = sorted(refine(curve, [1, 60, 4000], rounds=16))
    below, above = max(s for s in sizes if s < 768), min(s for s in sizes if s >= 768)
    assert above - below <= 48


def test_a_smooth_curve_reaches_the_threshold():
    def curve(size):
        return 1e4 + 5.0 * size + 0.02 * size * size

    points = refine(curve, [1, 63, 4000], rounds=60)
    assert len(points) < 40
    assert worst_error(points, curve) < 0.03


def test_what_scatter_explains_is_left_alone():
    def curve(size):
        return 1e4 + 0.1 * size

    wiggly = {1: 1.0, 10: 1.04, 100: 0.97, 1000: 1.03}
    points = {size: Sample(curve(size) * factor, 0.2 * curve(size), 4) for size, factor in wiggly.items()}
    assert largest_error({"a": gaps_of(points)}) == 0.0
    exact = {size: Sample(sample.time_ns, 0.0, 4) for size, sample in points.items()}
    assert largest_error({"a": gaps_of(exact)}) > 0.005


def test_leaving_one_out_by_hand():
    """At 20 the line from (10, 100) to (40, 400) gives 200, measured is 250; 10 lie below it, 20 above."""
    points = {10: Sample(100.0, 0.0, 1), 20: Sample(250.0, 0.0, 1), 40: Sample(400.0, 0.0, 1)}
    assert strays_of(points) == {20: (pytest.approx(50.0), 0.0)}
    assert [(gap.low, gap.high) for gap in gaps_of(points)] == [(10, 20), (20, 40)]
    assert [gap.error for gap in gaps_of(points)] == pytest.approx(
        [50 * 10 / (4 * 20) / 175, 50 * 20 / (4 * 10) / 325]
    )


def test_the_curve_that_takes_the_time_comes_first():
    gap = Gap(10, 100, 0.2, 0.0)
    chosen = choose(
        {"small": [gap], "large": [gap]},
        {"small": 0.1, "large": 0.9},
        lambda _, size: size,
        threshold=0.01,
        limit=2,
    )
    assert chosen == [("large", 32), ("small", 32)]


@pytest.mark.parametrize(
    ("low", "high", "unit", "expected"),
    [(1, 2, 1, None), (1, 4, 1, 2), (128, 512, 128, 256), (128, 256, 128, None), (81, 243, 81, 162)],
)
def test_a_split_lies_between_and_on_the_unit(low, high, unit, expected):
    assert split_of(low, high, lambda size: round(size / unit) * unit) == expected
