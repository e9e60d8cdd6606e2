//! One record measured: its conversation, its media's headers, its shape. Profiling and training both come here, so
//! that a sample cannot have one shape for the planner and another for the trainer.

use crate::conversation::Conversation;
use crate::error::DataError;
use crate::family::LlavaOnevision;
use crate::mixture::{self, Mixture};
use crate::model_files::{ModelFiles, json};
use crate::probe::{MediaKind, Probe, probe};
use crate::profile::ProfileSettings;
use crate::readers::Records;
use crate::tokens::{ChatTokenizer, TokenizedConversation};
use dflop_types::artifact::hash_parts;
use dflop_types::{SampleKind, SampleShape};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Families with a shape rule.
const FAMILIES: [&str; 1] = ["llava_onevision"];

/// Picture formats that may hold several frames.
const PICTURES: [&str; 3] = ["gif", "png", "webp"];

/// What an image or a video is to the encoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MediaUse {
    /// The only image of its sample: tiled.
    Image,
    /// One of several images: one tile.
    MultiImage,
    /// A video: one tile a frame.
    Video,
}

impl MediaUse {
    /// The name by which Python knows it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Image => "image",
            Self::MultiImage => "multi_image",
            Self::Video => "video",
        }
    }
}

/// One image or video of a sample, as its header shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Media {
    /// The file.
    pub path: PathBuf,
    /// What it is to the encoder.
    pub kind: MediaUse,
    /// Frames that are read of a video, ascending from 0; empty for an image.
    pub frame_indices: Vec<u32>,
    /// Tiles the encoder reads.
    pub num_tiles: u32,
    /// Height as displayed, in pixels.
    pub height: u32,
    /// Width as displayed, in pixels.
    pub width: u32,
    /// LLM tokens it fills.
    pub num_features: u32,
}

/// A sample as its record and its media's headers show it.
#[derive(Debug)]
pub(crate) struct MeasuredSample {
    pub(crate) id: String,
    pub(crate) kind: SampleKind,
    pub(crate) shape: SampleShape,
    pub(crate) media: Vec<Media>,
    pub(crate) media_bytes: u64,
    pub(crate) media_ms: u64,
    pub(crate) tokens: TokenizedConversation,
}

impl MeasuredSample {
    /// LLM tokens of each medium.
    pub(crate) fn features(&self) -> Vec<u32> {
        self.media.iter().map(|media| media.num_features).collect()
    }
}

/// Why one record gives no sample, and its id where there is one.
#[derive(Debug)]
pub(crate) struct BadSample {
    pub(crate) id: Option<String>,
    pub(crate) cause: String,
}

/// What turns a conversation into a shape: the family's rule, the tokenizer, and how videos are sampled.
#[derive(Debug)]
pub(crate) struct Rule {
    pub(crate) family: &'static str,
    pub(crate) tokenizer_hash: String,
    pub(crate) processor_hash: String,
    /// Positions the LLM backbone was made for, where its configuration says.
    pub(crate) max_positions: Option<u64>,
    shapes: LlavaOnevision,
    tokenizer: ChatTokenizer,
    video_max_frames: u32,
    video_fps: Option<f64>,
}

impl Rule {
    /// The rule for the model directory of `settings`.
    ///
    /// # Errors
    /// [`DataError::Io`], [`DataError::Model`], [`DataError::UnknownFamily`] and [`DataError::Config`].
    pub(crate) fn open(settings: &ProfileSettings) -> Result<Self, DataError> {
        let files = ModelFiles::read(&settings.model_dir)?;
        let hashes = files.hashes();
        let config = json(&files.config_path, &files.config)?;
        let found = config["model_type"].as_str().unwrap_or("missing");
        let family =
            FAMILIES.into_iter().find(|family| *family == found).ok_or_else(|| DataError::UnknownFamily {
                path: files.config_path.clone(),
                found: found.to_owned(),
                known: FAMILIES.to_vec(),
            })?;
        let preprocessor = json(&files.preprocessor_path, &files.preprocessor)?;
        Ok(Self {
            family,
            tokenizer_hash: hashes["tokenizer"].clone(),
            processor_hash: hashes["processor"].clone(),
            max_positions: config.pointer("/text_config/max_position_embeddings").and_then(Value::as_u64),
            shapes: LlavaOnevision::from_config(&config, &preprocessor)?,
            tokenizer: ChatTokenizer::new(&files.tokenizer, &config)
                .map_err(|cause| DataError::Model { path: files.tokenizer_path, cause })?,
            video_max_frames: settings.video_max_frames,
            video_fps: settings.video_fps,
        })
    }

    /// The sample in `record`.
    pub(crate) fn measure(
        &self,
        record: &Value,
        fallback_id: String,
        media_root: &Path,
    ) -> Result<MeasuredSample, BadSample> {
        let bad = |cause| BadSample { id: crate::conversation::id_of(record), cause };
        let conversation = Conversation::parse(record).map_err(bad)?;
        let num_images = conversation.media.iter().filter(|media| !media.is_video).count();
        let mut media = Vec::with_capacity(conversation.media.len());
        let mut shape = SampleShape::default();
        let (mut media_bytes, mut media_ms) = (0, 0);
        for reference in &conversation.media {
            let path = media_root.join(&reference.path);
            let kind = match (reference.is_video, num_images) {
                (true, _) => MediaUse::Video,
                (false, 1) => MediaUse::Image,
                (false, _) => MediaUse::MultiImage,
            };
            let header = probe(&path).map_err(|error| bad(error.to_string()))?;
            let (seen, segments) = self.media(path, kind, &header).map_err(bad)?;
            media_bytes += header.bytes;
            if kind == MediaUse::Video {
                media_ms += header.duration_s.map_or(0, |seconds| (seconds * 1000.0).round() as u64);
            }
            shape.encoder_segments.push(segments);
            media.push(seen);
        }
        let tokens = self.tokenizer.tokenize(&conversation).map_err(bad)?;
        let features: Vec<u32> = media.iter().map(|media| media.num_features).collect();
        let (llm_tokens, label_tokens) = tokens
            .count(&features)
            .ok_or_else(|| bad("its LLM tokens must be fewer than 2^32".to_owned()))?;
        shape.feature_tokens = features.iter().sum();
        shape.llm_tokens = llm_tokens;
        shape.label_tokens = label_tokens;
        let kind = if num_images < media.len() {
            SampleKind::Video
        } else {
            [SampleKind::Text, SampleKind::Image, SampleKind::MultiImage][num_images.min(2)]
        };
        let id = conversation.id.unwrap_or(fallback_id);
        Ok(MeasuredSample { id, kind, shape, media, media_bytes, media_ms, tokens })
    }

    /// A medium by its header.
    fn media(
        &self,
        path: PathBuf,
        kind: MediaUse,
        header: &Probe,
    ) -> Result<(Media, dflop_types::EncoderSegments), String> {
        let (Some(height), Some(width)) = (header.height, header.width) else {
            return Err(format!("`{}` has no picture", path.display()));
        };
        let mut frame_indices = Vec::new();
        let shape = match kind {
            // The first frame of an animated picture serves as an image; a video container does not.
            MediaUse::Image | MediaUse::MultiImage
                if header.kind == MediaKind::Video && !PICTURES.contains(&header.format) =>
            {
                return Err(format!("`{}` is a video, the record calls it an image", path.display()));
            }
            MediaUse::Image => self.shapes.image(height, width),
            MediaUse::MultiImage => self.shapes.image_among_several(height, width),
            MediaUse::Video => {
                let total = num_frames(header)
                    .ok_or_else(|| format!("`{}` does not say how many frames it has", path.display()))?;
                frame_indices = frames(total, self.video_max_frames, self.video_fps.zip(header.duration_s));
                self.shapes.video(frame_indices.len() as u32)
            }
        }
        .map_err(|error| error.to_string())?;
        let media = Media {
            path,
            kind,
            frame_indices,
            num_tiles: shape.num_tiles,
            height,
            width,
            num_features: shape.feature_tokens,
        };
        Ok((media, shape.segments))
    }
}

/// Frames of a clip: counted, or duration times rate where the container counts none; an image is one.
fn num_frames(header: &Probe) -> Option<u64> {
    match (header.frames, header.duration_s, header.fps) {
        (Some(frames), _, _) => Some(frames.max(1)),
        (None, Some(seconds), Some(fps)) => Some(((seconds * fps).round() as u64).max(1)),
        (None, _, _) => (header.kind == MediaKind::Image).then_some(1),
    }
}

/// Positions of the frames that are read, ascending.
///
/// ```text
/// n = min(total, max, round(duration x fps) or at least 1)      without `fps_and_duration_s`: min(total, max)
/// index_k = floor(k (total - 1) / (n - 1)),  k = 0 .. n - 1     n = 1: frame 0
/// ```
///
/// Both ends of the clip are read, as by LLaVA-NeXT's `linspace(0, total - 1, n, dtype=int)`.
pub(crate) fn frames(total: u64, max: u32, fps_and_duration_s: Option<(f64, f64)>) -> Vec<u32> {
    let wanted =
        fps_and_duration_s.map_or(u64::MAX, |(fps, seconds)| ((seconds * fps).round() as u64).max(1));
    let n = total.min(u64::from(max)).min(wanted).max(1);
    (0..n).map(|k| (k * (total - 1)).checked_div(n - 1).unwrap_or(0) as u32).collect()
}

/// The records of a mixture's files and which of them are taken.
#[derive(Debug)]
pub(crate) struct Corpus {
    pub(crate) mixture: Mixture,
    pub(crate) records: Vec<Records>,
}

impl Corpus {
    /// Opens every file of the mixture.
    ///
    /// # Errors
    /// [`DataError::Mixture`] with every file that cannot be read; the error itself where there is one file.
    pub(crate) fn open(settings: &ProfileSettings) -> Result<Self, DataError> {
        let mixture = mixture::read(&settings.mixture, settings.media_root.as_deref())?;
        let opened: Vec<_> = mixture.sources.iter().map(|source| Records::open(&source.path)).collect();
        if opened.len() == 1 {
            let records = opened.into_iter().collect::<Result<_, _>>()?;
            return Ok(Self { mixture, records });
        }
        let problems: Vec<_> =
            opened.iter().filter_map(|one| one.as_ref().err()).map(ToString::to_string).collect();
        if !problems.is_empty() {
            return Err(DataError::Mixture { path: settings.mixture.clone(), problems });
        }
        Ok(Self { mixture, records: opened.into_iter().flatten().collect() })
    }

    /// The record at `position` of `source` as a sample.
    pub(crate) fn measure(
        &self,
        rule: &Rule,
        source: u32,
        position: u64,
    ) -> Result<MeasuredSample, BadSample> {
        let index = source as usize;
        let record = self.records[index]
            .parse(position)
            .map_err(|error| BadSample { id: None, cause: error.to_string() })?;
        let from = &self.mixture.sources[index];
        rule.measure(&record, format!("{}#{position}", from.name), &from.media_root).map_err(|bad| {
            let line = self.records[index].places[position as usize].line;
            BadSample { cause: format!("line {line}: {}", bad.cause), ..bad }
        })
    }

    /// SHA-256 over the content of the files, how they and their videos are sampled, and the bytes of each sample's
    /// media: a dataset that changed without changing these is taken for the same.
    pub(crate) fn hash(&self, settings: &ProfileSettings, media_bytes: impl Iterator<Item = u64>) -> String {
        let mut parts: Vec<Vec<u8>> = vec![
            format!("{} {} {:?}", settings.seed, settings.video_max_frames, settings.video_fps).into_bytes(),
        ];
        for (source, records) in self.mixture.sources.iter().zip(&self.records) {
            parts.push(format!("{:?}", source.sampling).into_bytes());
            parts.push(records.hash.clone().into_bytes());
        }
        parts.push(media_bytes.flat_map(u64::to_le_bytes).collect());
        hash_parts(parts.iter().map(Vec::as_slice))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn frames_hold_both_ends() {
        assert_eq!(frames(10, 4, None), [0, 3, 6, 9]);
        assert_eq!(frames(10, 32, None), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(frames(1, 32, None), [0]);
        assert_eq!(frames(10, 1, None), [0]);
        // 2.6 s at 1 frame a second are 3 frames of 78; 0.2 s are 1.
        assert_eq!(frames(78, 32, Some((1.0, 2.6))), [0, 38, 77]);
        assert_eq!(frames(6, 32, Some((1.0, 0.2))), [0]);
    }

    proptest! {
        #[test]
        fn frames_ascend_within_the_clip(total in 1_u64..100_000, max in 1_u32..64) {
            let chosen = frames(total, max, None);
            prop_assert_eq!(chosen.len() as u64, total.min(u64::from(max)));
            prop_assert!(chosen.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert_eq!(chosen[0], 0);
            prop_assert!(chosen.len() == 1 || u64::from(*chosen.last().unwrap()) == total - 1);
        }
    }
}
