//! What a plan needs and can be had without the user: the data profile of a model that is named, and the model profile of a
//! device of the table.

use super::{beside, current, estimate, profile_data};
use crate::Failure;
use crate::args::{ConfigArgument, InputFiles, ProfileData};
use crate::config::Config;
use dflop_analytic::Hardware;
use dflop_data::profile::check_complete;
use dflop_data::table;
use dflop_types::{ModelProfile, artifact};

/// Samples of a stale data profile that is made again without a question, at most: they are measured in seconds.
const REMADE_SAMPLES_MAX: usize = 100_000;

/// Makes the profiles beside the configuration that are not there, or are stale, and need no device: none where a file was
/// named.
pub(super) fn make_missing(config: &Config, files: &InputFiles) -> Result<(), Failure> {
    if config.model.name.is_some() && files.data_profile.is_none() {
        make_data_profile(config, files)?;
    }
    let Some(name) = &config.cluster.hardware else { return Ok(()) };
    if files.model_profile.is_some() {
        return Ok(());
    }
    let (hardware, path) = (Hardware::named(name)?, beside(config, None, "model_profile.json"));
    let model = config.model_hashes()?["model_config"].clone();
    if path.exists() {
        let found: ModelProfile = artifact::read(&path)?;
        let is_ours = found.made_from.get("model_config") == Some(&model)
            && found.device.name == hardware.title
            && found.device.dtype == config.model.dtype;
        // What was measured without these adapters stays: the error that follows says how to measure them.
        let lacks_adapters = found.is_estimated && !has_adapters(&found, config.trained().lora_rank);
        if is_ours && !lacks_adapters {
            return Ok(());
        }
        if is_ours {
            let rank = config.trained().lora_rank;
            talk!("the model profile was estimated without adapters of rank {rank}: making it again");
        } else if !found.is_estimated {
            let hint = format!(
                "name another with `--model-profile FILE`, or move it away: one for {name} is then estimated"
            );
            return Err(Failure::new(
                format!(
                    "`{}` was measured on {}, `cluster.device` is `{name}`",
                    path.display(),
                    found.device.name
                ),
                Some(hint),
            ));
        }
        if !is_ours {
            talk!("the model profile was estimated for {}: making it again", found.device.name);
        }
    }
    let profile = estimate::configured(config, hardware)?;
    talk!("estimated, not measured: {} on {}", profile.model, hardware.title);
    super::write(&path, &profile)
}

/// Makes the data profile of a model that is named where it is not there, or is stale, small, and of the whole dataset. The
/// error that follows for another stale one names the command.
fn make_data_profile(config: &Config, files: &InputFiles) -> Result<(), Failure> {
    let (path, mixture) = (beside(config, None, table::FILE_NAME), config.data.mixture.display());
    if path.exists() {
        let found = table::read(&path)?;
        let is_ours = check_complete(&found).is_ok() && found.samples.len() <= REMADE_SAMPLES_MAX;
        let Some(difference) = (if is_ours { current::stale(config, &found)? } else { None }) else {
            return Ok(());
        };
        talk!("the data profile is stale ({difference}): measuring `{mixture}` again");
    } else {
        talk!("no data profile yet: measuring `{mixture}`");
    }
    let arguments = ProfileData {
        config: ConfigArgument { config: files.config.config.clone() },
        out: None,
        evaluation: false,
        fresh: false,
        sample: None,
        shard: None,
    };
    profile_data::run_quietly(&arguments)
}

/// Whether a profile holds layers with adapters of this rank; true at rank 0, which needs none.
pub(super) fn has_adapters(profile: &ModelProfile, lora_rank: u32) -> bool {
    lora_rank == 0 || profile.variants.iter().any(|variant| variant.lora_rank == lora_rank)
}
