//! Why a LLaVA-OneVision model cannot read videos: what its video processor does that the shape rule does not follow.
//!
//! `LlavaOnevisionVideoProcessor` of Hugging Face transformers 5.23.0 resizes each frame to a tile. By default it reads the frames
//! that it is given, so dflop chooses them.

use super::qwen_vl::video_fields;
use super::{FamilyFiles, VideoSampling};
use crate::DataError;

/// Side of a frame where the video processor names none, in pixels.
const DEFAULT_FRAME: u32 = 384;

/// The rules that videos break.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct VideoRefusal {
    /// Of every video: its frames leave the processor in another size than the encoder's.
    always: Option<String>,
    /// Of a video of which the user asks no frames: the processor would choose them.
    unasked: Option<String>,
}

impl VideoRefusal {
    /// What the video processor's fields say, for an encoder that reads tiles of `tile` pixels.
    ///
    /// # Errors
    /// [`DataError::Config`] for a field of another kind than transformers takes. A field that
    /// only videos cannot be read with is no error here: the model's images may be read all the same.
    pub(super) fn read(files: &FamilyFiles, tile: u32) -> Result<Self, DataError> {
        let fields = video_fields(files);
        let file = files.names.of(fields.file);
        let mut always = None;
        let is_cropped = fields.flag("do_center_crop")?.unwrap_or(false);
        let is_plain = fields.get("size").is_none();
        let sizes = [("size", true, is_plain.then_some(DEFAULT_FRAME)), ("crop_size", is_cropped, None)];
        for (name, _, default) in sizes.into_iter().filter(|(_, is_used, _)| *is_used) {
            for side in ["height", "width"] {
                let field = format!("{name}.{side}");
                let found = fields.side(&field)?.or(default);
                if found != Some(tile) {
                    let found = found.map_or_else(|| "missing".to_owned(), |side| side.to_string());
                    always = Some(format!(
                        "`{field}` of `{file}` is {found}, the encoder reads frames of {tile} pixels"
                    ));
                }
            }
        }
        if !fields.flag("do_resize")?.unwrap_or(true) {
            always = Some(format!("`do_resize` of `{file}` is false, frames keep their size"));
        }
        let unasked = fields.flag("do_sample_frames")?.unwrap_or(false).then(|| {
            format!(
                "`do_sample_frames` of `{file}` is true, and dflop does not choose frames as that video processor does: \
                 ask for frames"
            )
        });
        Ok(Self { always, unasked })
    }

    /// The rule that a video breaks of which `asked` asks for frames.
    pub(super) fn of(&self, asked: VideoSampling) -> Option<&str> {
        let unasked = self.unasked.as_deref().filter(|_| asked == VideoSampling::default());
        self.always.as_deref().or(unasked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn of(fields: Value, asked: VideoSampling) -> Option<String> {
        let files = FamilyFiles { video_preprocessor: fields, ..FamilyFiles::default() };
        VideoRefusal::read(&files, 126).unwrap().of(asked).map(str::to_owned)
    }

    #[test]
    fn videos_that_the_processor_reads_otherwise_are_refused() {
        let (nothing, few) = (VideoSampling::default(), VideoSampling { max_frames: Some(4), fps: None });
        let size = json!({"height": 126, "width": 126});
        let with = |field: &str, value: Value| {
            let mut fields = json!({"size": size});
            fields[field] = value;
            fields
        };
        assert_eq!(of(json!({"size": size}), nothing), None);
        assert_eq!(of(with("do_center_crop", Value::Null), nothing), None);
        let chosen = of(with("do_sample_frames", json!(true)), nothing).unwrap();
        assert!(
            chosen.contains("`do_sample_frames` of `video_preprocessor_config.json` is true"),
            "{chosen}"
        );
        assert_eq!(of(with("do_sample_frames", json!(true)), few), None);
        for (fields, expected) in [
            (with("do_resize", Value::Null), "`do_resize`"),
            (
                with("do_center_crop", json!(true)),
                "`crop_size.width` of `video_preprocessor_config.json` is missing",
            ),
            (json!({"size": {"shortest_edge": 126}}), "`size.width` of"),
            (json!({"fps": 1}), "is 384, the encoder reads frames of 126 pixels"),
        ] {
            let found = of(fields, few).unwrap();
            assert!(found.contains(expected), "{found}");
        }
    }
}
