//! `dflop costs`: what each sample costs on encoder and LLM, as a table.

use crate::Failure;
use crate::args;
use crate::costs::{self, SampleTimes};
use dflop_types::{ArtifactError, ModelProfile, Trained, artifact, counted};
use std::path::Path;

/// Lines written at a time.
const LINES_EACH: usize = 4_096;

pub(super) fn run(arguments: &args::Costs) -> Result<(), Failure> {
    let data = &arguments.data_profile;
    let trained = trained_of(&arguments.source, None);
    let model = model_of(&arguments.source, data, trained)?;
    let found = costs::of_profiles(data, &model, trained, arguments.batch_size)?;
    write_table(&found);
    let kind = if model.is_estimated { "estimated, not measured" } else { "measured" };
    talk!(
        "{} by {} on {} ({kind}); trains: {trained}",
        counted(found.positions.len() as u64, "sample"),
        model.model,
        model.device.name
    );
    if found.num_extrapolated > 0 {
        talk!("note: {} outside the sizes that were measured", counted(found.num_extrapolated, "sample"));
    }
    if let Some(notice) = &found.notice {
        talk!("note: {notice}");
    }
    if found.num_bad > 0 {
        talk!("note: {} without a line", counted(found.num_bad, "bad sample"));
    }
    Ok(())
}

/// What trains: what `source` says, else what `configured` has, else all.
pub(super) fn trained_of(source: &args::CostSource, configured: Option<Trained>) -> Trained {
    match source.recipe {
        Some(recipe) => recipe.trained(source.lora_rank),
        None => configured.unwrap_or_default(),
    }
}

/// The model profile that `source` names, or that lies beside the data profile.
pub(super) fn model_of(
    source: &args::CostSource,
    data: &Path,
    trained: Trained,
) -> Result<ModelProfile, Failure> {
    let beside = data.parent().unwrap_or(Path::new("")).join("model_profile.json");
    match (&source.model, &source.hardware, &source.model_profile) {
        (Some(model), Some(device), _) => costs::estimated(model, device, &source.dtype, trained.lora_rank),
        (_, _, Some(path)) => Ok(artifact::read(path)?),
        _ => artifact::read(&beside).map_err(|error| {
            let is_missing = matches!(error, ArtifactError::Missing { .. });
            let failure = Failure::from(error);
            let estimate = "or estimate: `--model NAME --hardware NAME`, of those that `dflop models` lists; a family that \
                            it does not list is timed by `measure_cost` of `dflop.integrations`";
            let hint = failure.hint.map(|hint| if is_missing { format!("{hint}, {estimate}") } else { hint });
            Failure { hint, ..failure }
        }),
    }
}

/// The columns that `dflop schedule --costs` reads, and the position of each sample in the dataset.
fn write_table(found: &SampleTimes) {
    outln!("sample,encoder_ns,llm_ns,tokens,bytes");
    let lines = (0..found.positions.len()).map(|at| {
        let SampleTimes { positions, encoder_ns, llm_ns, tokens, bytes, .. } = found;
        format!("{},{},{},{},{}\n", positions[at], encoder_ns[at], llm_ns[at], tokens[at], bytes[at])
    });
    let mut text = String::new();
    for (number, line) in lines.enumerate() {
        text.push_str(&line);
        if number % LINES_EACH == LINES_EACH - 1 {
            out!("{text}");
            text.clear();
        }
    }
    out!("{text}");
}
