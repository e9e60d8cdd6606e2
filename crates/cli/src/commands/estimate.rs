//! `dflop profile model --estimate`: a model profile of a device that is not at hand, from numbers alone.

use super::models_write::named_model;
use super::write;
use crate::Failure;
use crate::args;
use crate::config::{self, Config};
use dflop_analytic::{Architecture, EstimateSettings, Hardware, catalogue_model, estimate};
use dflop_types::number::{self, thousands};
use dflop_types::{MadeFrom, ModelProfile, artifact, regular};
use serde_json::Value;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// What the first lines of a profile are shown for, in tokens.
const SHOWN_TOKENS: u64 = 8_192;

pub(super) fn run(arguments: &args::ProfileModel) -> Result<(), Failure> {
    let wanted = &arguments.estimate;
    // Without a configuration a model of the catalogue is enough.
    let config = match &wanted.model {
        Some(_) if !arguments.config.config.exists() => None,
        _ => Some(config::load_plan(&arguments.config.config)?),
    };
    let configured = config.as_ref().and_then(|config| config.cluster.hardware.clone());
    let Some(name) = wanted.hardware.clone().or(configured) else {
        return Err(Failure::new(
            "`--estimate` needs `--hardware`, or a device of the table as `cluster.device`",
            Some("`dflop models` lists the table".to_owned()),
        ));
    };
    let hardware = Hardware::named(&name)?;
    let read = match (&wanted.model, &config) {
        (Some(name), config) => of_catalogue(name, config.as_ref())?,
        (None, Some(config)) => of_config(config)?,
        (None, None) => of_directory(Path::new("."))?,
    };
    let configured = config.as_ref().map(|config| config.model.dtype.clone());
    let dtype = wanted.dtype.clone().or(configured).unwrap_or_else(|| "bfloat16".to_owned());
    let architecture = read.0.clone();
    let configured = config.as_ref().map_or(0, |config| config.trained().lora_rank);
    let lora_rank = if arguments.lora_rank > 0 { arguments.lora_rank } else { configured };
    let profile = of(read, hardware, dtype, lora_rank)?;
    let name = "model_profile.json";
    let out = match (&arguments.out, &config) {
        (Some(out), _) => out.clone(),
        (None, Some(config)) => config.directory.join(name),
        (None, None) => PathBuf::from(name),
    };
    out!("{}", summary(&architecture, &profile));
    talk!(
        "estimated, not measured: peak rates of {} ({}), efficiencies assumed; `dflop models` has the sources",
        hardware.title,
        hardware.source
    );
    write(&out, &profile)
}

/// The profile of the configured model on a device, with the adapters that the configuration trains.
pub(super) fn configured(config: &Config, hardware: &Hardware) -> Result<ModelProfile, Failure> {
    of(of_config(config)?, hardware, config.model.dtype.clone(), config.trained().lora_rank)
}

fn of(
    (architecture, model, hash): Read,
    hardware: &Hardware,
    dtype: String,
    lora_rank: u32,
) -> Result<ModelProfile, Failure> {
    let made_from = MadeFrom::from([("model_config".to_owned(), hash)]);
    Ok(estimate(&architecture, hardware, &EstimateSettings { model, dtype, made_from, lora_rank })?)
}

/// The configured model: of its directory, or of the catalogue.
fn of_config(config: &Config) -> Result<Read, Failure> {
    match &config.model.name {
        Some(name) => of_catalogue(name, Some(config)),
        None => of_directory(&config.model.dir),
    }
}

/// What is estimated, the name for people, and the hash of what it is read from.
type Read = (Architecture, String, String);

/// The architecture of the configured model, where this version can read it.
pub(super) fn architecture_of(config: &Config) -> Option<Architecture> {
    match &config.model.name {
        Some(name) => catalogue_model(name).ok()?.architecture().ok(),
        None => Some(of_directory(&config.model.dir).ok()?.0),
    }
}

/// The model in a directory.
fn of_directory(dir: &Path) -> Result<Read, Failure> {
    let path = dir.join("config.json");
    let bytes = regular::read(&path, super::INPUT_BYTES_MAX).map_err(|error| {
        let hint = "give `model.dir` a `config.json`, or name a model of the catalogue with `--model`";
        Failure::new(format!("cannot read `{}`: {error}", path.display()), Some(hint.to_owned()))
    })?;
    let config: Value = serde_json::from_slice(&bytes)
        .map_err(|error| Failure::new(format!("`{}` is not JSON: {error}", path.display()), None))?;
    let architecture = Architecture::from_config(&config).map_err(Failure::from).map_err(|failure| {
        Failure { message: format!("`{}`: {}", dir.display(), failure.message), ..failure }
    })?;
    let name = dir.file_name().map_or_else(|| dir.display().to_string(), |name| name.display().to_string());
    Ok((architecture, name, artifact::hash_parts([bytes.as_slice()])))
}

/// A model of the catalogue. Where the configured directory holds the same, it is that which is estimated, so that the
/// profile belongs to it.
fn of_catalogue(name: &str, config: Option<&Config>) -> Result<Read, Failure> {
    let model = catalogue_model(name)?;
    let architecture = model.architecture()?;
    if config.is_some_and(|config| config.model.name.as_ref() == Some(&model.name)) {
        let text = named_model(name, None)?.config;
        return Ok((architecture, model.name.clone(), artifact::hash_parts([text.as_bytes()])));
    }
    let hash = match config.map(|config| of_directory(&config.model.dir)) {
        Some(Ok((configured, _, hash))) if configured == architecture => hash,
        Some(Ok(_)) => {
            talk!(
                "note: `model.dir` holds another model than `{}`: plans of it will not take this profile; without \
                 `--model` its own configuration is estimated",
                model.name
            );
            artifact::hash_parts([model.config.to_string().as_bytes()])
        }
        _ => artifact::hash_parts([model.config.to_string().as_bytes()]),
    };
    Ok((architecture, model.name.clone(), hash))
}

/// Modules with their sizes and what one takes at [`SHOWN_TOKENS`], each number marked.
fn summary(architecture: &Architecture, profile: &ModelProfile) -> String {
    let mut text = format!(
        "{}: {} parameters, {}; times are estimated, not measured\n{:<22}{:>6}{:>16}{:>14}{:>14}  at\n",
        profile.model,
        thousands(architecture.num_parameters()),
        profile.device.dtype,
        "module",
        "count",
        "parameters",
        "forward",
        "backward"
    );
    for module in architecture.modules() {
        let Some(measured) = profile.modules.get(module.name) else { continue };
        let points = &measured.linear.points;
        let Some(point) = points.iter().find(|p| p.size >= SHOWN_TOKENS).or(points.last()) else { continue };
        let _ = writeln!(
            text,
            "{:<22}{:>6}{:>16}{:>14}{:>14}  {} tokens{}",
            module.name,
            measured.count,
            thousands(measured.num_parameters),
            number::ns(point.forward_ns),
            number::ns(point.backward_ns),
            thousands(point.size),
            if measured.attention.points.is_empty() { "" } else { ", without attention" }
        );
    }
    text
}
