//! What the decoders of training take: a medium past their limits would pass the profile, which decodes nothing, and stop
//! training when its turn comes.

use super::MediaKind;
use super::probe::Probe;

/// Pixels of a picture, at most: Pillow takes more for an attack (twice `Image.MAX_IMAGE_PIXELS`, as Pillow 9 to 12 set it).
const PICTURE_PIXELS_MAX: u64 = 178_956_970;
/// Pixels of a frame of a video with 128 more on each axis, at most: `av_image_check_size` of `FFmpeg`.
const FRAME_PIXELS_MAX: u64 = (i32::MAX as u64) / 8;
/// What `FFmpeg` adds to each side.
const FRAME_MARGIN: u64 = 128;
/// Picture formats that may hold several frames; Pillow reads them, not `FFmpeg`.
const ANIMATIONS: [&str; 3] = ["gif", "png", "webp"];

/// Whether Pillow decodes a file of this header, as a picture or as frames of an animation; a container of video is
/// `FFmpeg`'s.
pub(crate) fn is_picture(header: &Probe) -> bool {
    header.kind == MediaKind::Image || ANIMATIONS.contains(&header.format)
}

/// Nothing where the decoder of training takes a file of this header; sounds have no limit here.
///
/// # Errors
/// Size and limit, in words that follow the name of the file.
pub(crate) fn check(header: &Probe) -> Result<(), String> {
    let (Some(width), Some(height)) = (header.width, header.height) else { return Ok(()) };
    if header.format == "heif" {
        return Err(
            "is HEIC, which Pillow, the decoder of training, does not read: convert it to JPEG or PNG"
                .to_owned(),
        );
    }
    let (pixels, most, decoder) = if is_picture(header) {
        (u64::from(width) * u64::from(height), PICTURE_PIXELS_MAX, "Pillow")
    } else {
        let side = |side: u32| u64::from(side) + FRAME_MARGIN;
        (side(width) * side(height), FRAME_PIXELS_MAX, "FFmpeg")
    };
    if pixels <= most {
        return Ok(());
    }
    Err(format!(
        "has {width} x {height} pixels, which {decoder}, the decoder of training, refuses above {most} in all: scale it down"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sound() -> Probe {
        Probe {
            kind: MediaKind::Audio,
            format: "wav",
            width: None,
            height: None,
            frames: None,
            fps: None,
            duration_s: Some(1.0),
            channels: Some(1),
            sample_rate: Some(8000),
            bytes: 1,
        }
    }

    fn said(kind: MediaKind, format: &'static str, width: u32, height: u32) -> Result<(), String> {
        let of = |side| Some(side);
        check(&Probe { width: of(width), height: of(height), kind, format, ..sound() })
    }

    #[test]
    fn what_no_decoder_takes_is_refused() {
        let (image, video) = (MediaKind::Image, MediaKind::Video);
        // 2 x 89478485
        assert_eq!(said(image, "png", 2, 89_478_485), Ok(()));
        assert_eq!(
            said(image, "png", 20_000, 20_000).unwrap_err(),
            "has 20000 x 20000 pixels, which Pillow, the decoder of training, refuses above 178956970 in all: scale it down"
        );
        assert!(said(video, "gif", 20_000, 20_000).unwrap_err().contains("Pillow"));
        assert_eq!(said(video, "mp4", 16_000, 16_000), Ok(()));
        assert!(said(video, "mp4", 20_000, 20_000).unwrap_err().contains("FFmpeg"));
        assert!(said(image, "heif", 4, 4).unwrap_err().contains("HEIC"));
        assert_eq!(check(&sound()), Ok(()));
    }
}
