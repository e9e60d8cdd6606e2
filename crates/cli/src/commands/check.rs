//! `dflop check`: the samples are found here, Python compares.

use super::python::has_directory;
use super::{beside, current};
use crate::args;
use crate::config;
use crate::{Failure, Outcome, Request};
use dflop_data::table;
use dflop_types::DataProfile;
use serde_json::json;
use std::path::Path;

/// The request to compare samples with Hugging Face.
pub(super) fn run(arguments: &args::Check) -> Result<Outcome, Failure> {
    let config = config::load_plan(&arguments.config.config)?;
    has_directory(&config)?;
    let tolerance = arguments.tolerance;
    if !(tolerance > 0.0 && tolerance <= 1.0) {
        return Err(Failure::new(
            format!("`--tolerance` is {tolerance}, must be above 0 and at most 1"),
            None,
        ));
    }
    let data_path = beside(&config, arguments.data_profile.as_ref(), table::FILE_NAME);
    let data = table::read(&data_path)?;
    current::check_data(&config, &data_path, &data)?;
    let chosen: Vec<usize> =
        arguments.sample.iter().map(|id| find(&data, id, &data_path)).collect::<Result<_, _>>()?;
    // Weights of a part of the layers are not read: a model with fewer layers is another model.
    let is_random = arguments.layers.is_some() || config.train.init == "random";
    Ok(Outcome::Python(Request {
        verb: "check".to_owned(),
        arguments: json!({
            "config_path": arguments.config.config,
            "data_profile": data_path,
            "model_dir": config.model.dir,
            "chat_template": config.data.chat_template,
            "recipe": config.train.recipe,
            "compile": config.train.compile,
            "samples": arguments.samples,
            "chosen": chosen,
            "layers": arguments.layers,
            "seed": is_random.then_some(config.train.seed),
            "tolerance": tolerance,
            "json": arguments.json,
        }),
    }))
}

/// Position of a sample in the profile.
fn find(data: &DataProfile, id: &str, path: &Path) -> Result<usize, Failure> {
    data.samples.iter().position(|sample| sample.id == id).ok_or_else(|| {
        let first = data.samples.first().map(|sample| format!("its first sample is `{}`", sample.id));
        Failure::new(format!("`{}` has no sample `{id}`", path.display()), first)
    })
}
