//! A shape rule that somebody else wrote, for example a function of Python for a family that dflop does not know.
//!
//! ```text
//! Question (kind, sizes) -> memo -> function -> MediaShape, checked
//! ```

use super::{Clip, Family, Marks, MediaShape, Piece, Size, Sound, VideoSampling, image_words};
use crate::DataError;
use crate::media::MediaKind;
use dflop_types::EncoderParts;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Answers that are kept at most: sizes of pictures repeat, lengths of videos need not.
const MEMO_MAX: usize = 1 << 16;

/// What a shape is asked for; what does not apply to the kind is 0 or `None`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Question {
    /// Of the medium.
    pub kind: MediaKind,
    /// In pixels, as displayed.
    pub height: u32,
    /// In pixels, as displayed.
    pub width: u32,
    /// Images of the sample.
    pub num_images: usize,
    /// Frames in the file of a video.
    pub num_frames: u64,
    /// Mean frames a second of a video, where the file tells.
    pub fps: Option<f64>,
    /// In seconds, where the file tells.
    pub duration_s: Option<f64>,
    /// In samples a second of a sound.
    pub sample_rate: u32,
    /// Frames to read of a video at most, where the user asks.
    pub max_frames: Option<u32>,
    /// Frames to read a second of video, where the user asks.
    pub sample_fps: Option<f64>,
}

impl Question {
    fn new(kind: MediaKind, size: Size) -> Self {
        Self {
            kind,
            height: size.height,
            width: size.width,
            num_images: 0,
            num_frames: 0,
            fps: None,
            duration_s: None,
            sample_rate: 0,
            max_frames: None,
            sample_fps: None,
        }
    }

    /// Equal for equal questions; floats by their bits.
    fn key(&self) -> Key {
        let numbers = [
            Some(u64::from(self.height)),
            Some(u64::from(self.width)),
            Some(self.num_images as u64),
            Some(self.num_frames),
            self.fps.map(f64::to_bits),
            self.duration_s.map(f64::to_bits),
            Some(u64::from(self.sample_rate)),
            self.max_frames.map(u64::from),
            self.sample_fps.map(f64::to_bits),
        ];
        (self.kind.as_str(), numbers)
    }

    /// The medium in the words of an error.
    fn words(&self) -> String {
        let (height, width) = (self.height, self.width);
        match self.kind {
            MediaKind::Image => image_words(height, width),
            MediaKind::Video => format!("a video of {} frames of {height} x {width} pixels", self.num_frames),
            MediaKind::Audio => format!("a sound of {} s", self.duration_s.unwrap_or(0.0)),
        }
    }
}

type Key = (&'static str, [Option<u64>; 9]);

/// The function: a question in, a shape or the reason why there is none out.
type Function = dyn Fn(&Question) -> Result<MediaShape, String> + Send + Sync;

/// What the cause begins with where the function refuses the medium.
const REFUSAL: &str = "raised ValueError";

/// A shape rule that is a function.
///
/// By `ValueError` it refuses a medium, which makes its sample a bad one; whatever else goes wrong in it is its own fault,
/// and ends the profile.
pub struct Callable {
    name: String,
    version: String,
    marks: Vec<(MediaKind, Marks)>,
    function: Box<Function>,
    memo: Mutex<HashMap<Key, MediaShape>>,
}

impl fmt::Debug for Callable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Callable")
            .field("name", &self.name)
            .field("version", &self.version)
            .field("marks", &self.marks)
            .finish_non_exhaustive()
    }
}

impl Callable {
    /// The rule `function`, called `name` as in `module:function`, for media of the kinds that have `marks`.
    ///
    /// The function must depend on the question alone: its answers are kept. `version` says which function it is,
    /// so that shapes of an older one are not taken for its own.
    pub fn new(
        name: impl Into<String>,
        version: impl Into<String>,
        marks: Vec<(MediaKind, Marks)>,
        function: impl Fn(&Question) -> Result<MediaShape, String> + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            version: version.into(),
            marks,
            function: Box::new(function),
            memo: Mutex::default(),
        }
    }

    fn ask(&self, question: &Question) -> Result<MediaShape, DataError> {
        let refuse = |rule: String| DataError::Shape {
            family: "python",
            media: question.words(),
            rule: format!("`{}` {rule}", self.name),
        };
        let broken = |cause: String| DataError::Function {
            media: question.words(),
            cause: format!("`{}` {cause}", self.name),
        };
        // This exception refuses the medium. Any other exception is a fault of the function.
        let failed = |cause: String| {
            if cause.starts_with(REFUSAL) { refuse(cause) } else { broken(cause) }
        };
        if self.marks(question.kind).is_none() {
            return Err(broken(format!("has no marks for media of kind `{}`", question.kind.as_str())));
        }
        let key = question.key();
        // Shapes in the memo are complete even if the thread that stored one has panicked.
        let memo = || self.memo.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shape) = memo().get(&key) {
            return Ok(shape.clone());
        }
        // Not under the lock: the function may be slow, and waits for Python.
        let shape = (self.function)(question).map_err(failed)?;
        check(question, &shape).map_err(broken)?;
        let mut memo = memo();
        if memo.len() < MEMO_MAX {
            memo.insert(key, shape.clone());
        }
        Ok(shape)
    }
}

impl Family for Callable {
    fn name(&self) -> &str {
        &self.name
    }

    fn marks(&self, kind: MediaKind) -> Option<Marks> {
        self.marks.iter().find(|(of, _)| *of == kind).map(|(_, marks)| marks.clone())
    }

    fn image(&self, size: Size, num_images: usize) -> Result<MediaShape, DataError> {
        self.ask(&Question { num_images, ..Question::new(MediaKind::Image, size) })
    }

    fn video(&self, clip: &Clip, sampling: VideoSampling) -> Result<MediaShape, DataError> {
        self.ask(&Question {
            num_frames: clip.num_frames,
            fps: clip.fps,
            duration_s: clip.duration_s,
            max_frames: sampling.max_frames,
            sample_fps: sampling.fps,
            ..Question::new(MediaKind::Video, clip.size)
        })
    }

    fn audio(&self, sound: &Sound) -> Result<MediaShape, DataError> {
        self.ask(&Question {
            duration_s: Some(sound.duration_s),
            sample_rate: sound.sample_rate,
            ..Question::new(MediaKind::Audio, Size { height: 0, width: 0 })
        })
    }
}

/// `Ok` if the shape keeps the rules of [`MediaShape`]; else the rule it breaks.
fn check(question: &Question, shape: &MediaShape) -> Result<(), String> {
    let broken = |rule: &str| Err(format!("gave a shape that breaks a rule: {rule}"));
    if shape.segments.is_empty() || shape.segments.iter().any(|s| s.count == 0 || s.tokens == 0) {
        return broken("`segments` must hold at least one (count, tokens), both at least 1");
    }
    if shape.num_tiles == 0 {
        return broken("`num_tiles` must be at least 1");
    }
    let mut features = 0_u64;
    for piece in &shape.pieces {
        match piece {
            Piece::Features(0) => return broken("a number of `pieces` must be at least 1"),
            Piece::Features(count) => features += u64::from(*count),
            Piece::Text(_) => {}
        }
    }
    if features == 0 || features > u64::from(u32::MAX) {
        return broken("the numbers of `pieces` must add up to at least 1 and fewer than 2^32");
    }
    let sum = |of: fn(&EncoderParts) -> u32| -> u64 {
        shape.parts.iter().fold(0, |sum, p| sum.saturating_add(u64::from(p.count) * u64::from(of(p))))
    };
    let num_segments: u64 = shape.segments.iter().map(|s| u64::from(s.count)).sum();
    if !shape.parts.is_empty()
        && (sum(|p| p.segments) != num_segments
            || sum(|p| p.feature_tokens) != features
            || shape.parts.iter().any(|p| p.count == 0 || p.segments == 0 || p.feature_tokens == 0))
    {
        return broken("`parts` must have the segments and the features of the shape, and none may be empty");
    }
    let frames = &shape.frame_indices;
    if (question.kind == MediaKind::Video) == frames.is_empty() {
        return broken("`frame_indices` must name the frames of a video, and of nothing else");
    }
    if frames.windows(2).any(|pair| pair[0] > pair[1]) {
        return broken("`frame_indices` must ascend");
    }
    match frames.last() {
        Some(&last) if u64::from(last) >= question.num_frames => {
            broken(&format!("frame {last} is read of a video of {}", question.num_frames))
        }
        _ => Ok(()),
    }
}

/// A family that is given, not found by the model's `model_type`. Two are equal when name and version are.
#[derive(Debug, Clone)]
pub struct GivenFamily(Arc<Callable>);

impl GivenFamily {
    /// `rule` as a setting.
    pub fn new(rule: Callable) -> Self {
        Self(Arc::new(rule))
    }

    /// Which function it is, as in the hash of its source.
    pub fn version(&self) -> &str {
        &self.0.version
    }
}

impl PartialEq for GivenFamily {
    fn eq(&self, other: &Self) -> bool {
        self.0.name == other.0.name && self.0.version == other.0.version
    }
}

impl Family for GivenFamily {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn marks(&self, kind: MediaKind) -> Option<Marks> {
        self.0.marks(kind)
    }

    fn image(&self, size: Size, num_images: usize) -> Result<MediaShape, DataError> {
        self.0.image(size, num_images)
    }

    fn video(&self, clip: &Clip, sampling: VideoSampling) -> Result<MediaShape, DataError> {
        self.0.video(clip, sampling)
    }

    fn audio(&self, sound: &Sound) -> Result<MediaShape, DataError> {
        self.0.audio(sound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_types::EncoderSegments;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn marks() -> Vec<(MediaKind, Marks)> {
        [MediaKind::Image, MediaKind::Video]
            .map(|kind| {
                let token = "<image>".to_owned();
                (
                    kind,
                    Marks { placeholder: token.clone(), feature_token: token, id_fields: &[], number: None },
                )
            })
            .to_vec()
    }

    fn shape(features: u32, frame_indices: Vec<u32>) -> MediaShape {
        MediaShape {
            num_tiles: 1,
            segments: vec![EncoderSegments::of(1, 9)],
            pieces: vec![Piece::Features(features)],
            frame_indices,
            parts: Vec::new(),
            patches: None,
            first_patches: None,
            last_patches: None,
        }
    }

    const SIZE: Size = Size { height: 3, width: 4 };

    #[test]
    fn equal_questions_are_asked_once() {
        let calls = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&calls);
        let rule = Callable::new("here:rule", "1", marks(), move |question| {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(shape(question.height * question.width * question.num_images as u32, Vec::new()))
        });
        for _ in 0..3 {
            assert_eq!(rule.image(SIZE, 1).unwrap().feature_tokens(), 12);
            assert_eq!(rule.image(SIZE, 2).unwrap().feature_tokens(), 24);
        }
        assert_eq!(calls.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn errors_name_the_function_and_the_medium() {
        let fails =
            Callable::new("here:rule", "1", marks(), |_| Err("raised ValueError: too thin".to_owned()));
        assert_eq!(
            fails.image(SIZE, 1).unwrap_err().to_string(),
            "no python shape for an image of 3 x 4 pixels (height x width): `here:rule` raised ValueError: too thin"
        );
        let error = fails.audio(&Sound { duration_s: 1.5, sample_rate: 8000 }).unwrap_err().to_string();
        assert_eq!(
            error,
            "no python shape for a sound of 1.5 s: `here:rule` has no marks for media of kind `audio`"
        );
    }

    #[test]
    fn shapes_that_break_a_rule_are_refused() {
        let clip = Clip { size: SIZE, num_frames: 5, fps: None, duration_s: None };
        let video = |frames: &[u32]| {
            let frames = frames.to_vec();
            let rule = Callable::new("here:rule", "1", marks(), move |_| Ok(shape(1, frames.clone())));
            rule.video(&clip, VideoSampling::default())
        };
        assert_eq!(video(&[0, 4]).unwrap().frame_indices, [0, 4]);
        for (frames, expected) in [
            (&[][..], "must name the frames"),
            (&[1, 0][..], "must ascend"),
            (&[0, 5][..], "frame 5 is read"),
        ] {
            let error = video(frames).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
        let image = |broken: MediaShape| {
            let rule = Callable::new("here:rule", "1", marks(), move |_| Ok(broken.clone()));
            rule.image(SIZE, 1).unwrap_err().to_string()
        };
        assert!(image(shape(0, Vec::new())).contains("at least 1"));
        assert!(image(shape(1, vec![0])).contains("and of nothing else"));
        assert!(image(MediaShape { num_tiles: 0, ..shape(1, Vec::new()) }).contains("`num_tiles`"));
        assert!(image(MediaShape { segments: Vec::new(), ..shape(1, Vec::new()) }).contains("`segments`"));
        assert!(image(MediaShape { pieces: Vec::new(), ..shape(1, Vec::new()) }).contains("add up"));
        let parts = |segments, feature_tokens| MediaShape {
            parts: vec![EncoderParts { count: 1, segments, feature_tokens }],
            ..shape(6, Vec::new())
        };
        assert!(image(parts(1, 5)).contains("`parts` must have"));
        assert!(image(parts(2, 6)).contains("`parts` must have"));
        let many = MediaShape { pieces: vec![Piece::Features(u32::MAX); 2], ..shape(1, Vec::new()) };
        assert!(image(many).contains("fewer than 2^32"));
    }
}
