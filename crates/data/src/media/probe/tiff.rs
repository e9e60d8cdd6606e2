//! TIFF pictures.

use super::Probe;
use super::directory::first_directory;
use super::orientation::Turn;
use super::source::{Fault, Source};

pub(super) fn tiff(source: &mut Source<'_>) -> Result<Probe, Fault> {
    let directory = first_directory(source, 0, source.len())?;
    match (directory.width, directory.height) {
        (Some(width), Some(height)) => {
            let mut turn = Turn::of_exif(directory.orientation);
            if let Some((at, end)) = directory.xmp {
                turn.read_xmp(source, at, end)?;
            }
            Ok(Probe::image("tiff", turn.displayed((width, height))))
        }
        _ => Fault::unsound("its first directory has no width and height"),
    }
}
