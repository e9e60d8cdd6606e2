//! `dflop demo-data`: something to try everything on.

use super::progress_bar;
use crate::Failure;
use crate::args;
use dflop_types::number::file_bytes;
use dflop_types::thousands;

pub(super) fn run(arguments: &args::DemoData) -> Result<(), Failure> {
    if arguments.force {
        dflop_data::demo::remove_media(&arguments.dir)?;
    } else {
        dflop_data::demo::check_free(&arguments.dir)?;
    }
    let bar = progress_bar(u64::from(arguments.samples), "drawing samples");
    let report = dflop_data::demo::write(&arguments.dir, arguments.seed, arguments.samples, |done, _| {
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    let kinds: Vec<String> =
        report.samples.iter().map(|(kind, n)| format!("{kind} {}", thousands(*n))).collect();
    outln!(
        "{} samples ({}) with {} media files, {}, in {}",
        thousands(u64::from(arguments.samples)),
        kinds.join(", "),
        thousands(report.num_media),
        file_bytes(report.media_bytes),
        report.dir.display()
    );
    outln!("next: dflop profile data --config {}", report.config.display());
    Ok(())
}
