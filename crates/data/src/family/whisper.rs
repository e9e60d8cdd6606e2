//! Windows of mel frames as `WhisperFeatureExtractor` cuts them, and how many tokens an encoder like Whisper's makes
//! of one.
//!
//! ```text
//! samples -> frames = ceil(samples / hop)                                     160 samples, 10 ms
//!         -> conv of stride 2 = (frames - 1) div 2 + 1 -> pool of 2 = (conv - 2) div 2 + 1   LLM tokens
//! ```
//!
//! The encoder reads a whole window, silence included, whatever the sound's length: one segment of
//! `max_source_positions` (1,500) tokens; that is what it costs.
//!
//! A file gives seconds, but the extractor needs samples at its own rate. The file has `n = round(seconds x rate)`
//! samples, which is exact where the file counts samples. After resampling there are `ceil(n x 16,000 / rate)`, as
//! librosa and soxr count. Other resamplers may give one sample more or less; that changes the tokens only where it
//! begins a frame.

use super::fields::{CONFIG, EXTRACTOR, Fields};
use super::{FamilyFiles, MediaShape, Piece, Sound};
use crate::DataError;
use dflop_types::{EncoderParts, EncoderSegments};

/// Mel frames a position of the encoder: the stride of its second convolution.
const CONV_STRIDE: u64 = 2;
/// Frames of a sound, at most, that fill no token.
const EMPTY_FRAMES: u64 = 2;
/// The largest rate and window we take.
const SAMPLES_MAX: u64 = 1 << 32;
/// Windows of a sound, at most: their tokens then fit in 32 bits.
pub(super) const WINDOWS_MAX: u32 = 1 << 16;

/// What the extractor makes of sounds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Extractor {
    /// Samples a second that it wants.
    sample_rate: u64,
    /// Seconds of a window, the most that it reads at once.
    pub(super) seconds: u64,
    /// Samples a mel frame.
    hop: u64,
    /// Samples that the transform of a frame reads.
    transform: u64,
}

/// Samples of a sound at a rate of an extractor; a rule that the sound breaks.
pub(super) fn samples_at(sound: &Sound, sample_rate: u64) -> Result<u64, String> {
    if sound.sample_rate == 0 || !sound.duration_s.is_finite() || sound.duration_s < 0.0 {
        return Err("its duration must be finite, its rate above 0".to_owned());
    }
    let at_source = (sound.duration_s * f64::from(sound.sample_rate)).round();
    Ok(if u64::from(sound.sample_rate) == sample_rate {
        at_source as u64
    } else {
        (at_source * (sample_rate as f64 / f64::from(sound.sample_rate))).ceil() as u64
    })
}

impl Extractor {
    /// That of a model's files; `encoder` is the `model_type` that `audio_config` of `config` must have. Fields that are
    /// missing have the values transformers gives them.
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which extractor and model would disagree, or that these rules do not
    /// cover.
    pub(super) fn read(files: &FamilyFiles, config: &Fields, encoder: &str) -> Result<Self, DataError> {
        let fields = Self::fields(files);
        config.must_be("audio_config.model_type", &[encoder], true)?;
        fields.must_be("feature_extractor_type", &["WhisperFeatureExtractor"], true)?;
        fields.must_be("padding_side", &["right"], true)?;
        let bins = config.side("audio_config.num_mel_bins")?.unwrap_or(128);
        let size = fields.side("feature_size")?.unwrap_or(80);
        if size != bins {
            let rule = format!("the encoder reads {bins} mel bins, the extractor would make {size}");
            return Err(fields.error("feature_size", rule));
        }
        let sample_rate = fields.whole("sampling_rate", SAMPLES_MAX)?.unwrap_or(16_000);
        let seconds = fields.whole("chunk_length", 1 << 15)?.unwrap_or(30);
        let hop = fields.whole("hop_length", SAMPLES_MAX)?.unwrap_or(160);
        let transform = fields.whole("n_fft", SAMPLES_MAX)?.unwrap_or(400);
        Ok(Self { sample_rate, seconds, hop, transform })
    }

    /// Its own fields, which may be nested in the processor's.
    fn fields(files: &FamilyFiles) -> Fields<'_> {
        let object = files.preprocessor.get("feature_extractor").unwrap_or(&files.preprocessor);
        Fields { file: EXTRACTOR, object }
    }

    /// Samples of a whole window.
    pub(super) const fn samples_each(&self) -> u64 {
        self.seconds * self.sample_rate
    }

    /// Samples of a sound at the extractor's rate; a rule that it breaks.
    pub(super) fn samples(&self, sound: &Sound) -> Result<u64, String> {
        samples_at(sound, self.sample_rate)
    }

    /// `Ok` if a window is a whole number of mel frames: else frames of a long sound would not be those of its windows.
    ///
    /// # Errors
    /// [`DataError::Config`].
    pub(super) fn whole_frames(&self, files: &FamilyFiles) -> Result<(), DataError> {
        let samples = self.samples_each();
        if samples.is_multiple_of(self.hop) {
            return Ok(());
        }
        Err(Self::fields(files).error("hop_length", format!("must divide a window of {samples} samples")))
    }

    /// Mel frames of so many samples where nothing is padded: those that are filled; a rule that they break.
    ///
    /// The transform mirrors a sound at both ends, by half of what it reads of a frame.
    pub(super) fn unpadded_frames(&self, samples: u64) -> Result<u64, String> {
        let least = self.hop.max(self.transform / 2 + 1);
        if samples < least {
            return Err(format!(
                "its {samples} samples are too few for the transform, which reads {least} or more"
            ));
        }
        Ok(samples / self.hop)
    }

    /// Mel frames of so many samples, of the first window where they are more.
    fn frames(&self, samples: u64) -> u64 {
        // The last frame that the transform begins and does not fill is left out.
        samples.div_ceil(self.hop).min(self.samples_each() / self.hop)
    }

    /// Mel frames of so many samples in at most `max_windows` windows; a rule that they break. `limit` says in an error
    /// whose limit that is.
    pub(super) fn checked_frames(&self, samples: u64, max_windows: u32, limit: &str) -> Result<u64, String> {
        let most = u64::from(max_windows) * self.samples_each();
        if samples > most {
            return Err(format!(
                "its {samples} samples at {} a second are more than {limit} {most}; the processor would cut it off",
                self.sample_rate
            ));
        }
        let frames = self.frames(samples);
        if frames <= EMPTY_FRAMES {
            let least = EMPTY_FRAMES * self.hop + 1;
            return Err(format!("its {samples} samples fill no token, at least {least} do"));
        }
        Ok(frames)
    }
}

/// What extractor and encoder make of sounds.
///
/// *Invariant* (checked by [`Windows::from_files`]): the window is `2 x positions` hops long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Windows {
    pub(super) extractor: Extractor,
    /// Encoder tokens of a window.
    pub(super) positions: u32,
}

impl Windows {
    /// Those of a model's files; `encoder` is the `model_type` that `audio_config` must have. Fields that are missing
    /// have the values transformers gives them.
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which extractor and model would disagree, or that this rule does
    /// not cover.
    pub(super) fn from_files(files: &FamilyFiles, encoder: &str) -> Result<Self, DataError> {
        let config = Fields { file: CONFIG, object: &files.config };
        let extractor = Extractor::read(files, &config, encoder)?;
        let positions = config.side("audio_config.max_source_positions")?.unwrap_or(1_500);
        let frames = extractor.samples_each() / extractor.hop;
        if frames != CONV_STRIDE * u64::from(positions) {
            let rule = format!(
                "a window of {} s has {frames} mel frames, the encoder reads {}",
                extractor.seconds,
                CONV_STRIDE * u64::from(positions)
            );
            return Err(Extractor::fields(files).error("chunk_length", rule));
        }
        Ok(Self { extractor, positions })
    }

    /// LLM tokens of so many samples of one window: fewer than `positions`.
    fn tokens(&self, samples: u64) -> u32 {
        let frames = self.extractor.frames(samples);
        if frames <= EMPTY_FRAMES { 0 } else { (((frames - 1) / 2 + 1 - 2) / 2 + 1) as u32 }
    }

    /// The shape of a sound of so many samples, which the encoder reads window by window; a rule that it breaks.
    ///
    /// A window is a part. Up to two frames (20 ms) behind the last whole window are a window that fills no token: it
    /// makes one part with the window before it.
    ///
    /// The processor reads `max_windows` at most, up to [`WINDOWS_MAX`]; `limit` says in an error whose limit that
    /// is.
    pub(super) fn shape(&self, samples: u64, max_windows: u32, limit: &str) -> Result<MediaShape, String> {
        self.extractor.checked_frames(samples, max_windows, limit)?;
        let samples_each = self.extractor.samples_each();
        let each = self.tokens(samples_each);
        // Less than `max_windows`.
        let whole = ((samples - 1) / samples_each) as u32;
        let last = self.tokens(samples - u64::from(whole) * samples_each);
        let part = |count, segments, feature_tokens| EncoderParts { count, segments, feature_tokens };
        let parts = if last == 0 {
            vec![part(whole - 1, 1, each), part(1, 2, each)]
        } else {
            vec![part(whole, 1, each), part(1, 1, last)]
        };
        Ok(MediaShape {
            num_tiles: whole + 1,
            segments: vec![EncoderSegments::of(whole + 1, self.positions)],
            pieces: vec![Piece::Features(whole * each + last)],
            frame_indices: Vec::new(),
            parts: EncoderParts::joined(parts.into_iter().filter(|part| part.count > 0)),
            patches: None,
            first_patches: None,
            last_patches: None,
        })
    }
}

/// An error for a sound that breaks a rule.
pub(super) fn refused(family: &'static str, sound: &Sound, rule: String) -> DataError {
    DataError::Shape {
        family,
        media: format!("a sound of {} s at {} samples a second", sound.duration_s, sound.sample_rate),
        rule,
    }
}
