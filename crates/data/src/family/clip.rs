//! CLIP and SigLIP as `config.json` of LLaVA and LLaVA-NeXT describes them.

use super::Marks;
use super::fields::Fields;
use crate::DataError;
use crate::media::MediaKind;
use serde_json::Value;

/// `model_type` of the encoders.
pub(super) const ENCODERS: [&str; 2] = ["clip_vision_model", "siglip_vision_model"];

/// Sides of a tile and of a patch, in pixels.
pub(super) fn encoder_sides(config: &Fields<'_>) -> Result<(u32, u32), DataError> {
    // No vision configuration is that of CLIP-L 336/14; one without sizes has those of its own model's base.
    let default = if config.get("vision_config").is_none() {
        (336, 14)
    } else if is_siglip(config) {
        (224, 16)
    } else {
        (224, 32)
    };
    let image_size = config.side("vision_config.image_size")?.unwrap_or(default.0);
    let patch_size = config.side("vision_config.patch_size")?.unwrap_or(default.1);
    if patch_size > image_size {
        let rule = format!("larger than the image size {image_size}");
        return Err(config.error("vision_config.patch_size", rule));
    }
    Ok((image_size, patch_size))
}

/// Whether the encoder is SigLIP; where nothing says so it is CLIP.
pub(super) fn is_siglip(config: &Fields<'_>) -> bool {
    config.get("vision_config.model_type").is_some_and(|name| name == "siglip_vision_model")
}

/// How an image stands in the text of a LLaVA.
pub(super) fn image_marks(kind: MediaKind) -> Option<Marks> {
    (kind == MediaKind::Image).then(|| Marks {
        placeholder: "<image>".to_owned(),
        feature_token: "<image>".to_owned(),
        id_fields: &["image_token_index", "image_token_id"],
        number: None,
    })
}

/// `Ok` if the processor counts patches and class tokens as the encoder has them. `default_patch`: what it takes if it does not
/// say the size of a patch.
pub(super) fn counts_must_be(
    processor: &Fields<'_>,
    patch_size: u32,
    default_patch: Option<u64>,
    num_class_tokens: u32,
) -> Result<(), DataError> {
    let fields = [
        ("patch_size", default_patch, patch_size),
        ("num_additional_image_tokens", Some(0), num_class_tokens),
    ];
    for (field, default, expected) in fields {
        if processor.get(field).map_or(default, Value::as_u64) != Some(u64::from(expected)) {
            return Err(processor.error(field, format!("must be {expected}, as the encoder has it")));
        }
    }
    Ok(())
}
