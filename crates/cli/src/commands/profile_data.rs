//! `dflop profile data`: a dataset in, one shape a sample out.

use super::{beside, progress_bar};
use crate::Failure;
use crate::args;
use crate::config;
use dflop_data::{profile, summary, table};

pub(super) fn run(arguments: &args::ProfileData) -> Result<(), Failure> {
    let config = config::load(&arguments.config.config)?;
    let bar = progress_bar(0, "reading headers and text");
    let outcome = profile::profile(&config.profile_settings(), &|done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let outcome = outcome?;
    print!("{}", summary::text(&outcome.profile, &outcome.notices));
    let path = beside(&config, arguments.out.as_ref(), table::FILE_NAME);
    table::write(&path, &outcome.profile)?;
    eprintln!("wrote {}", path.display());
    Ok(())
}
