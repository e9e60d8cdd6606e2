"""The benchmark of the scheduler: batches by seed, costs of real shapes, claims that follow from the rows."""

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

from dflop import _native
from dflop._native import testing

FOLDER = Path(__file__).parents[2] / "benches"
FIXTURES = FOLDER.parent / "fixtures"


@pytest.fixture(scope="module")
def bench():
    # Its siblings are found as they are when the script is run.
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("bench_schedule", FOLDER / "schedule.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["bench_schedule"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


@pytest.fixture(scope="module")
def batches(bench):
    return sys.modules["batches"]


@pytest.fixture(scope="module")
def mix(batches):
    shapes, profiles = FIXTURES / "shapes", FIXTURES / "profiles"
    return batches.Mix(shapes / "tiny.json", profiles / "demo_cpu.json", (2, False, False))


def best_of_all(costs, num_buckets):
    """The least worst load of all assignments."""

    def worst(assignment):
        loads = [[0] * num_buckets, [0] * num_buckets]
        for sample, bucket in enumerate(assignment):
            loads[0][bucket] += costs.encoder_ns[sample]
            loads[1][bucket] += costs.llm_ns[sample]
        return max(map(max, loads))

    return min(map(worst, itertools.product(range(num_buckets), repeat=len(costs.llm_ns))))


def test_lognormal_costs_are_as_asked(batches):
    costs = batches.lognormal(2_000, 1, sigma=0.8, correlation=0.8, text_share=0.3)
    assert costs == batches.lognormal(2_000, 1, sigma=0.8, correlation=0.8, text_share=0.3)
    assert costs != batches.lognormal(2_000, 2, sigma=0.8, correlation=0.8, text_share=0.3)
    assert 0.25 < costs.encoder_ns.count(0) / 2_000 < 0.35
    assert min(costs.llm_ns) > 0
    even = batches.lognormal(500, 1, sigma=0.8, is_even=True)
    assert abs(sum(even.encoder_ns) / sum(even.llm_ns) - 1) < 1e-5


def test_mixed_samples_cost_what_the_profile_says_of_their_shapes(batches, mix):
    costs = mix.draw(400, 1)
    assert costs == mix.draw(400, 1), "equal seeds, equal batches"
    assert 0.08 < costs.encoder_ns.count(0) / 400 < 0.25, "15 % are text"
    # A grid of 2 x 2 and the whole: five tiles of 81 patches; 480 x 640 is a size of the image table.
    segments, feature_tokens = (
        testing.media_shape(*mix.shapes.files, "image", height=480, width=640).segments,
        0,
    )
    assert segments == [(5, 81)]
    forward, backward, _ = mix.model.encoder(segments)
    assert forward + backward in costs.encoder_ns
    assert all(tokens > batches.TOKENS_A_SAMPLE + feature_tokens for tokens in costs.tokens)
    # A longer sample never costs the LLM less, but for its labels, which a stage in the middle does not see.
    by_length = [llm for _, llm in sorted(zip(costs.tokens, costs.llm_ns, strict=True))]
    assert by_length == sorted(by_length)


def test_a_row_judges_every_method_by_one_bound(bench, batches):
    costs = batches.lognormal(12, 3, sigma=0.5)
    row = bench.measure(costs, 3, 0)
    assert set(row["methods"]) == {"dflop", "dflop-exact", *testing.baselines()}
    assert "cp-sat" not in row["methods"]
    for method in row["methods"].values():
        assert method["max_load_ns"] >= row["lower_bound_ns"]
        assert method["gap"] == pytest.approx(method["max_load_ns"] / row["lower_bound_ns"] - 1)
        assert method["seconds"] > 0
    assert row["methods"]["paper"]["answered_by"] in ("ilp", "lpt, the solver did not converge")


def test_cpsat_finds_the_best_of_all(bench, batches):
    pytest.importorskip("ortools")
    costs = batches.lognormal(8, 5, sigma=0.8, text_share=0.3)
    report, assignment = bench.cpsat(costs, 3, 20)
    assert report["status"] == "optimal"
    worst = testing.judge(costs.encoder_ns, costs.llm_ns, 3, assignment, meets="pipeline").max_load_ns
    # Its integers are rounded to 1e-7 of a bucket's load.
    assert worst == pytest.approx(best_of_all(costs, 3), rel=1e-6)


def row_of(size, ours, cpsat=None):
    method = dict(zip(("max_load_ns", "gap", "seconds"), ours, strict=True))
    methods = {"dflop": method, "dflop-exact": method}
    if cpsat is not None:
        methods["cp-sat"] = dict(zip(("max_load_ns", "seconds"), cpsat, strict=True)) | {"limit_seconds": 10}
    return {"num_samples": size[0], "num_buckets": size[1], "methods": methods}


@pytest.mark.parametrize(
    ("size", "ours", "cpsat", "expected"),
    [
        ((64, 8), (100, 0.1, 0.05), (100, 10.0), [True, True]),
        ((64, 8), (101, 0.1, 0.06), (100, 10.0), [False, False]),
        # It proved its answer early: 0.5 % of what it ran; or it overran its limit: 0.5 % of that.
        ((64, 8), (100, 0.1, 0.05), (100, 9.0), [True, False]),
        ((64, 8), (100, 0.1, 0.06), (100, 20.0), [True, False]),
        # None found: nothing is worse than that.
        ((64, 8), (101, 0.1, 0.01), (None, 10.0), [True, True]),
        ((2048, 128), (100, 1e-4, 0.020), None, [True]),
        ((2048, 128), (100, 1.1e-4, 0.010), None, [False]),
        ((2048, 128), (100, 0.0, 0.021), None, [False]),
        ((48, 16), (100, 0.005, 1.0), (100, 10.0), [True, False, True]),
        ((48, 16), (100, 0.006, 0.01), None, [False]),
        ((64, 16), (100, 0.5, 9.0), None, []),
    ],
)
def test_claims_are_kept_or_missed_by_the_numbers(bench, size, ours, cpsat, expected):
    assert list(bench.claims(row_of(size, ours, cpsat)).values()) == expected


def test_a_hint_begins_where_the_best_baseline_ends(bench, batches):
    pytest.importorskip("ortools")
    costs = batches.lognormal(24, 2, sigma=0.8)
    hint, _ = testing.baseline("greedy", costs.encoder_ns, costs.llm_ns, costs.tokens, 6)
    best = testing.judge(costs.encoder_ns, costs.llm_ns, 6, hint, meets="pipeline").max_load_ns
    _, assignment = bench.cpsat(costs, 6, 3, hint)
    found = testing.judge(costs.encoder_ns, costs.llm_ns, 6, assignment, meets="pipeline").max_load_ns
    assert found <= best * (1 + 1e-6)


def test_a_cell_has_the_median_and_the_worst_of_its_seeds(bench):
    def row(seed, gap, seconds, answered_by, solver=None):
        method = {"gap": gap, "seconds": seconds, "max_load_ns": 1}
        methods = {"dflop": method, "paper": method | {"answered_by": answered_by}}
        if solver is not None:
            methods["cp-sat"] = {"gap": solver, "seconds": 10.0, "max_load_ns": 1}
        return {"set": "a", "num_samples": 8, "num_buckets": 2, "seed": seed, "methods": methods}

    rows = [
        row(1, 0.1, 1.0, "ilp", 0.3),
        row(2, 0.5, 2.0, "lpt, the solver did not converge"),
        row(3, 0.2, 9.0, "ilp"),
    ]
    (cell,) = bench.cells(rows)
    assert cell["methods"]["dflop"]["gap"] == {"median": 0.2, "worst": 0.5}
    assert cell["methods"]["dflop"]["seconds"] == {"median": 2.0, "worst": 9.0}
    # CP-SAT was asked for one seed alone, and the paper's program was solved in two: both are said.
    assert bench.gap_of(cell["methods"]["cp-sat"], 3) == "30.0 / 30.0 (of 1)"
    assert bench.gap_of(cell["methods"]["dflop"], 3) == "20.0 / 50.0"
    assert cell["paper_answered_by"] == "ILP 2, LPT 1"
    assert bench.paper_name(rows[1:2]) == "LPT"


def test_makespans_divide_by_the_best_baseline_that_runs_every_seed(bench):
    def row(way, recompute, over, is_baseline=True):
        seeds = [{"over_bound": o, "needed_bytes": None if o else 131_000_000_000} for o in over]
        place = {"num_ranks": 8, "layout": "l", "num_microbatches": 16, "memory_budget_bytes": 76_000_000_000}
        return {**place, "way": way, "recompute": recompute, "is_baseline": is_baseline, "seeds": seeds}

    (place,) = bench.makespans(
        [
            row("blind", "none", [1.2, None]),
            row("blind", "full", [1.5, 1.6]),
            row("tokens", "none", [1.1, None]),
            row("tokens", "full", [None, None]),
            row("aware", "none", [1.25, 1.28], is_baseline=False),
            row("aware", "full", [1.4, 1.3], is_baseline=False),
        ]
    )
    assert (place["best_baseline"], place["best_ours"]) == ("blind", "aware")
    assert place["gain"] == {"median": pytest.approx((1.5 / 1.25 + 1.6 / 1.28) / 2), "worst": 1.5 / 1.25}
    assert bench.over_bound(place["ways"]["blind"]) == "1.550 / 1.600 (full)"
    assert bench.over_bound(place["ways"]["tokens"]) == "refused: 131 GB"
    assert bench.over_bound(place["ways"]["aware"]) == "1.265 / 1.280"


def test_the_summary_counts_rows(bench):
    rows = [{"claims": {"a": True}}, {"claims": {"a": False, "b": True}}, {"claims": {}}]
    assert bench.summarise(rows) == {"a": {"held": 1, "of": 2}, "b": {"held": 1, "of": 1}}


def test_a_judged_assignment_has_the_loads_of_its_buckets():
    judged = testing.judge([9, 9, 1, 1], [1, 1, 9, 9], 2, [0, 0, 1, 1], meets="pipeline")
    assert (judged.encoder_load_ns, judged.llm_load_ns) == ([18, 2], [2, 18])
    assert (judged.max_load_ns, judged.lower_bound_ns, judged.proven_optimal) == (18, 10, False)
    with pytest.raises(ValueError, match="sample 1 is put into bucket 2, there are 2 buckets"):
        testing.judge([1, 1], [1, 1], 2, [0, 2])
    with pytest.raises(ValueError, match="no baseline is called `best`, there are: arrival, random"):
        testing.baseline("best", [1], [1], [1], 1)


def test_caps_of_both_units_are_kept():
    def largest(assignment, sizes):
        return max(sum(size for b, size in zip(assignment, sizes, strict=True) if b == j) for j in (0, 1))

    # By load 6 and 1 stand against 4 and 3; by bytes or tokens the first two may not meet.
    costs, sizes = ([0] * 4, [6, 1, 4, 3], 2), [6, 6, 4, 4]
    assert largest(_native.balance(*costs).assignment, sizes) == 12
    for unit in ("bytes", "tokens"):
        capped = _native.balance(*costs, **{unit: sizes, f"bucket_{unit}_max": 10})
        assert (largest(capped.assignment, sizes), capped.max_load_ns) == (10, 9)
        with pytest.raises(ValueError, match="at least 10"):
            _native.balance(*costs, **{unit: sizes, f"bucket_{unit}_max": 9})


def test_the_exact_search_is_no_worse_and_its_bound_no_lower(batches):
    # More than are searched exactly without asking.
    costs = batches.lognormal(54, 1, sigma=0.5)
    plain = _native.balance(costs.encoder_ns, costs.llm_ns, 18, meets="pipeline")
    exact = _native.balance(costs.encoder_ns, costs.llm_ns, 18, meets="pipeline", exact=True)
    assert exact.max_load_ns <= plain.max_load_ns
    assert exact.lower_bound_ns > plain.lower_bound_ns
