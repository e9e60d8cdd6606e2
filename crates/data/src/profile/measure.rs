//! One record measured: its conversation, its media's headers, its shape. Profiling and training both come here, so
//! that a sample cannot have one shape for the planner and another for the trainer.

use super::ProfileSettings;
use super::stamp::MediaStamp;
use crate::digest::first_eight;
use crate::error::DataError;
use crate::family::{Clip, Family, MediaShape, Size, Sound, VideoSampling};
use crate::media::probe::Probe;
use crate::media::{MediaKind, decoder};
use crate::source::location::{Location, MediaPlace};
use crate::source::mixture::{self, Mixture, Source};
use crate::source::readers::{self, Body, RawRecord, Reader};
use crate::source::store::{Look, Stores};
use crate::source::unread::Fields;
use crate::text::conversation::{Conversation, MediaReference, MediaSource};
use crate::text::tokens::{ChatTokenizer, TokenizedConversation};
use dflop_types::{DataProfile, EncoderParts, Fault, Hint as _, SampleKind, SampleShape};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::borrow::Cow;

/// Encoder tokens of a sample, at most: far more than memory holds, and few enough for sums over samples.
const ENCODER_TOKENS_MAX: u64 = 1 << 40;

/// One medium of a sample, as its header shows it.
#[derive(Debug, Clone, PartialEq)]
pub struct Media {
    /// Where its bytes are.
    pub place: MediaPlace,
    /// What the encoder reads it as: a GIF that a record calls an image is one.
    pub kind: MediaKind,
    /// Whether its sample has several images; some families give one of several fewer tiles than one alone.
    pub is_one_of_several: bool,
    /// Height as displayed, in pixels; 0 for a sound.
    pub height: u32,
    /// Width as displayed, in pixels; 0 for a sound.
    pub width: u32,
    /// The video that its frames were chosen of; `None` for images and sounds.
    pub clip: Option<Clip>,
    /// What it costs.
    pub shape: MediaShape,
}

impl Media {
    /// The name by which Python's model adapters know what it is to the encoder: its kind, or `multi_image`.
    pub const fn use_name(&self) -> &'static str {
        if self.is_one_of_several { "multi_image" } else { self.kind.as_str() }
    }

    /// Frames that are read, a second of video; `None` for images and sounds, and where the file does not tell its rate.
    pub fn sampled_fps(&self) -> Option<f64> {
        let clip = self.clip.as_ref()?;
        // As `VideoMetadata.sampled_fps` of transformers: read over all, times the rate of all.
        Some(self.shape.frame_indices.len() as f64 / clip.num_frames as f64 * clip.fps?)
    }
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
    /// Whether no sample is at fault, but what all of them are measured by.
    pub(crate) is_of_settings: bool,
}

/// Why one medium gives no shape.
struct Flaw {
    fault: Fault,
    cause: String,
    is_of_settings: bool,
}

impl Flaw {
    #[expect(clippy::needless_pass_by_value, reason = "for `map_err`")]
    fn of_shape(error: DataError) -> Self {
        let is_of_settings = matches!(error, DataError::Function { .. } | DataError::Config { .. });
        Self { fault: Fault::Shape, cause: error.to_string(), is_of_settings }
    }
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
    /// [`DataProfile::LLM_SIZE`], where the configuration says it.
    pub(crate) llm_size: Option<String>,
    pub(crate) tokenizer: ChatTokenizer,
    sampling: VideoSampling,
}

impl Rule {
    /// The rule for the model directory of `settings`.
    ///
    /// # Errors
    /// [`DataError::Io`], [`DataError::Model`], [`DataError::UnknownFamily`] and [`DataError::Config`].
    pub(crate) fn open(settings: &ProfileSettings) -> Result<Self, DataError> {
        let files = settings.model_files()?;
        let hashes = files.hashes();
        let config = files.trained_config()?;
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
            llm_size: llm_size(&config),
            tokenizer: ChatTokenizer::open(&files, &config, family.as_ref())?,
            family,
            sampling: VideoSampling { max_frames: settings.video_max_frames, fps: settings.video_fps },
        })
    }

    /// The sample in `record` of the source `from`.
    pub(crate) fn measure(
        &self,
        record: &RawRecord,
        fallback_id: &str,
        from: &Source,
        stores: &Stores,
    ) -> Result<MeasuredSample, BadSample> {
        self.measure_parsed(&ParsedRecord::new(record, from)?, fallback_id, stores)
    }

    /// The messages of a record of the source `from`, as JSON.
    pub(crate) fn messages(&self, record: &RawRecord, from: &Source) -> Result<String, BadSample> {
        Ok(self.tokenizer.messages(&ParsedRecord::new(record, from)?.conversation))
    }

    /// The sample in a record whose conversation is known.
    pub(crate) fn measure_parsed(
        &self,
        record: &ParsedRecord,
        fallback_id: &str,
        stores: &Stores,
    ) -> Result<MeasuredSample, BadSample> {
        let conversation = &record.conversation;
        let bad = |fault, cause| record.bad(fault, cause);
        let num_images = record.count(MediaKind::Image);
        let mut media = Vec::with_capacity(record.places.len());
        let mut media_ms = 0;
        let mut stamp = MediaStamp::default();
        for (reference, place) in conversation.media.iter().zip(&record.places) {
            let Look { header, version, sampled } = stores.look(place).map_err(|error| {
                let fault = match error {
                    DataError::Io { .. } => Fault::MediaMissing,
                    _ => Fault::MediaUnsound,
                };
                bad(fault, error.to_string())
            })?;
            stamp.add(place, header.bytes, &version);
            stamp.look(header.bytes, &sampled);
            if reference.kind != MediaKind::Image {
                media_ms += header.duration_s.map_or(0, |seconds| (seconds * 1000.0).round() as u64);
            }
            let medium = self.media(place.clone(), reference.kind, num_images, &header);
            media.push(medium.map_err(|flaw| BadSample {
                is_of_settings: flaw.is_of_settings,
                ..bad(flaw.fault, flaw.cause)
            })?);
        }
        let shapes: Vec<&MediaShape> = media.iter().map(|medium| &medium.shape).collect();
        let tokens = self.tokenizer.tokenize(conversation, &shapes).map_err(|fault| BadSample {
            is_of_settings: fault.is_of_settings,
            ..bad(Fault::Text, fault.cause)
        })?;
        let (llm_tokens, label_tokens) = tokens
            .count()
            .ok_or_else(|| bad(Fault::Shape, "its LLM tokens must be fewer than 2^32".to_owned()))?;
        // As the text holds them, which is the order of their features.
        let shapes = tokens.in_text_order(shapes);
        // A function of one's own may name any number of segments.
        let encoder_tokens = shapes
            .iter()
            .flat_map(|shape| &shape.segments)
            .try_fold(0_u64, |sum, group| sum.checked_add(u64::from(group.count) * u64::from(group.tokens)));
        if encoder_tokens.is_none_or(|tokens| tokens > ENCODER_TOKENS_MAX) {
            let cause = format!("its encoder tokens must be at most {ENCODER_TOKENS_MAX}");
            return Err(bad(Fault::Shape, cause));
        }
        let shape = SampleShape {
            encoder_segments: shapes.iter().flat_map(|shape| shape.segments.iter().copied()).collect(),
            encoder_parts: EncoderParts::joined(shapes.iter().flat_map(|shape| shape.encoder_parts())),
            feature_tokens: shapes.iter().map(|shape| shape.feature_tokens()).sum(),
            llm_tokens,
            label_tokens,
        };
        Ok(MeasuredSample {
            id: record.id(fallback_id),
            kind: record.kind(),
            shape,
            media_bytes: stamp.bytes,
            media_ms,
            record_hash: record.hash,
            media_hash: stamp.hash().number(),
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
    ) -> Result<Media, Flaw> {
        let unsound = |cause: &str| Flaw {
            fault: Fault::MediaUnsound,
            cause: format!("`{place}` {cause}"),
            is_of_settings: false,
        };
        if kind == MediaKind::Audio {
            let (Some(duration_s), Some(sample_rate)) = (header.duration_s, header.sample_rate) else {
                return Err(unsound("does not say how long its sound lasts"));
            };
            let shape = self.family.audio(&Sound { duration_s, sample_rate }).map_err(Flaw::of_shape)?;
            return Ok(Media {
                place,
                kind,
                is_one_of_several: false,
                height: 0,
                width: 0,
                clip: None,
                shape,
            });
        }
        let (Some(height), Some(width)) = (header.height, header.width) else {
            return Err(unsound("has no picture"));
        };
        decoder::check(header).map_err(|cause| unsound(&cause))?;
        let size = Size { height, width };
        // The first frame of an animated picture serves as an image; a video container does not.
        let is_clip = !decoder::is_picture(header);
        let is_one_of_several = kind == MediaKind::Image && num_images > 1;
        let mut read = None;
        let shape = match kind {
            MediaKind::Image if is_clip => return Err(unsound("is a video, the record calls it an image")),
            MediaKind::Video => {
                let num_frames =
                    num_frames(header).ok_or_else(|| unsound("does not say how many frames it has"))?;
                let clip = Clip { size, num_frames, fps: header.fps, duration_s: header.duration_s };
                read = Some(clip);
                self.family.video(&clip, self.sampling)
            }
            _ => self.family.image(size, num_images),
        };
        let shape = shape.map_err(Flaw::of_shape)?;
        Ok(Media { place, kind, is_one_of_several, height, width, clip: read, shape })
    }
}

/// Layers and width of the LLM backbone, where a model's configuration says both.
fn llm_size(config: &Value) -> Option<String> {
    let sections = ["/text_config", "/llm_config", "/thinker_config/text_config", ""];
    sections.into_iter().filter_map(|section| config.pointer(section)).find_map(|section| {
        let number = |name| section.get(name).and_then(Value::as_u64);
        Some(DataProfile::llm_size(number("num_hidden_layers")?, number("hidden_size")?))
    })
}

/// [`RawRecord::hash`], and of the names that the mixture gives its columns: other names, another sample.
fn hash_of(record: &RawRecord, from: &Source) -> u64 {
    if from.has_our_names() {
        return record.hash();
    }
    let mut hash = Sha256::new();
    hash.update(record.hash().to_be_bytes());
    hash.update(json!(from.columns).to_string());
    if !from.ignore.is_empty() {
        hash.update(json!(from.ignore).to_string());
    }
    first_eight(&hash.finalize())
}

/// A record whose conversation is known and whose media are found, but not looked at.
#[derive(Debug)]
pub(crate) struct ParsedRecord {
    conversation: Conversation,
    /// Where each medium is, in the order of [`Conversation::media`].
    places: Vec<MediaPlace>,
    /// What else the record has.
    pub(crate) fields: Fields,
    /// Of what the record says, as the mixture reads it.
    pub(crate) hash: u64,
}

impl ParsedRecord {
    /// The conversation in a record of the source `from`.
    pub(crate) fn new(record: &RawRecord, from: &Source) -> Result<Self, BadSample> {
        let mut value = record.parse().map_err(|cause| BadSample {
            id: None,
            fault: Fault::Record,
            cause,
            is_of_settings: false,
        })?;
        let is_there = |name: &&String| value.get(name.as_str()).is_some_and(|value| !value.is_null());
        let renamed = from.columns.values().filter(is_there).cloned().collect();
        if !from.has_our_names() {
            value = Cow::Owned(from.renamed(value.into_owned()));
        }
        let bad = |cause| BadSample {
            id: crate::text::conversation::id_of(&value),
            fault: Fault::Record,
            cause,
            is_of_settings: false,
        };
        let (conversation, unread) = Conversation::parse_whole(&value).map_err(bad)?;
        let places = conversation.media.iter().map(|medium| place_of(medium, record, &from.media_root));
        let places = places.collect::<Result<_, _>>().map_err(bad)?;
        Ok(Self { conversation, places, fields: Fields { unread, renamed }, hash: hash_of(record, from) })
    }

    /// The record's own id, or `fallback`.
    pub(crate) fn id(&self, fallback: &str) -> String {
        self.conversation.id.clone().unwrap_or_else(|| fallback.to_owned())
    }

    /// What the sample holds.
    pub(crate) fn kind(&self) -> SampleKind {
        if self.count(MediaKind::Video) > 0 {
            SampleKind::Video
        } else if self.count(MediaKind::Audio) > 0 {
            SampleKind::Audio
        } else {
            [SampleKind::Text, SampleKind::Image, SampleKind::MultiImage][self.count(MediaKind::Image).min(2)]
        }
    }

    /// Size and version of all its media without a look into them; `None` where one is not there, or its store names
    /// no version. `about` gives size and version of a file.
    pub(crate) fn stamp(
        &self,
        about: impl Fn(&Location) -> Result<(u64, String), DataError>,
    ) -> Option<MediaStamp> {
        let mut stamp = MediaStamp::default();
        for place in &self.places {
            match place {
                MediaPlace::Whole(location) => {
                    let (bytes, version) = about(location).ok().filter(|(_, version)| !version.is_empty())?;
                    stamp.add(place, bytes, &version);
                }
                MediaPlace::Range { file, len, .. } => {
                    let (_, version) = about(file).ok().filter(|(_, version)| !version.is_empty())?;
                    stamp.add(place, *len, &version);
                }
                MediaPlace::Bytes { bytes, .. } => stamp.add(place, bytes.len() as u64, ""),
            }
        }
        Some(stamp)
    }

    fn count(&self, kind: MediaKind) -> usize {
        self.conversation.media.iter().filter(|media| media.kind == kind).count()
    }

    fn bad(&self, fault: Fault, cause: String) -> BadSample {
        BadSample { id: self.conversation.id.clone(), fault, cause, is_of_settings: false }
    }
}

/// Where the medium's bytes are.
fn place_of(
    reference: &MediaReference,
    record: &RawRecord,
    media_root: &Location,
) -> Result<MediaPlace, String> {
    match &reference.source {
        MediaSource::Name(name) => Ok(MediaPlace::Whole(media_root.join(name))),
        MediaSource::Inline { bytes, field } => {
            Ok(MediaPlace::Bytes { bytes: bytes.clone(), name: format!("the medium in `{field}`") })
        }
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
    /// [`DataError::Sources`] with every source that cannot be read; the error itself where there is one source.
    pub(crate) fn open(settings: &ProfileSettings) -> Result<Self, DataError> {
        let stores = Stores::new(settings.store_options.iter().cloned());
        let mixture = mixture::read(&settings.mixture, settings.media_root.as_deref())?;
        let opened: Vec<_> = mixture.sources.iter().map(|source| readers::open(source, &stores)).collect();
        if opened.len() > 1 {
            let errors: Vec<_> = opened.iter().filter_map(|one| one.as_ref().err()).collect();
            if let Some(first) = errors.first() {
                return Err(DataError::Sources {
                    path: settings.mixture.clone(),
                    problems: errors.iter().map(ToString::to_string).collect(),
                    mend: first.hint(),
                });
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

    /// The id of a record that has none: its source and its position there.
    pub(crate) fn fallback_id(&self, source: u32, position: u64) -> String {
        format!("{}#{position}", self.mixture.sources[source as usize].name)
    }

    /// The record of `source` as a sample; `fallback_id` names it where it has no id.
    pub(crate) fn measure(
        &self,
        rule: &Rule,
        source: u32,
        fallback_id: &str,
        record: &RawRecord,
    ) -> Result<MeasuredSample, BadSample> {
        let from = &self.mixture.sources[source as usize];
        rule.measure(record, fallback_id, from, &self.stores).map_err(|bad| with_line(record, bad))
    }

    /// Whether a file or object is known to lie in a remote store; records may name others.
    pub(crate) fn is_remote(&self) -> bool {
        let of_sources =
            self.mixture.sources.iter().flat_map(|source| [&source.location, &source.media_root]);
        let of_files = self.readers.iter().flat_map(|reader| reader.files());
        of_sources.chain(of_files).any(|location| matches!(location, Location::Remote(_)))
    }
}

/// The fault with the line of its record in front, where that is known.
pub(crate) fn with_line(record: &RawRecord, bad: BadSample) -> BadSample {
    match &record.body {
        // The error of a text that does not parse already names line and column.
        Body::Json { line, .. } if *line > 0 && !bad.cause.starts_with("line ") => {
            BadSample { cause: format!("line {line}: {}", bad.cause), ..bad }
        }
        _ => bad,
    }
}
