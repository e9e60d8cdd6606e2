//! One record measured: its conversation, its media's headers, its shape. Profiling and training both come here, so
//! that a sample cannot have one shape for the planner and another for the trainer.

use crate::conversation::{Conversation, MediaReference, MediaSource};
use crate::error::DataError;
use crate::family::{Clip, Family, MediaShape, Size, Sound, VideoSampling};
use crate::location::{Location, MediaPlace};
use crate::mixture::{self, Mixture, Source};
use crate::model_files::{ModelFiles, json};
use crate::probe::{MediaKind, Probe};
use crate::profile::ProfileSettings;
use crate::readers::{self, Body, RawRecord, Reader};
use crate::store::Stores;
use crate::tokens::{ChatTokenizer, TokenizedConversation};
use dflop_types::{Fault, SampleKind, SampleShape};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

/// Picture formats that may hold several frames.
const PICTURES: [&str; 3] = ["gif", "png", "webp"];

/// What a medium is to the encoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MediaUse {
    /// The only image of its sample: tiled.
    Image,
    /// One of several images: one tile.
    MultiImage,
    /// A video: one tile a frame.
    Video,
    /// A sound.
    Audio,
}

impl MediaUse {
    /// The name by which Python knows it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Image => "image",
            Self::MultiImage => "multi_image",
            Self::Video => "video",
            Self::Audio => "audio",
        }
    }
}

/// One medium of a sample, as its header shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Media {
    /// Where its bytes are.
    pub place: MediaPlace,
    /// What it is to the encoder.
    pub kind: MediaUse,
    /// Height as displayed, in pixels; 0 for a sound.
    pub height: u32,
    /// Width as displayed, in pixels; 0 for a sound.
    pub width: u32,
    /// What it costs.
    pub shape: MediaShape,
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
    pub(crate) record_hash: u64,
    pub(crate) media_hash: u64,
    pub(crate) tokens: TokenizedConversation,
}

/// Why one record gives no sample, and its id where there is one.
#[derive(Debug)]
pub(crate) struct BadSample {
    pub(crate) id: Option<String>,
    pub(crate) fault: Fault,
    pub(crate) cause: String,
}

/// What turns a conversation into a shape: the family's rule, the tokenizer, and how videos are sampled.
#[derive(Debug)]
pub(crate) struct Rule {
    pub(crate) family: Box<dyn Family>,
    pub(crate) tokenizer_hash: String,
    pub(crate) processor_hash: String,
    /// Of the chat template in place of the model's.
    pub(crate) template_hash: Option<String>,
    /// Positions the LLM backbone was made for, where its configuration says.
    pub(crate) max_positions: Option<u64>,
    tokenizer: ChatTokenizer,
    sampling: VideoSampling,
}

impl Rule {
    /// The rule for the model directory of `settings`.
    ///
    /// # Errors
    /// [`DataError::Io`], [`DataError::Model`], [`DataError::UnknownFamily`] and [`DataError::Config`].
    pub(crate) fn open(settings: &ProfileSettings) -> Result<Self, DataError> {
        let files =
            ModelFiles::read(&settings.model_dir)?.with_template(settings.chat_template.as_deref())?;
        let hashes = files.hashes();
        let config = json(&files.config_path, &files.config)?;
        let family = match &settings.family {
            Some(given) => Box::new(given.clone()),
            None => files.family()?,
        };
        Ok(Self {
            tokenizer_hash: hashes["tokenizer"].clone(),
            processor_hash: hashes["processor"].clone(),
            template_hash: files.own_template_hash(),
            max_positions: ["/text_config/max_position_embeddings", "/max_position_embeddings"]
                .into_iter()
                .find_map(|field| config.pointer(field).and_then(Value::as_u64)),
            tokenizer: ChatTokenizer::open(&files, &config, family.as_ref())?,
            family,
            sampling: VideoSampling { max_frames: settings.video_max_frames, fps: settings.video_fps },
        })
    }

    /// The sample in `record` of the source `from`.
    pub(crate) fn measure(
        &self,
        record: &RawRecord,
        fallback_id: String,
        from: &Source,
        stores: &Stores,
    ) -> Result<MeasuredSample, BadSample> {
        let value = record.parse().map_err(|cause| BadSample { id: None, fault: Fault::Record, cause })?;
        let value = mixture::renamed(value, &from.columns);
        let bad = |fault, cause| BadSample { id: crate::conversation::id_of(&value), fault, cause };
        let conversation = Conversation::parse(&value).map_err(|cause| bad(Fault::Record, cause))?;
        let count = |kind| conversation.media.iter().filter(|media| media.kind == kind).count();
        let num_images = count(MediaKind::Image);
        let mut media = Vec::with_capacity(conversation.media.len());
        let (mut media_bytes, mut media_ms, mut media_hash) = (0, 0, Sha256::new());
        for reference in &conversation.media {
            let place =
                place_of(reference, record, &from.media_root).map_err(|cause| bad(Fault::Record, cause))?;
            let (header, version) = stores.probe(&place).map_err(|error| {
                let fault = match error {
                    DataError::Io { .. } => Fault::MediaMissing,
                    _ => Fault::MediaUnsound,
                };
                bad(fault, error.to_string())
            })?;
            media_bytes += header.bytes;
            if reference.kind != MediaKind::Image {
                media_ms += header.duration_s.map_or(0, |seconds| (seconds * 1000.0).round() as u64);
            }
            media_hash.update(header.bytes.to_le_bytes());
            media_hash.update(version.as_bytes());
            media.push(self.media(place, reference.kind, num_images, &header).map_err(|(f, c)| bad(f, c))?);
        }
        let shapes: Vec<&MediaShape> = media.iter().map(|medium| &medium.shape).collect();
        let tokens =
            self.tokenizer.tokenize(&conversation, &shapes).map_err(|cause| bad(Fault::Text, cause))?;
        let (llm_tokens, label_tokens) = tokens
            .count()
            .ok_or_else(|| bad(Fault::Shape, "its LLM tokens must be fewer than 2^32".to_owned()))?;
        let shape = SampleShape {
            encoder_segments: shapes.iter().flat_map(|shape| shape.segments.iter().copied()).collect(),
            feature_tokens: shapes.iter().map(|shape| shape.feature_tokens()).sum(),
            llm_tokens,
            label_tokens,
        };
        let kind = if count(MediaKind::Video) > 0 {
            SampleKind::Video
        } else if count(MediaKind::Audio) > 0 {
            SampleKind::Audio
        } else {
            [SampleKind::Text, SampleKind::Image, SampleKind::MultiImage][num_images.min(2)]
        };
        Ok(MeasuredSample {
            id: conversation.id.clone().unwrap_or(fallback_id),
            kind,
            shape,
            media_bytes,
            media_ms,
            record_hash: record.hash(),
            media_hash: if conversation.media.is_empty() { 0 } else { first_eight(&media_hash.finalize()) },
            media: tokens.in_text_order(media),
            tokens,
        })
    }

    /// A medium by its header.
    fn media(
        &self,
        place: MediaPlace,
        kind: MediaKind,
        num_images: usize,
        header: &Probe,
    ) -> Result<Media, (Fault, String)> {
        let unsound = |cause: &str| (Fault::MediaUnsound, format!("`{place}` {cause}"));
        if kind == MediaKind::Audio {
            let (Some(duration_s), Some(sample_rate)) = (header.duration_s, header.sample_rate) else {
                return Err(unsound("does not say how long its sound lasts"));
            };
            let shape = self
                .family
                .audio(&Sound { duration_s, sample_rate })
                .map_err(|error| (Fault::Shape, error.to_string()))?;
            return Ok(Media { place, kind: MediaUse::Audio, height: 0, width: 0, shape });
        }
        let (Some(height), Some(width)) = (header.height, header.width) else {
            return Err(unsound("has no picture"));
        };
        let size = Size { height, width };
        // The first frame of an animated picture serves as an image; a video container does not.
        let is_clip = header.kind == MediaKind::Video && !PICTURES.contains(&header.format);
        let (kind, shape) = match kind {
            MediaKind::Image if is_clip => return Err(unsound("is a video, the record calls it an image")),
            MediaKind::Video => {
                let num_frames =
                    num_frames(header).ok_or_else(|| unsound("does not say how many frames it has"))?;
                let clip = Clip { size, num_frames, fps: header.fps, duration_s: header.duration_s };
                (MediaUse::Video, self.family.video(&clip, self.sampling))
            }
            _ if num_images == 1 => (MediaUse::Image, self.family.image(size, 1)),
            _ => (MediaUse::MultiImage, self.family.image(size, num_images)),
        };
        let shape = shape.map_err(|error| (Fault::Shape, error.to_string()))?;
        Ok(Media { place, kind, height, width, shape })
    }
}

fn first_eight(digest: &[u8]) -> u64 {
    u64::from_be_bytes(digest[..8].try_into().expect("a SHA-256 has 32 bytes"))
}

/// Where the medium's bytes are.
fn place_of(
    reference: &MediaReference,
    record: &RawRecord,
    media_root: &Location,
) -> Result<MediaPlace, String> {
    match &reference.source {
        MediaSource::Name(name) => Ok(MediaPlace::Whole(media_root.join(name))),
        MediaSource::Attachment(index) => record
            .attachments
            .get(*index)
            .cloned()
            .ok_or_else(|| format!("attachment {index} of {} is missing", record.attachments.len())),
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

/// The sources of a mixture, opened.
#[derive(Debug)]
pub(crate) struct Corpus {
    pub(crate) mixture: Mixture,
    /// One a source.
    pub(crate) readers: Vec<Box<dyn Reader>>,
    /// Position of each source's first file among the files of all.
    pub(crate) first_file: Vec<u32>,
    pub(crate) stores: Stores,
}

impl Corpus {
    /// Opens every source of the mixture.
    ///
    /// # Errors
    /// [`DataError::Mixture`] with every source that cannot be read; the error itself where there is one source.
    pub(crate) fn open(settings: &ProfileSettings) -> Result<Self, DataError> {
        let stores = Stores::new(settings.store_options.iter().cloned());
        let mixture = mixture::read(&settings.mixture, settings.media_root.as_deref())?;
        let opened: Vec<_> = mixture.sources.iter().map(|source| readers::open(source, &stores)).collect();
        if opened.len() > 1 {
            let problems: Vec<_> =
                opened.iter().filter_map(|one| one.as_ref().err()).map(ToString::to_string).collect();
            if !problems.is_empty() {
                return Err(DataError::Mixture { path: settings.mixture.clone(), problems });
            }
        }
        let readers: Vec<Box<dyn Reader>> = opened.into_iter().collect::<Result<_, _>>()?;
        let mut next = 0;
        let first_file = readers
            .iter()
            .map(|reader| {
                let first = next;
                next += reader.files().len() as u32;
                first
            })
            .collect();
        Ok(Self { mixture, readers, first_file, stores })
    }

    /// The record at `position` of `source` as a sample.
    pub(crate) fn measure(
        &self,
        rule: &Rule,
        source: u32,
        position: u64,
        record: &RawRecord,
    ) -> Result<MeasuredSample, BadSample> {
        let from = &self.mixture.sources[source as usize];
        rule.measure(record, format!("{}#{position}", from.name), from, &self.stores).map_err(|bad| {
            match &record.body {
                // A text that does not parse names its line and column itself.
                Body::Json { line, .. } if *line > 0 && !bad.cause.starts_with("line ") => {
                    BadSample { cause: format!("line {line}: {}", bad.cause), ..bad }
                }
                _ => bad,
            }
        })
    }
}
