//! The kinds of media, and every name that one of them has: in a record, in a text, as the ending of a file.

/// What a medium shows, or what a record says that it shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MediaKind {
    /// One still picture.
    Image,
    /// Pictures in time, with sound or without: a video container, or a GIF, WebP or PNG of more than one frame.
    Video,
    /// Sound alone.
    Audio,
}

const IMAGES: [&str; 10] = ["jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "heic"];
const VIDEOS: [&str; 5] = ["mp4", "mov", "mkv", "webm", "avi"];
const SOUNDS: [&str; 6] = ["wav", "flac", "mp3", "ogg", "opus", "m4a"];

impl MediaKind {
    /// Every kind; tables of kinds have this order.
    pub const ALL: [Self; 3] = [Self::Image, Self::Video, Self::Audio];

    /// `image`, `video` or `audio`: the field of a record that names one, and the type of a part of its content.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Image => "image",
            Self::Video => "video",
            Self::Audio => "audio",
        }
    }

    /// The kind of this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name)
    }

    /// Its position in [`MediaKind::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// `images`, `videos` or `audios`: the field of a record that names several.
    pub(crate) const fn plural(self) -> &'static str {
        match self {
            Self::Image => "images",
            Self::Video => "videos",
            Self::Audio => "audios",
        }
    }

    /// `<image>`, `<video>` or `<audio>`: the mark of its place in a text.
    pub(crate) const fn mark(self) -> &'static str {
        match self {
            Self::Image => "<image>",
            Self::Video => "<video>",
            Self::Audio => "<audio>",
        }
    }

    /// What the ending of a file's name, in lower case, says that the file shows: `jpg`, or `jpg` of `img1.jpg`.
    pub(crate) fn of_ending(name: &str) -> Option<Self> {
        let ending = name.rsplit('.').next().unwrap_or(name);
        let endings = [IMAGES.as_slice(), VIDEOS.as_slice(), SOUNDS.as_slice()];
        Self::ALL
            .into_iter()
            .zip(endings)
            .find(|(_, endings)| endings.contains(&ending))
            .map(|(kind, _)| kind)
    }
}
