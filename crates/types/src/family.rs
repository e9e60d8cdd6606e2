//! The model families that dflop knows, and what it can do with each: one list that every part reads or is tested
//! against.

/// What dflop can do with a model family.
///
/// A family is named by the `model_type` of a model's `config.json`.
// Independent answers to as many questions: no state machine hides in them.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FamilyRecord {
    /// Its `model_type`, for example `llava_onevision`.
    pub model_type: &'static str,
    /// Kinds of media that its models read.
    pub media: &'static [&'static str],
    /// Whether `dflop profile data` knows what a sample costs (`crates/data`).
    pub has_shapes: bool,
    /// Whether `dflop profile model --estimate` can count its work without a device (the analytic model).
    pub has_estimate: bool,
    /// Whether `dflop profile model` can measure it on a device (`python/dflop/profiling/families`).
    pub has_pieces: bool,
    /// Whether `dflop train` can train it (`python/dflop/models`).
    pub has_adapter: bool,
    /// Whether `balance_encoder` shares out its encoder's work in other trainers (`python/dflop/integrations`).
    pub has_shared_encoder: bool,
}

impl FamilyRecord {
    /// The answers by the name of their column, in the order of a sample's way, other trainers last: what `dflop models` prints.
    pub const fn abilities(&self) -> [(&'static str, bool); 5] {
        [
            ("data", self.has_shapes),
            ("estimate", self.has_estimate),
            ("measure", self.has_pieces),
            ("train", self.has_adapter),
            ("share", self.has_shared_encoder),
        ]
    }
}

const PICTURES: &[&str] = &["image", "video"];

/// Every family that some part of dflop knows, by name.
///
/// A family is added here first; the tests of `data`, `analytic` and of the two Python packages then fail until each does
/// what its answer says.
pub const FAMILIES: [FamilyRecord; 29] = {
    const fn record(
        model_type: &'static str,
        media: &'static [&'static str],
        [has_shapes, has_estimate, has_pieces, has_adapter, has_shared_encoder]: [bool; 5],
    ) -> FamilyRecord {
        FamilyRecord {
            model_type,
            media,
            has_shapes,
            has_estimate,
            has_pieces,
            has_adapter,
            has_shared_encoder,
        }
    }
    const YES: bool = true;
    const NO: bool = false;
    //                                     data estimate measure train share
    [
        record("audioflamingo3", &["audio"], [YES, YES, YES, YES, YES]),
        record("gemma3", &["image"], [YES, YES, YES, YES, YES]),
        // Small models hear, and these are not trained.
        record("gemma4", &["image", "video", "audio"], [YES, YES, YES, YES, YES]),
        record("glm46v", PICTURES, [YES, YES, YES, YES, YES]),
        record("glm4v", PICTURES, [YES, YES, YES, YES, YES]),
        record("glm4v_moe", PICTURES, [YES, YES, YES, YES, YES]),
        record("glm_ocr", PICTURES, [YES, YES, YES, YES, YES]),
        record("idefics3", &["image"], [YES, YES, YES, YES, YES]),
        record("internvl", PICTURES, [YES, YES, YES, YES, YES]),
        record("internvl_chat", PICTURES, [NO, YES, NO, NO, NO]),
        record("lfm2_vl", &["image"], [YES, YES, YES, YES, YES]),
        record("lighton_ocr", &["image"], [YES, YES, YES, YES, YES]),
        record("llava", &["image"], [YES, YES, YES, YES, YES]),
        record("llava_next", &["image"], [YES, YES, YES, YES, YES]),
        record("llava_onevision", PICTURES, [YES, YES, YES, YES, YES]),
        record("minicpmv4_6", &["image"], [YES, YES, YES, YES, YES]),
        record("mistral3", &["image"], [YES, YES, YES, YES, YES]),
        record("paddleocr_vl", &["image"], [YES, YES, YES, YES, YES]),
        record("qwen2_5_omni", &["image", "video", "audio"], [YES, YES, YES, YES, YES]),
        record("qwen2_5_vl", PICTURES, [YES, YES, YES, YES, YES]),
        record("qwen2_audio", &["audio"], [YES, YES, YES, YES, YES]),
        record("qwen2_vl", PICTURES, [YES, YES, YES, YES, YES]),
        record("qwen3_5", PICTURES, [YES, YES, YES, YES, YES]),
        record("qwen3_5_moe", PICTURES, [YES, YES, YES, YES, YES]),
        record("qwen3_omni_moe", &["image", "video", "audio"], [YES, YES, YES, YES, YES]),
        record("qwen3_vl", PICTURES, [YES, YES, YES, YES, YES]),
        record("qwen3_vl_moe", PICTURES, [YES, YES, YES, YES, YES]),
        record("smolvlm", PICTURES, [YES, YES, YES, YES, YES]),
        record("voxtral", &["audio"], [YES, YES, YES, YES, YES]),
    ]
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_stand_once_by_name_and_can_do_something() {
        assert!(FAMILIES.windows(2).all(|pair| pair[0].model_type < pair[1].model_type));
        for family in FAMILIES {
            assert!(family.abilities().iter().any(|(_, can)| *can), "{}", family.model_type);
            // Who trains a family has measured it, and who measures it has shapes to measure at.
            assert!(!family.has_adapter || family.has_pieces && family.has_estimate, "{}", family.model_type);
            assert!(!family.has_pieces || family.has_shapes, "{}", family.model_type);
        }
    }
}
