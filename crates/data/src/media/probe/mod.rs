//! Sizes and durations of media files from their headers; no pixel and no sound is decoded.
//!
//! Headers are read through a small window (`source`), at most `STEPS_MAX` fields of a file, and nothing
//! is allocated by a size that a file claims: whatever the bytes, the answer comes in bounded time and memory.
//! Formats whose headers do not hold a count (GIF, APNG, Matroska, fragmented MP4, MP3 and ADTS without an index)
//! are walked block by block, from header to header.

mod audio;
mod boxes;
mod directory;
mod edit;
mod heif;
mod heif_items;
mod image;
mod isobmff;
mod matroska;
mod orientation;
mod png_text;
mod riff;
mod source;
mod tiff;

use crate::DataError;
use crate::read_seek::ReadSeek;
use dflop_types::regular;
use source::{Fault, Source};
use std::io::Cursor;
use std::path::Path;

pub use crate::media::MediaKind;

/// What the headers of a media file say; `None` where it does not apply, or where the file does not tell.
#[derive(Debug, Clone, PartialEq)]
pub struct Probe {
    /// What the file shows.
    pub kind: MediaKind,
    /// Format of the file, for example `jpeg`, `mp4`, `webm`.
    pub format: &'static str,
    /// Width in pixels as displayed: rotation by EXIF or by the container is applied. A pixel that the container
    /// declares not square is counted once.
    pub width: Option<u32>,
    /// Height in pixels as displayed.
    pub height: Option<u32>,
    /// Frames of the first video stream, at least 1; 1 for a still image; none for sound, and where a container holds
    /// headers without a frame.
    pub frames: Option<u64>,
    /// Mean frames a second over the video's duration.
    pub fps: Option<f64>,
    /// Duration in seconds: of the first video stream, else of the first audio stream.
    pub duration_s: Option<f64>,
    /// Channels of the first audio stream.
    pub channels: Option<u32>,
    /// Rate of the first audio stream, in samples a second.
    pub sample_rate: Option<u32>,
    /// Size of the file.
    pub bytes: u64,
}

/// The shortest duration that we believe, in seconds.
const DURATION_MIN_S: f64 = 1e-9;
/// The longest, in seconds: 115 days. A damaged file may claim 1.8e16, of which two are no sum in milliseconds.
pub const DURATION_MAX_S: f64 = 1e7;
/// The most frames that we believe: a thousand a second for the longest duration.
pub const FRAMES_MAX: u64 = 10_000_000_000;
/// The largest file that is a medium, in bytes: 1 PiB. A file with holes may claim 2^63.
pub const BYTES_MAX: u64 = 1 << 50;

impl Probe {
    fn new(kind: MediaKind, format: &'static str) -> Self {
        Self {
            kind,
            format,
            width: None,
            height: None,
            frames: None,
            fps: None,
            duration_s: None,
            channels: None,
            sample_rate: None,
            bytes: 0,
        }
    }

    /// A still image.
    fn image(format: &'static str, (width, height): (u32, u32)) -> Self {
        Self {
            width: Some(width),
            height: Some(height),
            frames: Some(1),
            ..Self::new(MediaKind::Image, format)
        }
    }

    /// A picture file of `frames` frames: a video where they are more than one.
    fn animation(format: &'static str, size: (u32, u32), frames: u64, duration_ns: u64) -> Self {
        let still = Self::image(format, size);
        if frames <= 1 {
            return still;
        }
        Self { kind: MediaKind::Video, frames: Some(frames), ..still }.lasting(Some(duration_ns as f64 / 1e9))
    }

    /// Sound alone, of `num_samples` samples a channel.
    fn sound(format: &'static str, channels: u32, sample_rate: u32, num_samples: Option<u64>) -> Self {
        let duration_s = num_samples.filter(|_| sample_rate > 0).map(|n| n as f64 / f64::from(sample_rate));
        Self {
            channels: Some(channels),
            sample_rate: Some(sample_rate),
            ..Self::new(MediaKind::Audio, format).lasting(duration_s)
        }
    }

    /// With a duration, and the mean frame rate over it.
    fn lasting(self, duration_s: Option<f64>) -> Self {
        // A damaged file may claim a duration of 1e-310 s; its frame rate would then be infinite.
        let duration_s = duration_s.filter(|s| s.is_finite() && *s >= DURATION_MIN_S);
        let fps = match (self.frames, duration_s) {
            (Some(frames), Some(seconds)) if frames > 0 => Some(frames as f64 / seconds),
            _ => None,
        };
        Self { fps, duration_s, ..self }
    }

    /// With the rules every answer keeps: pictures have sides, sound has a rate and channels, no count is 0, and what is
    /// summed over samples stays small enough for a sum.
    fn check(self) -> Result<Self, Fault> {
        let zero = |value: Option<u32>, name: &str| match value {
            Some(0) => Err(Fault::Unsound(format!("{name} is 0, must be at least 1"))),
            _ => Ok(()),
        };
        zero(self.width, "width")?;
        zero(self.height, "height")?;
        if self.kind == MediaKind::Audio {
            zero(self.channels, "the number of channels")?;
            zero(self.sample_rate, "the sample rate")?;
        }
        if let Some(duration) = self.duration_s.filter(|&duration| duration > DURATION_MAX_S) {
            return Fault::unsound(format!(
                "its duration is {duration:e} s, must be at most {DURATION_MAX_S:e}"
            ));
        }
        if let Some(frames) = self.frames.filter(|&frames| frames > FRAMES_MAX) {
            return Fault::unsound(format!("it claims {frames} frames, must be at most {FRAMES_MAX}"));
        }
        Ok(Self { frames: self.frames.filter(|&frames| frames > 0), ..self })
    }
}

/// What the headers of the media file at `path` say.
///
/// The format is recognised by the first bytes, never by the name. Pictures and sound behind a sound header are not
/// looked at: a file cut after its header is answered.
///
/// *Complexity*: one read of 4 KiB for most images; proportional to the number of blocks where blocks are walked.
///
/// # Errors
/// [`DataError::Io`] if the file cannot be read, [`DataError::UnknownFormat`] if its first bytes are of no format
/// we know, [`DataError::Media`] if its headers end early or contradict themselves.
///
/// # Examples
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("dot.gif");
/// std::fs::write(&path, b"GIF89a\x03\x00\x02\x00\x00\x00\x00\x2c\0\0\0\0\x03\0\x02\0\0\x02\x00\x3b")?;
/// let probe = dflop_data::probe::probe(&path)?;
/// assert_eq!((probe.format, probe.width, probe.height), ("gif", Some(3), Some(2)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn probe(path: &Path) -> Result<Probe, DataError> {
    let failed = |source| DataError::Io { act: "read", path: path.to_owned(), source };
    let (file, about) = regular::open(path).map_err(failed)?;
    answer(path, Source::new(Box::new(file), about.len()))
}

/// What the headers of a media file in memory say; `path` names it in errors.
///
/// # Errors
/// Those of [`probe`].
pub fn probe_bytes(path: &Path, bytes: &[u8]) -> Result<Probe, DataError> {
    answer(path, Source::new(Box::new(Cursor::new(bytes)), bytes.len() as u64))
}

/// What the headers of the `len` bytes behind `reader` say; `path` names them in errors.
///
/// # Errors
/// Those of [`probe`].
pub fn probe_reader(path: &Path, reader: Box<dyn ReadSeek>, len: u64) -> Result<Probe, DataError> {
    answer(path, Source::new(reader, len))
}

fn answer(path: &Path, mut source: Source<'_>) -> Result<Probe, DataError> {
    let error = |fault, format| match fault {
        Fault::Io(source) => DataError::Io { act: "read", path: path.to_owned(), source },
        Fault::Unsound(cause) => DataError::Media { path: path.to_owned(), format, cause },
    };
    let format = sniff(&mut source).map_err(|fault| error(fault, "media"))?;
    let Some((format, read)) = format else {
        return Err(DataError::UnknownFormat { path: path.to_owned(), start: source.start_in_words() });
    };
    if source.len() > BYTES_MAX {
        let cause = format!("it has {} bytes, must have at most {BYTES_MAX}", source.len());
        return Err(error(Fault::Unsound(cause), format));
    }
    let probe = read(&mut source).and_then(Probe::check).map_err(|fault| error(fault, format))?;
    Ok(Probe { bytes: source.len(), ..probe })
}

type Reader = fn(&mut Source<'_>) -> Result<Probe, Fault>;

/// The format that the first bytes claim, and who reads it.
fn sniff(source: &mut Source<'_>) -> Result<Option<(&'static str, Reader)>, Fault> {
    let start = source.prefix()?;
    let kind = [start[8], start[9], start[10], start[11]];
    Ok(Some(match &start {
        [0xff, 0xd8, 0xff, ..] => ("jpeg", image::jpeg),
        [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => ("png", image::png),
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => ("gif", image::gif),
        [b'R', b'I', b'F', b'F', ..] if &kind == b"WEBP" => ("webp", image::webp),
        [b'R', b'I', b'F', b'F' | b'X', ..] | [b'R', b'F', b'6', b'4', ..] if &kind == b"WAVE" => {
            ("wav", riff::wav)
        }
        [b'R', b'I', b'F', b'F', ..] if &kind == b"AVI " => ("avi", riff::avi),
        [b'F', b'O', b'R', b'M', ..] if matches!(&kind, b"AIFF" | b"AIFC") => ("aiff", audio::aiff),
        // The length of the second header follows; of bitmaps only these are known.
        [b'B', b'M', .., 12 | 40 | 52 | 56 | 64 | 108 | 124, 0] if start[6..10] == [0; 4] => {
            ("bmp", image::bmp)
        }
        [b'I', b'I', 42 | 43, 0, ..] | [b'M', b'M', 0, 42 | 43, ..] => ("tiff", tiff::tiff),
        [0x1a, 0x45, 0xdf, 0xa3, ..] => ("matroska", matroska::matroska),
        [b'O', b'g', b'g', b'S', ..] => ("ogg", audio::ogg),
        [_, _, _, _, b'f', b't', b'y', b'p', ..] if heif::is_brand(kind) => ("heif", heif::heif),
        [_, _, _, _, name @ ..] if isobmff::may_begin([name[0], name[1], name[2], name[3]]) => {
            ("mp4", isobmff::movie)
        }
        _ => return audio::sniff(source),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Found by fuzzing a Matroska file whose duration was a subnormal number.
    #[test]
    fn no_frame_rate_is_infinite() {
        let lasting = |duration_s| Probe::image("mkv", (64, 48)).lasting(duration_s);
        for none in [None, Some(1.8e-310), Some(0.0), Some(-1.0), Some(f64::NAN), Some(f64::INFINITY)] {
            let probe = lasting(none);
            assert_eq!((probe.duration_s, probe.fps), (None, None), "{none:?}");
        }
        assert_eq!(lasting(Some(0.5)).fps, Some(2.0));
    }
}
