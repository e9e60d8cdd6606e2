//! The costs of a dataset for the sampler: arrays, lists and profiles in, the buckets of global batches out.

// Costs that are no integers keep nine digits.
#![allow(clippy::cast_precision_loss)]

use crate::balance::meets;
use crate::error::{Kind, artifact, map, raise};
use dflop_cli::Failure;
use dflop_cli::costs::SampleTimes;
use dflop_data::DataError;
use dflop_data::records;
use dflop_schedule::{BalanceError, Costs, Cut, DatasetCosts, of_tokens, scaled};
use dflop_types::{Hint as _, Recipe};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};
use std::path::PathBuf;
use std::sync::Arc;

/// What the samples of a dataset cost; see `_native/__init__.pyi`.
#[pyclass(frozen, module = "dflop._native")]
#[derive(Clone)]
pub(crate) struct SampleCosts {
    costs: Arc<DatasetCosts>,
    /// One of our costs in the unit that was given; `None` where samples were given by their tokens.
    unit: Option<f64>,
    /// Position of each sample in the dataset; `None` where they are 0, 1, 2, ...
    positions: Option<Arc<[u64]>>,
    #[pyo3(get)]
    num_bad: u64,
}

/// A column of numbers.
enum Numbers {
    Integers(Vec<u64>),
    Floats(Vec<f64>),
}

impl Numbers {
    fn len(&self) -> usize {
        match self {
            Self::Integers(values) => values.len(),
            Self::Floats(values) => values.len(),
        }
    }

    fn into_floats(self) -> Vec<f64> {
        match self {
            Self::Integers(values) => values.into_iter().map(|value| value as f64).collect(),
            Self::Floats(values) => values,
        }
    }
}

const RULE: &str = "must be numbers, finite and not negative";

/// Every `of`-th number of the chunks, from the first and from the second on and so on: as many columns.
///
/// A chunk holds whole rows, in the machine's order of bytes; `code` is the letter of Python's `struct`.
fn columns<const OF: usize>(chunks: &Bound<'_, PyAny>, code: char, what: &str) -> PyResult<[Numbers; OF]> {
    match code {
        'd' => floats(chunks, what, f64::from_ne_bytes),
        'f' => floats(chunks, what, |bytes| f64::from(f32::from_ne_bytes(bytes))),
        'b' => integers(chunks, what, |bytes| i8::from_ne_bytes(bytes).into()),
        'h' => integers(chunks, what, |bytes| i16::from_ne_bytes(bytes).into()),
        'i' => integers(chunks, what, |bytes| i32::from_ne_bytes(bytes).into()),
        'q' => integers(chunks, what, |bytes| i64::from_ne_bytes(bytes).into()),
        'B' => integers(chunks, what, |bytes| u8::from_ne_bytes(bytes).into()),
        'H' => integers(chunks, what, |bytes| u16::from_ne_bytes(bytes).into()),
        'I' => integers(chunks, what, |bytes| u32::from_ne_bytes(bytes).into()),
        'Q' => integers(chunks, what, |bytes| u64::from_ne_bytes(bytes).into()),
        _ => Err(PyValueError::new_err(format!("numbers of format `{code}` are not known"))),
    }
}

fn floats<const OF: usize, const SIZE: usize>(
    chunks: &Bound<'_, PyAny>,
    what: &str,
    read: impl Fn([u8; SIZE]) -> f64,
) -> PyResult<[Numbers; OF]> {
    let mut columns: [Vec<f64>; OF] = std::array::from_fn(|_| Vec::new());
    rows::<OF, SIZE>(chunks, |index, row| {
        let values = row.map(&read);
        if values.iter().all(|value| value.is_finite() && *value >= 0.0) {
            columns.iter_mut().zip(values).for_each(|(column, value)| column.push(value));
            return Ok(());
        }
        Err(wrong(what, index, &values.map(|value| format!("{value:?}"))))
    })?;
    Ok(columns.map(Numbers::Floats))
}

fn integers<const OF: usize, const SIZE: usize>(
    chunks: &Bound<'_, PyAny>,
    what: &str,
    read: impl Fn([u8; SIZE]) -> i128,
) -> PyResult<[Numbers; OF]> {
    let mut columns: [Vec<u64>; OF] = std::array::from_fn(|_| Vec::new());
    rows::<OF, SIZE>(chunks, |index, row| {
        let values = row.map(&read);
        for (column, value) in columns.iter_mut().zip(values) {
            match u64::try_from(value) {
                Ok(value) => column.push(value),
                Err(_) => return Err(wrong(what, index, &values.map(|value| value.to_string()))),
            }
        }
        Ok(())
    })?;
    Ok(columns.map(Numbers::Integers))
}

/// Hands each row to `take`, with its number.
fn rows<const OF: usize, const SIZE: usize>(
    chunks: &Bound<'_, PyAny>,
    mut take: impl FnMut(usize, [[u8; SIZE]; OF]) -> PyResult<()>,
) -> PyResult<()> {
    let mut index = 0;
    for chunk in chunks.try_iter()? {
        let chunk = chunk?.cast_into::<PyBytes>()?;
        for row in chunk.as_bytes().as_chunks::<SIZE>().0.as_chunks::<OF>().0 {
            take(index, *row)?;
            index += 1;
        }
    }
    Ok(())
}

/// The error about the numbers of one sample: a pair or one number.
fn wrong(what: &str, index: usize, shown: &[String]) -> PyErr {
    let message = match shown {
        [one] => format!("the {what} of sample {index} is {one}, must be a whole number from 0"),
        _ => format!("the {what} of sample {index} are ({}), {RULE}", shown.join(", ")),
    };
    raise(Kind::Schedule, &message, None)
}

/// The costs of pairs, integers as they are, other numbers with nine digits; and the unit.
fn of_pairs(encoder: Numbers, llm: Numbers) -> (Costs, Option<f64>) {
    match (encoder, llm) {
        (Numbers::Integers(encoder_ns), Numbers::Integers(llm_ns)) => {
            (Costs { encoder_ns, llm_ns, ..Costs::default() }, Some(1.0))
        }
        (encoder, llm) => {
            let (encoder, llm) = (encoder.into_floats(), llm.into_floats());
            let largest = encoder.iter().chain(&llm).copied().fold(0.0, f64::max);
            let [encoder_ns, llm_ns] = scaled(encoder, llm);
            (
                Costs { encoder_ns, llm_ns, ..Costs::default() },
                Some(if largest > 0.0 { largest / 1e9 } else { 1.0 }),
            )
        }
    }
}

/// The costs of samples of which tokens are known.
fn of_token_columns(encoder_tokens: &[u64], llm_tokens: Vec<u64>) -> (Costs, Option<f64>) {
    let [encoder_ns, llm_ns] = of_tokens(encoder_tokens, &llm_tokens);
    (Costs { encoder_ns, llm_ns, bytes: None, tokens: Some(llm_tokens) }, None)
}

impl SampleCosts {
    fn new((costs, unit): (Costs, Option<f64>), positions: Option<Vec<u64>>, num_bad: u64) -> PyResult<Self> {
        let costs = DatasetCosts::new(costs).map_err(map(Kind::Schedule))?;
        let positions = positions.map(Into::into);
        Ok(Self { costs: Arc::new(costs), unit, positions, num_bad })
    }

    /// The samples at these places among ours.
    fn positions_of(&self, samples: Vec<u32>) -> Vec<u64> {
        let position = |sample: u32| {
            self.positions.as_ref().map_or(u64::from(sample), |positions| positions[sample as usize])
        };
        samples.into_iter().map(position).collect()
    }
}

/// An error of the sampler, whose caps are called `max_tokens` and `max_bytes` there.
fn of_sampler(error: BalanceError) -> PyErr {
    let as_called = |text: String| {
        text.replace("bucket_tokens_max", "max_tokens").replace("bucket_bytes_max", "max_bytes")
    };
    let hint = match &error {
        BalanceError::NoSizes { unit, .. } => Some(format!("give them with `dflop.costs(..., {unit}=...)`")),
        _ => error.hint().map(as_called),
    };
    raise(Kind::Schedule, &as_called(error.to_string()), hint)
}

/// How a global batch is cut, as Python gives it: buckets, microbatches of a rank, `meets`, caps, seed, whether rows are padded.
type GivenCut<'a> = (u32, u32, &'a str, Option<u64>, Option<u64>, u64, bool);

fn cut(given: GivenCut<'_>) -> PyResult<Cut> {
    let (num_buckets, num_microbatches, meets, bytes, tokens, seed, is_padded) = given;
    let meets = self::meets(meets)?;
    Ok(Cut {
        num_buckets,
        meets,
        num_microbatches,
        bucket_bytes_max: bytes,
        bucket_tokens_max: tokens,
        seed,
        is_padded,
    })
}

#[pymethods]
impl SampleCosts {
    /// Of an array with a row (encoder cost, LLM cost) for each sample.
    #[staticmethod]
    fn of_rows(chunks: &Bound<'_, PyAny>, code: char) -> PyResult<Self> {
        let [encoder, llm] = columns::<2>(chunks, code, "costs")?;
        Self::new(of_pairs(encoder, llm), None, 0)
    }

    /// Of a list of pairs.
    #[staticmethod]
    fn of_list(entries: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (mut encoder, mut llm) = (Vec::new(), Vec::new());
        let mut whole = Some((Vec::new(), Vec::new()));
        for (index, entry) in entries.try_iter()?.enumerate() {
            let entry = entry?;
            let is_pair =
                (entry.is_instance_of::<PyTuple>() || entry.is_instance_of::<PyList>()) && entry.len()? == 2;
            if !is_pair {
                let shown = entry.repr()?;
                let message = format!(
                    "sample {index} is {shown}, must be a pair (encoder cost, LLM cost), as sample 0 is"
                );
                return Err(raise(Kind::Schedule, &message, None));
            }
            let (first, second) = (entry.get_item(0)?, entry.get_item(1)?);
            if let Some((encoder, llm)) = &mut whole
                && let (Ok(one), Ok(other)) = (first.extract::<u64>(), second.extract::<u64>())
            {
                encoder.push(one);
                llm.push(other);
                continue;
            }
            let number = |value: &Bound<'_, PyAny>| {
                value.extract::<f64>().ok().filter(|number| number.is_finite() && *number >= 0.0)
            };
            let (Some(one), Some(other)) = (number(&first), number(&second)) else {
                let shown = PyTuple::new(entries.py(), [first, second])?.repr()?;
                let message = format!("the costs of sample {index} are {shown}, {RULE}");
                return Err(raise(Kind::Schedule, &message, None));
            };
            if let Some((integers, others)) = whole.take() {
                encoder.extend(integers.into_iter().map(|cost: u64| cost as f64));
                llm.extend(others.into_iter().map(|cost: u64| cost as f64));
            }
            encoder.push(one);
            llm.push(other);
        }
        let (encoder, llm) = match whole {
            Some((encoder, llm)) => (Numbers::Integers(encoder), Numbers::Integers(llm)),
            None => (Numbers::Floats(encoder), Numbers::Floats(llm)),
        };
        Self::new(of_pairs(encoder, llm), None, 0)
    }

    /// Of an array with a row (encoder tokens, LLM tokens) for each sample.
    #[staticmethod]
    fn of_token_rows(chunks: &Bound<'_, PyAny>, code: char) -> PyResult<Self> {
        match columns::<2>(chunks, code, "tokens")? {
            [Numbers::Integers(encoder), Numbers::Integers(llm)] => {
                Self::new(of_token_columns(&encoder, llm), None, 0)
            }
            _ => Err(PyValueError::new_err("tokens must be whole numbers")),
        }
    }

    /// Of the samples of a data profile: their tokens.
    #[staticmethod]
    fn of_profile(py: Python<'_>, data_profile_path: PathBuf) -> PyResult<Self> {
        let (mut encoder, mut llm, mut positions) = (Vec::new(), Vec::new(), Vec::new());
        let num_bad = py.detach(|| {
            records::visit(&data_profile_path, &mut |position, shape| {
                encoder.push(shape.encoder_tokens());
                llm.push(u64::from(shape.llm_tokens));
                positions.push(position);
            })
        });
        let num_bad = num_bad.map_err(|error| match error {
            DataError::Artifact(error) => artifact(error),
            error => map(Kind::Artifact)(error),
        })?;
        Self::new(of_token_columns(&encoder, llm), (num_bad > 0).then_some(positions), num_bad)
    }

    /// Of the samples of a data profile by a model profile, or by a model of the catalogue on a device; and how many are
    /// outside of what was measured.
    #[staticmethod]
    fn of_model(
        py: Python<'_>,
        data_profile_path: PathBuf,
        model_profile_path: Option<PathBuf>,
        estimated: Option<(String, String, String)>,
        recipe: &str,
        lora_rank: u32,
        batch_size: u32,
    ) -> PyResult<(Self, u64, Option<String>)> {
        let recipe: Recipe = recipe.parse().map_err(PyValueError::new_err::<String>)?;
        let trained = recipe.trained(lora_rank);
        let model = match (estimated, model_profile_path) {
            (Some((model, device, dtype)), _) => {
                dflop_cli::costs::estimated(&model, &device, &dtype, trained.lora_rank).map_err(failed)?
            }
            (None, Some(path)) => dflop_types::artifact::read(&path).map_err(artifact)?,
            (None, None) => return Err(PyValueError::new_err("a model profile or a model is needed")),
        };
        let found =
            py.detach(|| dflop_cli::costs::of_profiles(&data_profile_path, &model, trained, batch_size));
        let found = found.map_err(failed)?;
        let SampleTimes {
            positions,
            encoder_ns,
            llm_ns,
            tokens,
            bytes,
            num_bad,
            num_extrapolated,
            notice,
            ..
        } = found;
        let costs = Costs { encoder_ns, llm_ns, bytes: Some(bytes), tokens: Some(tokens) };
        Ok((Self::new((costs, None), (num_bad > 0).then_some(positions), num_bad)?, num_extrapolated, notice))
    }

    /// The same samples with the costs in a list of pairs; tokens and positions stay.
    fn with_costs(&self, entries: &Bound<'_, PyAny>) -> PyResult<Self> {
        let given = Self::of_list(entries)?;
        let Costs { bytes, tokens, .. } = self.costs.columns().clone();
        let costs = Costs { bytes, tokens, ..given.costs.columns().clone() };
        let costs = DatasetCosts::new(costs).map_err(map(Kind::Schedule))?;
        Ok(Self { costs: Arc::new(costs), ..self.clone() })
    }

    /// The same with tokens or bytes of each sample, each from chunks and a code; what is not given stays.
    #[pyo3(signature = (*, tokens = None, bytes = None))]
    fn with_sizes(
        &self,
        tokens: Option<(Bound<'_, PyAny>, char)>,
        bytes: Option<(Bound<'_, PyAny>, char)>,
    ) -> PyResult<Self> {
        let mut costs = self.costs.columns().clone();
        for (name, given, column) in
            [("tokens", tokens, &mut costs.tokens), ("bytes", bytes, &mut costs.bytes)]
        {
            let Some((chunks, code)) = given else { continue };
            let [numbers] = columns::<1>(&chunks, code, name)?;
            let (found, expected) = (numbers.len(), self.costs.num_samples());
            if found != expected {
                let message =
                    format!("`{name}` has {found} samples, the costs have {expected}, must be equal");
                return Err(raise(Kind::Schedule, &message, None));
            }
            let Numbers::Integers(values) = numbers else {
                let message = format!("`{name}` has numbers that are not whole, must be integers from 0");
                return Err(raise(Kind::Schedule, &message, None));
            };
            *column = Some(values);
        }
        let costs = DatasetCosts::new(costs).map_err(map(Kind::Schedule))?;
        Ok(Self { costs: Arc::new(costs), ..self.clone() })
    }

    fn __len__(&self) -> usize {
        self.costs.num_samples()
    }

    /// A column in the machine's order of bytes, eight each; `None` where there is none of that name.
    fn column<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let Costs { encoder_ns, llm_ns, bytes, tokens } = self.costs.columns();
        let values: Option<&[u64]> = match name {
            "encoder_ns" => Some(encoder_ns),
            "llm_ns" => Some(llm_ns),
            "bytes" => bytes.as_deref(),
            "tokens" => tokens.as_deref(),
            "positions" => self.positions.as_deref(),
            _ => None,
        };
        values.map(|values| packed(py, values)).transpose()
    }

    /// Places of the samples whose LLM cost is above a limit, or their LLM tokens where they were given by tokens.
    fn giants(&self, llm_cost_max: f64) -> Vec<u32> {
        let Costs { llm_ns, tokens, .. } = self.costs.columns();
        let (values, limit) = match (self.unit, tokens) {
            (None, Some(tokens)) => (tokens, llm_cost_max),
            (unit, _) => (llm_ns, (llm_cost_max / unit.unwrap_or(1.0)).round_ties_even()),
        };
        let values = (0..).zip(values);
        values.filter(|(_, value)| **value as f64 > limit).map(|(sample, _)| sample).collect()
    }

    #[getter]
    fn digest(&self, py: Python<'_>) -> String {
        py.detach(|| self.costs.digest().to_owned())
    }

    /// `ScheduleError` where a global batch of so many samples could not be cut.
    fn check(&self, py: Python<'_>, cut: GivenCut<'_>, num_samples: usize) -> PyResult<()> {
        let cut = self::cut(cut)?;
        py.detach(|| self.costs.check(&cut, num_samples)).map_err(of_sampler)
    }

    /// Positions in the dataset of the samples of each bucket of the global batch of `samples`.
    fn buckets(&self, py: Python<'_>, samples: Vec<u32>, cut: GivenCut<'_>) -> PyResult<Vec<Vec<u64>>> {
        let cut = self::cut(cut)?;
        let found = py.detach(|| self.costs.buckets(&samples, &cut)).map_err(of_sampler)?;
        Ok(found.into_iter().map(|bucket| self.positions_of(bucket)).collect())
    }

    /// How many of the first of `samples` fit one global batch.
    fn fitting(&self, py: Python<'_>, samples: Vec<u32>, cut: GivenCut<'_>) -> PyResult<usize> {
        let cut = self::cut(cut)?;
        py.detach(|| self.costs.fitting(&samples, &cut)).map_err(of_sampler)
    }

    /// Frozen: a copy is the same.
    fn __copy__(slf: PyRef<'_, Self>) -> Py<Self> {
        slf.into()
    }

    fn __deepcopy__(slf: PyRef<'_, Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf.into()
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let column = |name: &str| self.column(py, name);
        let names = ["encoder_ns", "llm_ns", "bytes", "tokens", "positions"];
        let columns: Vec<_> = names.iter().map(|name| column(name)).collect::<PyResult<_>>()?;
        let make = py.get_type::<Self>().getattr("of_state")?;
        let state = (columns, self.unit, self.num_bad);
        Ok((make, state).into_pyobject(py)?.into_any())
    }

    /// What `__reduce__` gave, back.
    #[staticmethod]
    fn of_state(columns: Vec<Option<Bound<'_, PyBytes>>>, unit: Option<f64>, num_bad: u64) -> PyResult<Self> {
        let unpacked = |bytes: &Bound<'_, PyBytes>| {
            bytes
                .as_bytes()
                .as_chunks::<8>()
                .0
                .iter()
                .map(|value| u64::from_ne_bytes(*value))
                .collect::<Vec<u64>>()
        };
        let [encoder, llm, bytes, tokens, positions] = &columns[..] else {
            return Err(PyValueError::new_err("not a state of `SampleCosts`: it has not five columns"));
        };
        let column = |column: &Option<Bound<'_, PyBytes>>| column.as_ref().map(unpacked);
        let needed = |given| column(given).unwrap_or_default();
        let costs = Costs {
            encoder_ns: needed(encoder),
            llm_ns: needed(llm),
            bytes: column(bytes),
            tokens: column(tokens),
        };
        Self::new((costs, unit), column(positions), num_bad)
    }
}

/// A failure of the command line's own code as an exception.
fn failed(failure: Failure) -> PyErr {
    raise(Kind::Profile, &failure.message, failure.hint)
}

/// Numbers as bytes, in the machine's order.
fn packed<'py>(py: Python<'py>, values: &[u64]) -> PyResult<Bound<'py, PyBytes>> {
    PyBytes::new_with(py, values.len() * 8, |bytes| {
        for (place, value) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(values) {
            *place = value.to_ne_bytes();
        }
        Ok(())
    })
}
