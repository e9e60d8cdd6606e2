//! `dflop.balance`: costs in, buckets out; and what others would make of the same costs.

use crate::SIGNALS_EVERY;
use crate::error::{Kind, map, raise};
use crate::numbers::{ANY, integer, integers};
use dflop_schedule::baseline::{Baseline, SolverEnd};
use dflop_schedule::{
    Assignment, Costs, EXACT_WORK, Limits, Meets, ParseMeetsError, fewest_buckets, schedule_for,
};
use pyo3::prelude::*;
use std::cell::Cell;
use std::time::Instant;

/// An assignment of samples to buckets, with its loads and how near to the best it is certain to be.
///
/// `assignment` has the bucket of each sample, counted from 0. `encoder_load_ns` and `llm_load_ns` have the sum of the
/// costs in each bucket, and `max_load_ns` is the largest of all these sums. No assignment has a largest sum below
/// `lower_bound_ns`; `gap` is `max_load_ns / lower_bound_ns - 1`, and `proven_optimal` says that it is 0.
#[pyclass(frozen, module = "dflop")]
pub(crate) struct Balance(Assignment);

#[pymethods]
impl Balance {
    #[getter]
    fn assignment(&self) -> Vec<u32> {
        self.0.bucket.clone()
    }

    #[getter]
    fn encoder_load_ns(&self) -> Vec<u64> {
        self.0.encoder_load_ns.clone()
    }

    #[getter]
    fn llm_load_ns(&self) -> Vec<u64> {
        self.0.llm_load_ns.clone()
    }

    #[getter]
    fn max_load_ns(&self) -> u64 {
        self.0.max_load_ns
    }

    #[getter]
    fn lower_bound_ns(&self) -> u64 {
        self.0.lower_bound_ns
    }

    #[getter]
    fn gap(&self) -> f64 {
        self.0.gap()
    }

    #[getter]
    fn proven_optimal(&self) -> bool {
        self.0.proven_optimal
    }

    fn __repr__(&self) -> String {
        format!(
            "Balance({} samples, {} buckets, max_load_ns={}, gap={:.6}, proven_optimal={})",
            self.0.bucket.len(),
            self.0.llm_load_ns.len(),
            self.0.max_load_ns,
            self.0.gap(),
            if self.0.proven_optimal { "True" } else { "False" }
        )
    }
}

/// Puts samples into buckets such that ranks wait for each other as little as the search finds.
///
/// `meets` says what ranks wait for, and so what is made even:
///
/// - `step` (DDP, ZeRO-1, ZeRO-2): the sum of encoder and LLM work over all buckets that a rank takes.
/// - `phase` (FSDP, ZeRO-3): the encoder work and, separately, the LLM work of each microbatch.
/// - `pipeline` (encoder and LLM on different ranks): the larger of encoder and LLM work in each bucket.
///
/// Args:
///     encoder_ns: Cost of each sample on the encoder, as integers in any unit; 0 for text. A sequence, array or tensor.
///     llm_ns: Cost of each sample on the LLM, in the same unit; as many as `encoder_ns`.
///     num_buckets: How many buckets to fill, those of all ranks; at least 1. None: the fewest, a multiple of
///         `num_microbatches`, for which a packing under the caps is found.
///     meets: `step`, `phase` or `pipeline`, as above.
///     num_microbatches: How many buckets a rank takes in a step.
///     seed: Seed of the search. Equal arguments give equal answers on any machine.
///     exact: Search exactly where few samples share a bucket. Takes about a second at most. Up to 48 samples are searched
///         exactly for some milliseconds without it.
///     bytes: Size of each sample in bytes; needed for `bucket_bytes_max`.
///     bucket_bytes_max: No bucket may hold more bytes.
///     tokens: Tokens of each sample; needed for `bucket_tokens_max`.
///     bucket_tokens_max: No bucket may hold more tokens.
///
/// Returns:
///     A `Balance`: the bucket of each sample, the loads, and a lower bound that no assignment can beat.
///
/// Raises:
///     ScheduleError: A number is out of its range, lists differ in length, or a cap cannot be kept. The message says
///         which entry.
///     TypeError: Something is no integer.
///     KeyboardInterrupt: Ctrl-C ended the search.
///
/// Example:
///     >>> import dflop
///     >>> dflop.balance([3, 0, 7, 2], [4, 5, 1, 2], 2, meets="pipeline").max_load_ns
///     7
#[pyfunction]
#[pyo3(signature = (encoder_ns, llm_ns, num_buckets, *, meets = "step", num_microbatches = None, seed = None, exact = false, bytes = None, bucket_bytes_max = None, tokens = None, bucket_tokens_max = None), text_signature = "(encoder_ns, llm_ns, num_buckets, *, meets='step', num_microbatches=1, seed=0, exact=False, bytes=None, bucket_bytes_max=None, tokens=None, bucket_tokens_max=None)")]
// Python's `help` shows the text as it stands.
#[allow(clippy::too_many_arguments, clippy::doc_markdown)]
pub(crate) fn balance(
    py: Python<'_>,
    encoder_ns: &Bound<'_, PyAny>,
    llm_ns: &Bound<'_, PyAny>,
    num_buckets: &Bound<'_, PyAny>,
    meets: &str,
    num_microbatches: Option<&Bound<'_, PyAny>>,
    seed: Option<&Bound<'_, PyAny>>,
    exact: bool,
    bytes: Option<&Bound<'_, PyAny>>,
    bucket_bytes_max: Option<&Bound<'_, PyAny>>,
    tokens: Option<&Bound<'_, PyAny>>,
    bucket_tokens_max: Option<&Bound<'_, PyAny>>,
) -> PyResult<Balance> {
    let encoder_ns = integers("encoder_ns", encoder_ns)?;
    let llm_ns = integers("llm_ns", llm_ns)?;
    let num_buckets = if num_buckets.is_none() { None } else { Some(count("num_buckets", num_buckets)?) };
    let meets = self::meets(meets)?;
    let num_microbatches = num_microbatches.map_or(Ok(1), |number| count("num_microbatches", number))?;
    let seed = seed.map_or(Ok(0), |seed| integer("seed", seed, ANY))?;
    let bytes = bytes.map(|bytes| integers("bytes", bytes)).transpose()?;
    let bucket_bytes_max = bucket_bytes_max.map(|max| integer("bucket_bytes_max", max, ANY)).transpose()?;
    let tokens = tokens.map(|tokens| integers("tokens", tokens)).transpose()?;
    let bucket_tokens_max =
        bucket_tokens_max.map(|max| integer("bucket_tokens_max", max, ANY)).transpose()?;
    let costs = Costs { encoder_ns, llm_ns, bytes, tokens };
    let num_samples = costs.llm_ns.len();
    let capped = Limits { seed, bucket_bytes_max, bucket_tokens_max, ..Limits::new(num_samples, 1) };
    let num_buckets = match num_buckets {
        Some(num_buckets) => num_buckets,
        None => {
            py.detach(|| fewest_buckets(&costs, &capped, num_microbatches)).map_err(map(Kind::Schedule))?
        }
    };
    let patient = Limits::patient(num_samples, num_buckets);
    let max_exact_work = if exact { EXACT_WORK } else { patient.max_exact_work };
    let limits = Limits { seed, max_exact_work, bucket_bytes_max, bucket_tokens_max, ..patient };
    let (found, interrupt) = py.detach(|| {
        let (interrupt, asked) = (Cell::new(None), Cell::new(Instant::now()));
        let stop = || {
            if asked.get().elapsed() < SIGNALS_EVERY {
                return false;
            }
            asked.set(Instant::now());
            let raised = Python::attach(|py| py.check_signals().err());
            let is_raised = raised.is_some();
            // Asked again, it must not forget.
            interrupt.set(raised.or(interrupt.take()));
            is_raised
        };
        let found = schedule_for(&costs, &limits, meets, num_microbatches, 0, &stop);
        (found, interrupt.take())
    });
    interrupt.map_or_else(|| found.map(Balance).map_err(map(Kind::Schedule)), Err)
}

/// A number of buckets, or of microbatches of a rank.
fn count(name: &str, given: &Bound<'_, PyAny>) -> PyResult<u32> {
    let number = integer(name, given, 1..=u64::from(u32::MAX))?;
    Ok(u32::try_from(number).expect("the range ends there"))
}

/// What ranks wait for, by its name.
pub(crate) fn meets(name: &str) -> PyResult<Meets> {
    name.parse().map_err(|error: ParseMeetsError| raise(Kind::Schedule, &error.to_string(), None))
}

/// The judgement of an assignment made elsewhere; see `_native/__init__.pyi`.
#[pyfunction]
#[pyo3(signature = (encoder_ns, llm_ns, num_buckets, assignment, *, meets = "step", num_microbatches = 1))]
pub(crate) fn judge(
    py: Python<'_>,
    encoder_ns: Vec<u64>,
    llm_ns: Vec<u64>,
    num_buckets: u32,
    assignment: Vec<u32>,
    meets: &str,
    num_microbatches: u32,
) -> PyResult<Balance> {
    let meets = self::meets(meets)?;
    let limits = Limits::new(llm_ns.len(), num_buckets);
    let costs = Costs { encoder_ns, llm_ns, ..Costs::default() };
    py.detach(|| Assignment::judge_for(&costs, &limits, meets, num_microbatches, assignment))
        .map(Balance)
        .map_err(map(Kind::Schedule))
}

/// Names of all baselines; see `_native/__init__.pyi`.
#[pyfunction]
pub(crate) fn baselines() -> Vec<&'static str> {
    Baseline::ALL.map(Baseline::name).to_vec()
}

/// The assignment of a baseline; see `_native/__init__.pyi`.
#[pyfunction]
#[pyo3(signature = (name, encoder_ns, llm_ns, tokens, num_buckets, *, seed = 0, solver_ms = 1_000))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn baseline(
    py: Python<'_>,
    name: &str,
    encoder_ns: Vec<u64>,
    llm_ns: Vec<u64>,
    tokens: Vec<u64>,
    num_buckets: u32,
    seed: u64,
    solver_ms: u32,
) -> PyResult<(Vec<u32>, Option<&'static str>)> {
    let unknown = || {
        let known = baselines().join(", ");
        raise(Kind::Schedule, &format!("no baseline is called `{name}`, there are: {known}"), None)
    };
    let baseline = Baseline::from_name(name).ok_or_else(unknown)?;
    let limits = Limits { seed, ..Limits::new(llm_ns.len(), num_buckets) };
    let costs = Costs { encoder_ns, llm_ns, ..Costs::default() };
    let (bucket, end) =
        py.detach(|| baseline.fill(&costs, &tokens, &limits, solver_ms)).map_err(map(Kind::Schedule))?;
    Ok((bucket, end.map(SolverEnd::name)))
}
