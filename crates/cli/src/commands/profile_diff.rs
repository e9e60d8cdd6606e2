//! `dflop profile diff`: two data profiles in, what changed out.

use crate::Failure;
use crate::args;
use dflop_data::diff;

/// 0 when the profiles are alike, 1 when a new plan is advised.
pub(super) fn run(arguments: &args::ProfileDiff) -> Result<u8, Failure> {
    let drift = diff::diff(&arguments.before, &arguments.after)?;
    if arguments.json {
        let text = serde_json::to_string_pretty(&drift)
            .map_err(|error| Failure::new(format!("cannot write JSON: {error}"), None))?;
        outln!("{text}");
    } else {
        out!("{}", diff::text(&drift));
    }
    Ok(u8::from(drift.drifted))
}
