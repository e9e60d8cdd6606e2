//! `dflop probe`: sizes of media files from their headers.

use super::counted;
use crate::Failure;
use crate::args::Probe;
use dflop_data::DataError;
use dflop_data::family::{self, Clip, FamilyFiles, MediaShape, Size, Sound, VideoSampling};
use dflop_data::probe::{self, MediaKind};
use dflop_types::printable;
use serde_json::{Value, json};
use std::path::Path;

/// 0 when all files were read, 1 when some were not.
pub(super) fn run(arguments: &Probe) -> Result<u8, Failure> {
    let rule = match (&arguments.model, &arguments.family) {
        (Some(model), _) => Some(dflop_data::family_of(model)?),
        (None, Some(name)) => Some(by_name(name)?),
        (None, None) => None,
    };
    let mut status = 0;
    for file in &arguments.files {
        let line = match probe::probe(file) {
            Ok(found) => {
                let shape = rule
                    .as_ref()
                    .and_then(|r| shape(r.as_ref(), &found, arguments.video_max_frames))
                    .transpose();
                status = status.max(u8::from(shape.is_err()));
                let (shape, error) = match shape {
                    Ok(shape) => (shape, None),
                    Err(error) => (None, Some(error.to_string())),
                };
                Line { file, found: Some(found), shape, error }
            }
            Err(error) => {
                status = 1;
                Line { file, found: None, shape: None, error: Some(error.to_string()) }
            }
        };
        if arguments.json {
            outln!("{}", line.json());
        } else {
            line.print();
        }
    }
    Ok(status)
}

/// The rule of a family with the settings it has where no file sets them; some have none.
fn by_name(name: &str) -> Result<Box<dyn family::Family>, Failure> {
    let open = |name: &str| {
        let files = FamilyFiles {
            config: json!({"model_type": name}),
            preprocessor: json!({}),
            ..FamilyFiles::default()
        };
        family::open(&files)
    };
    if let Ok(Some(family)) = open(name) {
        return Ok(family);
    }
    let known: Vec<_> = family::known().into_iter().filter(|name| open(name).is_ok()).collect();
    let (mut text, mut hint) =
        (format!("`--family` is `{name}`"), "give a model's own settings with `--model DIR`");
    if family::known().contains(&name) {
        text += ", whose models each have settings of their own";
        hint = "give those of a model with `--model DIR`";
    }
    Err(Failure::new(format!("{text}, must be one of: {}", known.join(", ")), Some(hint.to_owned())))
}

/// What the family makes of the file; `None` where it has no rule for its kind.
fn shape(
    rule: &dyn family::Family,
    found: &probe::Probe,
    video_max_frames: Option<u32>,
) -> Option<Result<MediaShape, DataError>> {
    let size = Size { height: found.height.unwrap_or(0), width: found.width.unwrap_or(0) };
    rule.marks(found.kind)?;
    match found.kind {
        MediaKind::Image => Some(rule.image(size, 1)),
        MediaKind::Video => {
            let clip = Clip { size, num_frames: found.frames?, fps: found.fps, duration_s: found.duration_s };
            Some(rule.video(&clip, VideoSampling { max_frames: video_max_frames, fps: None }))
        }
        MediaKind::Audio => {
            Some(rule.audio(&Sound { duration_s: found.duration_s?, sample_rate: found.sample_rate? }))
        }
    }
}

struct Line<'a> {
    file: &'a Path,
    found: Option<probe::Probe>,
    shape: Option<MediaShape>,
    error: Option<String>,
}

impl Line<'_> {
    fn json(&self) -> Value {
        let found = self.found.as_ref();
        json!({
            "path": self.file.to_string_lossy(),
            "kind": found.map(|p| p.kind.as_str()),
            "format": found.map(|p| p.format),
            "width": found.and_then(|p| p.width),
            "height": found.and_then(|p| p.height),
            "frames": found.and_then(|p| p.frames),
            "fps": found.and_then(|p| p.fps),
            "duration_s": found.and_then(|p| p.duration_s),
            "channels": found.and_then(|p| p.channels),
            "sample_rate": found.and_then(|p| p.sample_rate),
            "shape": self.shape.as_ref().map(|shape| json!({
                "num_tiles": shape.num_tiles,
                "encoder_tokens": shape.encoder_tokens(),
                "feature_tokens": shape.feature_tokens(),
            })),
            "error": self.error,
        })
    }

    fn print(&self) {
        let name = self.file.to_string_lossy();
        let name = printable(&name);
        let Some(found) = &self.found else {
            outln!("{name}: {}", self.error.as_deref().unwrap_or("not read"));
            return;
        };
        let mut facts = vec![format!("{} {}", found.kind.as_str(), found.format)];
        if let (Some(width), Some(height)) = (found.width, found.height) {
            facts.push(format!("{width}x{height}"));
        }
        if let Some(frames) = found.frames {
            facts.push(counted(frames, "frame"));
        }
        if let Some(fps) = found.fps {
            facts.push(format!("{fps:.3} fps"));
        }
        if let Some(duration) = found.duration_s {
            facts.push(format!("{duration:.3} s"));
        }
        if let Some(channels) = found.channels {
            facts.push(counted(channels.into(), "channel"));
        }
        if let Some(rate) = found.sample_rate {
            facts.push(format!("{rate} Hz"));
        }
        if let Some(shape) = &self.shape {
            facts.push(format!(
                "{}, {}, {}",
                counted(shape.num_tiles.into(), "tile"),
                counted(shape.encoder_tokens(), "encoder token"),
                counted(shape.feature_tokens().into(), "LLM token")
            ));
        }
        outln!("{name}: {}", facts.join(", "));
    }
}
