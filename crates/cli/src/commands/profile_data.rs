//! `dflop profile data`: a dataset in, one shape a sample out.

use super::{beside, progress_bar};
use crate::args;
use crate::config;
use crate::{Failure, Outcome, Request};
use dflop_data::family::GivenFamily;
use dflop_data::profile::ProfileSettings;
use dflop_data::{profile, summary, table};
use serde_json::json;

/// The data profile, or the request that Python imports the function which gives its shapes.
pub(super) fn run(arguments: &args::ProfileData, family: Option<&GivenFamily>) -> Result<Outcome, Failure> {
    let config = config::load(&arguments.config.config)?;
    if let (Some(name), None) = (&config.model.family, family) {
        let arguments = json!({ "family": name, "directory": config.directory });
        return Ok(Outcome::Python(Request { verb: "profile_data".to_owned(), arguments }));
    }
    let settings = ProfileSettings { family: family.cloned(), ..config.profile_settings() };
    let bar = progress_bar(0, "reading headers and text");
    let outcome = profile::profile(&settings, &|done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let outcome = outcome?;
    print!("{}", summary::text(&outcome.profile, &outcome.notices));
    let path = beside(&config, arguments.out.as_ref(), table::FILE_NAME);
    table::write(&path, &outcome.profile)?;
    eprintln!("wrote {}", path.display());
    Ok(Outcome::Done(0))
}
