//! `dflop profile merge`: the parts of a data profile in, the whole out.

use crate::Failure;
use crate::args;
use dflop_data::{merge, problems};
use dflop_types::{counted, thousands};

pub(super) fn run(arguments: &args::ProfileMerge) -> Result<(), Failure> {
    let merged = merge::merge(&arguments.parts, &arguments.out)?;
    outln!("{}: {}", counted(arguments.parts.len() as u64, "part"), counted(merged.num_rows, "sample"));
    let bad = &merged.header.problems;
    if !bad.is_empty() {
        let num_substituted = bad.iter().filter(|problem| problem.substitute.is_some()).count() as u64;
        outln!(
            "{} could not be read: {} left out, {} replaced by a neighbour",
            thousands(bad.len() as u64),
            thousands(bad.len() as u64 - num_substituted),
            thousands(num_substituted)
        );
        talk!("wrote {}", problems::path(&arguments.out).display());
    }
    talk!("wrote {}", arguments.out.display());
    Ok(())
}
