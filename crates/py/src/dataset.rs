//! The samples of a data profile, as tokens and media.

use crate::error::{Kind, artifact, map, raise};
use dflop_data::family::{LlavaOnevision, MediaShape};
use dflop_types::{DataProfile, SampleIndex};
use pyo3::prelude::*;
use std::path::PathBuf;

/// One image or video of a sample; see `_native.pyi`.
#[pyclass(frozen, get_all, module = "dflop._native")]
pub(crate) struct Media {
    path: PathBuf,
    kind: &'static str,
    frame_indices: Vec<u32>,
    num_tiles: u32,
    height: u32,
    width: u32,
    num_features: u32,
}

/// A sample as tokens; see `_native.pyi`.
#[pyclass(frozen, get_all, module = "dflop._native")]
pub(crate) struct EncodedSample {
    id: String,
    input_ids: Vec<u32>,
    feature_mask: Vec<bool>,
    labels: Vec<i64>,
    media: Vec<Py<Media>>,
}

/// The samples of a data profile; see `_native.pyi`.
#[pyclass(frozen, module = "dflop._native")]
pub(crate) struct Dataset(dflop_data::dataset::Dataset);

#[pymethods]
impl Dataset {
    #[new]
    fn new(py: Python<'_>, config_path: PathBuf, data_profile_path: PathBuf) -> PyResult<Self> {
        let config = dflop_cli::config::load(&config_path).map_err(map(Kind::Profile))?;
        let profile: DataProfile = dflop_types::artifact::read(&data_profile_path).map_err(artifact)?;
        py.detach(|| dflop_data::dataset::Dataset::open(&config.profile_settings(), profile))
            .map(Self)
            .map_err(map(Kind::Profile))
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn encode(&self, py: Python<'_>, sample: u32) -> PyResult<EncodedSample> {
        self.profiled(sample)?;
        let encoded = py.detach(|| self.0.encode(SampleIndex(sample))).map_err(map(Kind::Profile))?;
        let media = encoded.media.into_iter().map(|medium| {
            Py::new(
                py,
                Media {
                    path: medium.path,
                    kind: medium.kind.name(),
                    frame_indices: medium.frame_indices,
                    num_tiles: medium.num_tiles,
                    height: medium.height,
                    width: medium.width,
                    num_features: medium.num_features,
                },
            )
        });
        Ok(EncodedSample {
            id: encoded.id,
            input_ids: encoded.input_ids,
            feature_mask: encoded.feature_mask,
            labels: encoded.labels,
            media: media.collect::<PyResult<_>>()?,
        })
    }

    fn kind(&self, sample: u32) -> PyResult<String> {
        Ok(self.profiled(sample)?.kind.to_string())
    }

    fn shape(&self, sample: u32) -> PyResult<(u64, u32, u32)> {
        let shape = &self.profiled(sample)?.shape;
        Ok((shape.encoder_tokens(), shape.llm_tokens, shape.label_tokens))
    }

    fn digest(&self, samples: Vec<u32>) -> String {
        let samples: Vec<SampleIndex> = samples.into_iter().map(SampleIndex).collect();
        self.0.profile().digest(&samples)
    }
}

impl Dataset {
    fn profiled(&self, sample: u32) -> PyResult<&dflop_types::ProfiledSample> {
        let samples = &self.0.profile().samples;
        samples.get(sample as usize).ok_or_else(|| {
            let message =
                format!("sample {sample} is not in the data profile: it has {} samples", samples.len());
            raise(Kind::Profile, &message, None)
        })
    }
}

/// Tiles, encoder tokens and feature tokens of one medium; see `_native.pyi`.
#[pyfunction]
pub(crate) fn llava_onevision_shape(
    config_json: &str,
    preprocessor_json: &str,
    kind: &str,
    height: u32,
    width: u32,
    num_frames: u32,
) -> PyResult<(u32, u64, u32)> {
    let json = |name: &str, text: &str| {
        serde_json::from_str::<serde_json::Value>(text)
            .map_err(|error| raise(Kind::Profile, &format!("`{name}` is not JSON: {error}"), None))
    };
    let rule = LlavaOnevision::from_config(
        &json("config_json", config_json)?,
        &json("preprocessor_json", preprocessor_json)?,
    )
    .map_err(map(Kind::Profile))?;
    let shape: MediaShape = match kind {
        "image" => rule.image(height, width),
        "multi_image" => rule.image_among_several(height, width),
        "video" => rule.video(num_frames),
        _ => {
            let message = format!("kind `{kind}`, must be one of: image, multi_image, video");
            return Err(raise(Kind::Profile, &message, None));
        }
    }
    .map_err(map(Kind::Profile))?;
    Ok((
        shape.num_tiles,
        u64::from(shape.segments.count) * u64::from(shape.segments.tokens),
        shape.feature_tokens,
    ))
}
