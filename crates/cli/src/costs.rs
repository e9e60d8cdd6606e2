//! What each sample of a dataset costs, from a data profile and a model profile, measured or estimated.

use crate::Failure;
use dflop_analytic::{Architecture, EstimateSettings, Hardware, catalogue_model, estimate};
use dflop_cost::{CostModel, CostSettings, StageLayers, Typical};
use dflop_data::{records, table};
use dflop_types::{
    DataProfile, MadeFrom, MicrobatchShape, ModelProfile, SampleShape, Tower, Trained, artifact, printable,
};
use std::path::Path;

/// What each good sample of a dataset costs, in the order of the dataset; one entry a sample in each column.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SampleTimes {
    /// Position of the sample among all records, bad ones counted.
    pub positions: Vec<u64>,
    /// Forward and backward on the encoder, in nanoseconds; 0 for text.
    pub encoder_ns: Vec<u64>,
    /// Of that, what a second encoder takes, which reads sounds beside one that reads pictures; 0 where there is one.
    pub second_encoder_ns: Vec<u64>,
    /// Forward and backward on the LLM backbone, in nanoseconds.
    pub llm_ns: Vec<u64>,
    /// LLM tokens.
    pub tokens: Vec<u64>,
    /// Bytes of activations that it adds to a rank that holds both components.
    pub bytes: Vec<u64>,
    /// Bad samples, which have no entry.
    pub num_bad: u64,
    /// Samples for which a curve was asked outside its measured range.
    pub num_extrapolated: u64,
    /// That the sizes of the samples are those of another model family, or of a larger or smaller model, than their
    /// times; `None` where they agree, or where an earlier data profile does not say.
    pub notice: Option<String>,
}

/// The note where the sizes of samples were measured for one model and the costs are of another: one of another family,
/// or of the same family with an LLM backbone of another size. `None` where they agree.
pub(crate) fn notice_of_models(data: &DataProfile, model: &ModelProfile) -> Option<String> {
    let of = |family: &str, size: Option<&str>| {
        let size = size.map_or_else(String::new, |size| format!(" with {}", printable(size)));
        format!("`{}`{size}", printable(family))
    };
    let tell = |data, model| format!("the data profile is of {data}, the costs are of {model}");
    if data.family != model.family {
        return Some(tell(of(&data.family, None), of(&model.family, None)));
    }
    let then = data.settings.get(DataProfile::LLM_SIZE)?;
    let now = DataProfile::llm_size(model.num_llm_layers().into(), model.hidden_size()?);
    (*then != now).then(|| tell(of(&data.family, Some(then)), of(&model.family, Some(&now))))
}

/// The costs of the samples of the data profile at `data`, by `model` where `trained` trains; a microbatch holds `batch_size`
/// samples, about.
///
/// What is frozen has no gradients of weights, and no backward where nothing before it trains: a frozen encoder costs a third.
/// A sample's cost is what it adds to a microbatch of mean samples: launching kernels is paid by the microbatch. The
/// file is read twice, as the mean must be known first.
///
/// # Errors
/// Those of [`records::visit`] and [`CostModel::new`].
pub fn of_profiles(
    data: &Path,
    model: &ModelProfile,
    trained: Trained,
    batch_size: u32,
) -> Result<SampleTimes, Failure> {
    let (header, _) = table::header(data)?;
    let found = of_shapes(&mut |take| Ok(records::visit(data, take)?), model, trained, batch_size)?;
    Ok(SampleTimes { notice: notice_of_models(&header, model), ..found })
}

/// Takes the position and the shape of a sample.
pub(crate) type Take<'a> = dyn FnMut(u64, &SampleShape) + 'a;

/// As [`of_profiles`], of the samples that `visit` hands over, the same ones in each of two calls; it gives the number of bad ones.
pub(crate) fn of_shapes(
    visit: &mut dyn FnMut(&mut Take<'_>) -> Result<u64, Failure>,
    model: &ModelProfile,
    trained: Trained,
    batch_size: u32,
) -> Result<SampleTimes, Failure> {
    let cost = CostModel::with(model, &CostSettings { trained, ..CostSettings::default() })?;
    let whole = StageLayers { num_layers: model.num_llm_layers(), is_first: true, is_last: true };
    let mut count = 0_u64;
    let mut sum = Typical::default();
    let num_bad = visit(&mut |_, shape| {
        count += 1;
        for (sum, tokens) in sum.encoder_tokens.iter_mut().zip(shape.tower_tokens()) {
            *sum += tokens;
        }
        sum.llm_tokens += u64::from(shape.llm_tokens);
        sum.label_tokens += u64::from(shape.label_tokens);
    })?;
    let mean = |sum: u64| (u128::from(sum) * u128::from(batch_size) / u128::from(count.max(1))) as u64;
    let typical = Typical {
        encoder_tokens: sum.encoder_tokens.map(mean),
        llm_tokens: mean(sum.llm_tokens),
        label_tokens: mean(sum.label_tokens),
    };
    let mut found = SampleTimes { num_bad, ..SampleTimes::default() };
    visit(&mut |position, shape| {
        let (encoder_ns, llm_ns) = cost.sample_cost(shape, typical);
        found.positions.push(position);
        found.encoder_ns.push(encoder_ns);
        found.second_encoder_ns.push(second_encoder_ns(&cost, shape, typical));
        found.llm_ns.push(llm_ns);
        found.tokens.push(shape.llm_tokens.into());
        let bytes =
            cost.sample_encoder_bytes(shape, typical) + cost.sample_stage_bytes(shape, typical, whole);
        found.bytes.push(bytes);
        found.num_extrapolated += u64::from(is_extrapolated(&cost, model.num_llm_layers(), shape));
    })?;
    Ok(found)
}

/// Forward and backward of what the second encoder reads of a sample, in nanoseconds.
fn second_encoder_ns(cost: &CostModel, shape: &SampleShape, typical: Typical) -> u64 {
    let read = shape.encoder_segments.iter().filter(|group| group.tower == Tower::Second);
    let encoder_segments: Vec<_> = read.copied().collect();
    if encoder_segments.is_empty() {
        return 0;
    }
    cost.sample_encoder_ns(&SampleShape { encoder_segments, ..SampleShape::default() }, typical)
}

/// Whether a sample alone is outside of what was measured.
fn is_extrapolated(cost: &CostModel, num_layers: u32, shape: &SampleShape) -> bool {
    let alone = MicrobatchShape {
        encoder_segments: shape.encoder_segments.clone(),
        llm_tokens: vec![shape.llm_tokens],
        label_tokens: shape.label_tokens.into(),
    };
    cost.encoder(&alone).extrapolated || cost.llm_stage(&alone, num_layers, true, true).extrapolated
}

/// The model profile of a model of the catalogue on a device of the table: counted from its configuration, not measured. Its LLM
/// layers are there with adapters of this rank, too, unless it is 0.
///
/// # Errors
/// An error if a name is in neither catalogue, with the known names, or if the device has no rate for the dtype.
pub fn estimated(model: &str, device: &str, dtype: &str, lora_rank: u32) -> Result<ModelProfile, Failure> {
    let model = catalogue_model(model)?;
    let hash = artifact::hash_parts([model.config.to_string().as_bytes()]);
    let settings = EstimateSettings {
        model: model.name.clone(),
        dtype: dtype.to_owned(),
        made_from: MadeFrom::from([("model_config".to_owned(), hash)]),
        lora_rank,
    };
    let architecture: Architecture = model.architecture()?;
    Ok(estimate(&architecture, Hardware::named(device)?, &settings)?)
}
