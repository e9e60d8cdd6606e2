//! `dflop profile model --from-run`: the spans of a run bring the times of its model profile up to date.

use super::from_run::{FILE_NAME, FromRun};
use super::{beside, out_path, show_model, write};
use crate::Failure;
use crate::args;
use crate::config;
use dflop_data::table;
use dflop_types::{ModelProfile, artifact};

pub(super) fn run(arguments: &args::ProfileModel) -> Result<(), Failure> {
    let dir = arguments.from_run.as_ref().expect("asked for");
    let config = config::load(&arguments.config.config)?;
    let model: ModelProfile = artifact::read(&beside(&config, None, "model_profile.json"))?;
    let data = table::read(&beside(&config, arguments.data_profile.as_ref(), table::FILE_NAME))?;
    let out = out_path::<ModelProfile>(&config, arguments.out.as_ref(), FILE_NAME)?;
    let from_run = FromRun::read(dir, &config, &data, &model)?;
    out!("{}", from_run.words());
    let renewed = from_run.renewed;
    talk!("{}", renewed.renewed.as_ref().map(show_model::renewed).unwrap_or_default());
    write(&out, &renewed)
}
