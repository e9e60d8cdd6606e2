//! `data:` of `dflop.yaml`.

use super::section::Section;
use dflop_data::location::Location;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// `data:`
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DataSection {
    /// LLaVA mixture YAML, or one source: a file, directory, pattern of shards or URL.
    pub mixture: PathBuf,
    /// Where media paths start; `null`: the directory of each JSON file.
    pub media_root: Option<PathBuf>,
    /// Jinja chat template to use instead of the model's own.
    pub chat_template: Option<PathBuf>,
    /// Frames taken of a video, at most; `null`: as the model's family has it.
    pub video_max_frames: Option<u32>,
    /// Frames taken a second of video; `null`: as the model's family has it.
    pub video_fps: Option<f64>,
    /// `fail`, `skip` or `substitute`.
    pub on_bad_sample: String,
    /// `fail` or `warn`: what is done where a medium changed between profile and training.
    pub on_changed_media: String,
    /// Percent of bad samples above which `skip` and `substitute` end the command too; `null`: 5, or four samples.
    pub bad_samples_max_percent: Option<f64>,
    /// Bytes of decoded media each rank keeps.
    pub cache_bytes: u64,
    /// Bytes of media that each rank has decoded ahead of need, at most.
    pub ahead_bytes: u64,
}

/// The section; paths start at `directory`.
pub(super) fn data_section(section: &mut Section<'_, '_>, directory: &Path) -> DataSection {
    DataSection {
        mixture: beside(directory, &section.text("mixture", None)),
        media_root: section.optional_text("media_root").map(|root| beside(directory, &root)),
        chat_template: section.optional_text("chat_template").map(|path| directory.join(path)),
        video_max_frames: section
            .optional_count("video_max_frames", 1..=u64::from(dflop_data::family::FRAMES_MAX))
            .map(|n| n as u32),
        video_fps: section.optional_number("video_fps", f64::MIN_POSITIVE..=1000.0),
        on_bad_sample: section.choice("on_bad_sample", &["fail", "skip", "substitute"], "fail"),
        on_changed_media: section.choice("on_changed_media", &["fail", "warn"], "fail"),
        bad_samples_max_percent: section.optional_number("bad_samples_max_percent", 0.0..=100.0),
        cache_bytes: section.count("cache_bytes", 0..=1 << 50, Some(1 << 30)),
        ahead_bytes: section.count("ahead_bytes", 1 << 20..=1 << 50, Some(1 << 30)),
    }
}

/// What a path or URL of the file means: a URL is itself.
pub(super) fn beside(directory: &Path, name: &str) -> PathBuf {
    Location::Local(directory.to_owned()).join(name).path()
}
