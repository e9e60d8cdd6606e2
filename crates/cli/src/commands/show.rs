//! `dflop show`: an artifact in, what it holds out, for people or as JSON.

use super::{beside, show_model};
use crate::Failure;
use crate::args;
use crate::config;
use dflop_cost::CostModel;
use dflop_data::{summary, table};
use dflop_types::{ModelProfile, Plan, artifact, regular};
use serde::Serialize;
use serde_json::{Value, json};
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// Artifacts that have a place beside the configuration.
const NAMED: [(&str, &str); 3] =
    [("model_profile", "model_profile.json"), ("data_profile", table::FILE_NAME), ("plan", "plan.json")];

pub(super) fn run(arguments: &args::Show) -> Result<(), Failure> {
    let path = path_of(arguments)?;
    match kind_of(&path)?.as_str() {
        "data_profile" => data_profile(&path, arguments.json),
        "plan" => plan(&path, arguments.json),
        "model_profile" => model_profile(&path, arguments.json),
        kind => Err(Failure::new(
            format!(
                "`{}` says it is a `{kind}`, must be one of: model_profile, data_profile, plan",
                path.display()
            ),
            None,
        )),
    }
}

/// The file that is meant: a name stands for the artifact beside the configuration.
fn path_of(arguments: &args::Show) -> Result<PathBuf, Failure> {
    match NAMED.iter().find(|(name, _)| arguments.artifact == Path::new(name)) {
        Some((_, file)) => Ok(beside(&config::load_data(&arguments.config.config)?, None, file)),
        None => Ok(arguments.artifact.clone()),
    }
}

/// The longest file that is looked at, in bytes, where it is no table.
const BYTES_MAX: u64 = 1 << 28;

/// What can be shown.
const WHICH: &str = "name the file of an artifact, or one of: model_profile, data_profile, plan";

/// What the file says it is; a missing one is what its name says.
fn kind_of(path: &Path) -> Result<String, Failure> {
    let cannot_read = |error: std::io::Error| {
        Failure::new(format!("cannot read `{}`: {error}", path.display()), Some(WHICH.to_owned()))
    };
    if let Err(error) = std::fs::metadata(path) {
        if error.kind() != std::io::ErrorKind::NotFound {
            return Err(cannot_read(error));
        }
        // The reader of that kind knows the command that makes it.
        let named = NAMED.iter().find(|(_, file)| path.file_name() == Some(file.as_ref()));
        return named.map(|(name, _)| (*name).to_owned()).ok_or_else(|| cannot_read(error));
    }
    if path.is_file() && starts_as_table(path).map_err(cannot_read)? {
        return Ok("data_profile".to_owned());
    }
    let text = artifact::read_text(path, BYTES_MAX).map_err(cannot_read)?;
    let value: Value = serde_json::from_str(&text).map_err(|error| {
        Failure::new(format!("`{}` is no artifact of dflop: {error}", path.display()), Some(WHICH.to_owned()))
    })?;
    let kind = value.get("dflop").and_then(Value::as_str).map(str::to_owned);
    kind.ok_or_else(|| {
        Failure::new(
            format!("`{}` is no artifact of dflop: it has no field `dflop`", path.display()),
            Some(WHICH.to_owned()),
        )
    })
}

/// Whether the file begins as Parquet does.
fn starts_as_table(path: &Path) -> std::io::Result<bool> {
    let mut start = Vec::new();
    regular::open(path)?.0.take(4).read_to_end(&mut start)?;
    Ok(start == b"PAR1")
}

fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Failure::new(format!("cannot write JSON: {error}"), None))?;
    outln!("{text}");
    Ok(())
}

fn data_profile(path: &Path, is_json: bool) -> Result<(), Failure> {
    let profile = table::read(path)?;
    if is_json {
        let statistics = summary::Statistics::new(&profile);
        return print_json(&json!({
            "dflop": "data_profile",
            "family": profile.family,
            "made_from": profile.made_from,
            "content_hash": profile.content_hash(),
            "statistics": statistics,
        }));
    }
    out!("data profile: {}\n{}", profile.family, summary::text(&profile, &[]));
    Ok(())
}

fn plan(path: &Path, is_json: bool) -> Result<(), Failure> {
    let plan: Plan = artifact::read(path)?;
    if is_json {
        return print_json(&kinded("plan", &plan));
    }
    out!("{}", dflop_plan::describe(&plan));
    Ok(())
}

fn model_profile(path: &Path, is_json: bool) -> Result<(), Failure> {
    let profile: ModelProfile = artifact::read(path)?;
    // Where no cost model can be made of a profile, the profile is shown all the same, with the reason.
    let (repairs, problem) = match CostModel::new(&profile) {
        Ok(model) => (model.repairs(), None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    let repairs: Vec<String> = repairs
        .iter()
        .map(|r| {
            let (what, they) =
                if r.num_points == 1 { ("point was", "it was") } else { ("points were", "they were") };
            format!(
                "{} {} {}: {} {what} lower than at a smaller size: that is noise, and {they} smoothed",
                r.module, r.part, r.phase, r.num_points
            )
        })
        .collect();
    if is_json {
        let mut value = kinded("model_profile", &profile);
        value["repairs"] = json!(repairs);
        value["problem"] = json!(problem);
        return print_json(&value);
    }
    let mut notices = show_model::notices(&profile);
    notices.extend(repairs);
    notices.extend(problem);
    out!("{}", show_model::text(&profile, &notices));
    Ok(())
}

/// The fields of an artifact, with what it is.
fn kinded(kind: &str, artifact: &impl Serialize) -> Value {
    let mut value = serde_json::to_value(artifact).unwrap_or_default();
    value["dflop"] = json!(kind);
    value
}
