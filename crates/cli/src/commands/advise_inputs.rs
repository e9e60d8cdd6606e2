//! What `dflop advise` reads: the samples and their costs, and the global batches to simulate.

use super::cost_table::Table;
use super::costs::{model_of, trained_of};
use super::counted;
use crate::Failure;
use crate::advice::code::Trainer;
use crate::advice::ways::{Mixture, Setup, units_ns};
use crate::args::{self, RanksMeet};
use crate::config::{self, Config};
use crate::costs::{SampleTimes, Take, notice_of_models, of_shapes};
use dflop_data::profile::check_whole;
use dflop_data::table;
use dflop_schedule::{Costs, Cut, Meets};
use dflop_step::batches::GlobalBatches;
use dflop_types::{ModelProfile, SampleKind, Tower, Trained, printable, thousands};
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

/// Ranks and samples of a microbatch where nobody says.
const NUM_RANKS: u32 = 8;
const BATCH_SIZE: u32 = 4;

/// Where the samples are, and the ranks that train on them.
pub(super) struct Inputs {
    pub(super) data: PathBuf,
    pub(super) ranks: Setup,
    pub(super) trained: Trained,
}

impl Inputs {
    pub(super) fn of(arguments: &args::Advise) -> Result<Self, Failure> {
        let given = arguments.data.clone().unwrap_or_else(|| table::FILE_NAME.into());
        let is_config = given.extension().is_some_and(|ending| ending == "yaml" || ending == "yml");
        if is_config && !given.exists() {
            let hint = Some("give the path of a data profile or of a `dflop.yaml`".to_owned());
            return Err(Failure::new(format!("no configuration at `{}`", given.display()), hint));
        }
        let config = if is_config { Some(config::load(&given)?) } else { None };
        let of_config = config.as_ref().map(|config| config.cluster.num_ranks);
        let num_ranks = arguments.num_ranks.or(of_config).unwrap_or(NUM_RANKS);
        let accumulation = arguments.accumulation;
        let batch_size = match (arguments.batch_size, &config) {
            (Some(batch_size), _) => batch_size,
            (None, None) => BATCH_SIZE,
            (None, Some(config)) => {
                let (size, places) = (
                    u64::from(config.train.global_batch_size),
                    u64::from(num_ranks) * u64::from(accumulation),
                );
                if size % places != 0 {
                    return Err(Failure::new(
                        format!(
                            "`train.global_batch_size` is {size}, must be divisible by {num_ranks} ranks x {}",
                            microbatches(accumulation)
                        ),
                        Some("give the samples of a microbatch with `--batch-size`".to_owned()),
                    ));
                }
                u32::try_from(size / places).unwrap_or(u32::MAX)
            }
        };
        let meets = match arguments.meets {
            Some(RanksMeet::Step) => Meets::Step,
            Some(RanksMeet::Phase) => Meets::Phase,
            None => arguments.trainer.meets(),
        };
        let trained = trained_of(&arguments.source, config.as_ref().map(Config::trained));
        let data = config.map_or(given, |config| config.directory.join(table::FILE_NAME));
        // The samples first: without them costs say nothing.
        table::header(&data)?;
        let is_padded = arguments.padded.unwrap_or(arguments.trainer.is_framework());
        if !is_padded && matches!(arguments.trainer, Trainer::LlamaFactory | Trainer::Nemo) {
            return Err(Failure::new(
                format!(
                    "`--padded` is false, must be true with `--trainer {}`: it pads the rows of each microbatch",
                    arguments.trainer
                ),
                Some("leave `--padded` out".to_owned()),
            ));
        }
        Ok(Self { data, trained, ranks: Setup { num_ranks, batch_size, accumulation, meets, is_padded } })
    }
}

/// Where the costs come from.
pub(super) enum Basis {
    Model(Box<ModelProfile>),
    /// Given, a line for each sample.
    File(PathBuf),
}

impl Basis {
    pub(super) fn of(arguments: &args::Advise, inputs: &Inputs) -> Result<Self, Failure> {
        if let Some(path) = &arguments.costs {
            return Ok(Self::File(path.clone()));
        }
        let model = model_of(&arguments.source, &inputs.data, inputs.trained).map_err(|failure| {
            let hint =
                failure.hint.map(|hint| format!("{hint}; costs of your own are given by `--costs FILE`"));
            Failure { hint, ..failure }
        })?;
        Ok(Self::Model(Box::new(model)))
    }

    pub(super) fn is_estimated(&self) -> bool {
        matches!(self, Self::Model(model) if model.is_estimated)
    }

    /// `measured`, `estimated` or `given`.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Model(model) if model.is_estimated => "estimated",
            Self::Model(_) => "measured",
            Self::File(_) => "given",
        }
    }

    /// The file that was given.
    pub(super) fn file(&self) -> Option<&Path> {
        match self {
            Self::Model(_) => None,
            Self::File(path) => Some(path),
        }
    }

    /// Its line on the screen.
    pub(super) fn line(&self) -> String {
        match self {
            Self::Model(model) => {
                let kind = if model.is_estimated { "estimated, not measured" } else { "measured" };
                format!("costs {kind}: {} on {}", printable(&model.model), printable(&model.device.name))
            }
            Self::File(path) => {
                format!("costs given: `{}`, read as nanoseconds", printable(&path.display().to_string()))
            }
        }
    }
}

/// What the data profile says, and the global batches that are simulated.
pub(super) struct Survey {
    pub(super) family: String,
    /// Samples of each kind, in the order of [`SampleKind::ALL`].
    pub(super) kinds: [u64; 5],
    pub(super) mixture: Mixture,
    /// Id and kind of the costliest sample.
    pub(super) largest: (String, SampleKind),
    pub(super) num_extrapolated: u64,
    /// That the costs are of another model than the shapes.
    pub(super) notice: Option<String>,
}

impl Survey {
    pub(super) fn read(inputs: &Inputs, basis: &Basis, arguments: &args::Advise) -> Result<Self, Failure> {
        let Inputs { data, ranks, trained } = inputs;
        let (header, num_samples) = table::header(data)?;
        check_whole(&header)?;
        let (batches, steps_per_epoch) = draw(num_samples, *ranks, arguments)?;
        let drawn: BTreeSet<u32> = batches.iter().flatten().copied().collect();
        let (mut segments, mut kinds, mut is_counted) = (HashMap::new(), [0; 5], false);
        let mut visit = |take: &mut Take<'_>| -> Result<u64, Failure> {
            for (index, row) in (0_u32..).zip(table::rows(data)?) {
                let row = row?;
                take(index.into(), &row.shape);
                if is_counted {
                    continue;
                }
                kinds[SampleKind::ALL.iter().position(|kind| *kind == row.kind).unwrap_or(0)] += 1;
                if drawn.contains(&index) {
                    segments.insert(index, row.shape.encoder_segments);
                }
            }
            is_counted = true;
            Ok(0)
        };
        let times = match basis {
            Basis::Model(model) => of_shapes(&mut visit, model, *trained, ranks.batch_size)?,
            Basis::File(path) => given(&mut visit, path)?,
        };
        let units = segments.iter().map(|(&at, segments)| {
            // A unit of one encoder takes another time than one of the other with as many tokens.
            let second_ns = times.second_encoder_ns[at as usize];
            let first_ns = times.encoder_ns[at as usize].saturating_sub(second_ns);
            let of = |tower: Tower, ns: u64| {
                let groups = segments.iter().filter(|group| group.tower == tower);
                units_ns(ns, &groups.map(|group| (group.count, group.tokens)).collect::<Vec<_>>())
            };
            (at, [of(Tower::First, first_ns), of(Tower::Second, second_ns)].concat())
        });
        let units = units.collect();
        let costs = Costs {
            encoder_ns: times.encoder_ns,
            llm_ns: times.llm_ns,
            tokens: Some(times.tokens),
            bytes: None,
        };
        let work = |at: usize| u128::from(costs.encoder_ns[at]) + u128::from(costs.llm_ns[at]);
        let largest = (0..costs.num_samples()).rev().max_by_key(|&at| work(at)).unwrap_or(0);
        if work(largest) == 0 {
            let hint = match basis {
                Basis::Model(_) => "measure the model again with `dflop profile model`".to_owned(),
                Basis::File(path) => format!("give costs above 0 in `{}`", path.display()),
            };
            let message = "no sample costs anything: 0 ns, must be above that".to_owned();
            return Err(Failure::new(message, Some(hint)));
        }
        let row = table::rows(data)?.nth(largest).transpose()?.unwrap_or_default();
        let mixture = Mixture::new(costs, units, batches, steps_per_epoch)?;
        let cut = Cut {
            num_buckets: u32::try_from(ranks.num_buckets()).unwrap_or(u32::MAX),
            meets: ranks.meets,
            num_microbatches: ranks.accumulation,
            bucket_bytes_max: None,
            bucket_tokens_max: None,
            seed: arguments.seed,
            is_padded: inputs.ranks.is_padded,
        };
        mixture.costs.check(&cut, ranks.global_batch_size() as usize)?;
        let num_extrapolated = times.num_extrapolated;
        let notice = match basis {
            Basis::Model(model) => notice_of_models(&header, model),
            Basis::File(_) => None,
        };
        let largest = (row.id, row.kind);
        Ok(Self { family: header.family, kinds, mixture, largest, num_extrapolated, notice })
    }

    /// Work of each sample, in nanoseconds.
    pub(super) fn work_ns(&self) -> Vec<f64> {
        let Costs { encoder_ns, llm_ns, .. } = self.mixture.costs.columns();
        encoder_ns.iter().zip(llm_ns).map(|(encoder, llm)| *encoder as f64 + *llm as f64).collect()
    }

    /// The encoder's part of the work of all samples.
    pub(super) fn encoder_share(&self) -> f64 {
        let encoder_ns = &self.mixture.costs.columns().encoder_ns;
        encoder_ns.iter().map(|&ns| ns as f64).sum::<f64>() / self.work_ns().iter().sum::<f64>()
    }
}

/// The costs in the file at `path`, of the samples that `visit` hands over.
fn given(
    visit: &mut dyn FnMut(&mut Take<'_>) -> Result<u64, Failure>,
    path: &Path,
) -> Result<SampleTimes, Failure> {
    let table = Table::read(path)?;
    if let Some(line) = table.out_of_order {
        return Err(Failure::new(
            format!("`{}`: line {line}: `sample` is not above that of the line before", path.display()),
            Some("give the costs in the order of the data profile, a line for each sample".to_owned()),
        ));
    }
    let Costs { encoder_ns, llm_ns, .. } = table.costs;
    let (mut tokens, mut of_encoders) = (Vec::new(), Vec::new());
    visit(&mut |_, shape| {
        tokens.push(u64::from(shape.llm_tokens));
        let of = |is_counted: fn(Tower) -> bool| -> u128 {
            let groups = shape.encoder_segments.iter().filter(|group| is_counted(group.tower));
            groups.map(|group| u128::from(group.count) * u128::from(group.tokens)).sum()
        };
        of_encoders.push((of(|tower| tower == Tower::Second), of(|_| true)));
    })?;
    if encoder_ns.len() != tokens.len() {
        return Err(Failure::new(
            format!(
                "`{}` has costs of {}, the data profile has {}, must be equal",
                path.display(),
                counted(encoder_ns.len() as u64, "sample"),
                counted(tokens.len() as u64, "sample")
            ),
            Some("write the costs anew from this data profile: `dflop.costs(...).write_csv(...)`".to_owned()),
        ));
    }
    // Costs in another order would be seen here, mostly.
    if let Some(at) = (0..tokens.len()).find(|&at| of_encoders[at].1 == 0 && encoder_ns[at] > 0) {
        return Err(Failure::new(
            format!(
                "`{}`: sample {at} has `encoder_ns` {}, and the data profile has text alone there, must be 0",
                path.display(),
                encoder_ns[at]
            ),
            Some("give the costs in the order of the data profile".to_owned()),
        ));
    }
    // The table has one number for both encoders of a sample: each takes its part of the tokens.
    let second = |(&ns, &(second, all)): (&u64, &(u128, u128))| {
        u64::try_from(u128::from(ns) * second / all.max(1)).unwrap_or(ns)
    };
    Ok(SampleTimes {
        second_encoder_ns: encoder_ns.iter().zip(&of_encoders).map(second).collect(),
        encoder_ns,
        llm_ns,
        tokens,
        ..SampleTimes::default()
    })
}

/// The global batches of the first steps, those of further epochs where one has too few; and how many an epoch has.
fn draw(num_samples: u64, ranks: Setup, arguments: &args::Advise) -> Result<(Vec<Vec<u32>>, usize), Failure> {
    let size = ranks.global_batch_size();
    if num_samples < size {
        return Err(Failure::new(
            format!(
                "the data profile has {}, a step takes {}: {} ranks x {} x {}",
                counted(num_samples, "sample"),
                thousands(size),
                ranks.num_ranks,
                microbatches(ranks.accumulation),
                counted(ranks.batch_size.into(), "sample"),
            ),
            Some(
                "profile more of the data, or lower `--num-ranks`, `--batch-size` or `--accumulation`"
                    .to_owned(),
            ),
        ));
    }
    let narrow = |number: u64| {
        u32::try_from(number).map_err(|_| {
            Failure::new(
                format!("the data profile has {number} samples, must be below {}", 1_u64 << 32),
                None,
            )
        })
    };
    let batches = GlobalBatches::new(narrow(num_samples)?, narrow(size)?, arguments.seed)?.whole_only()?;
    let indices = |step| batches.batch(step).into_iter().map(|sample| sample.0).collect();
    let steps_per_epoch = batches.steps_per_epoch() as usize;
    Ok(((0..u64::from(arguments.sampled_batches)).map(indices).collect(), steps_per_epoch))
}

/// `1 microbatch`, `2 microbatches`.
pub(super) fn microbatches(count: u32) -> String {
    format!("{count} microbatch{}", if count == 1 { "" } else { "es" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_types::{EncoderSegments, SampleShape};

    /// A table has one number for both encoders of a sample: each takes its part of the tokens.
    #[test]
    fn given_costs_are_split_between_two_encoders() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("costs.csv");
        std::fs::write(&path, "encoder_ns,llm_ns\n1000,7\n0,9\n500,3\n").unwrap();
        let of = |pictures: u32, sounds: u32| SampleShape {
            encoder_segments: [(pictures, Tower::First), (sounds, Tower::Second)]
                .into_iter()
                .filter(|(count, _)| *count > 0)
                .map(|(count, tower)| EncoderSegments { tower, ..EncoderSegments::of(count, 10) })
                .collect(),
            llm_tokens: 5,
            ..SampleShape::default()
        };
        let shapes = [of(1, 3), of(0, 0), of(0, 2)];
        let mut visit = |take: &mut Take<'_>| -> Result<u64, Failure> {
            for (at, shape) in (0..).zip(&shapes) {
                take(at, shape);
            }
            Ok(0)
        };
        let times = given(&mut visit, &path).map_err(|failure| failure.message).unwrap();
        assert_eq!(times.encoder_ns, [1000, 0, 500]);
        assert_eq!(times.second_encoder_ns, [750, 0, 500]);
        assert_eq!(times.tokens, [5, 5, 5]);
    }
}
