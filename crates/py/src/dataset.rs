//! The samples of a data profile, as tokens and media.

use crate::error::{Kind, artifact, map, raise};
use dflop_data::conversation::Conversation;
use dflop_data::family::{self, Clip, FamilyFiles, Marks, Piece, Size, Sound, VideoSampling};
use dflop_data::location::{Location, MediaPlace};
use dflop_data::probe::MediaKind;
use dflop_data::profile::ProfileSettings;
use dflop_data::records::{self, Record};
use dflop_data::store::Stores;
use dflop_data::tokens::ChatTokenizer;
use dflop_data::{DataError, table};
use dflop_types::SampleIndex;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::path::PathBuf;

/// One image or video of a sample; see `_native/__init__.pyi`.
#[pyclass(frozen, module = "dflop._native")]
pub(crate) struct Media {
    place: MediaPlace,
    stores: Stores,
    #[pyo3(get)]
    kind: &'static str,
    #[pyo3(get)]
    frame_indices: Vec<u32>,
    #[pyo3(get)]
    num_tiles: u32,
    #[pyo3(get)]
    height: u32,
    #[pyo3(get)]
    width: u32,
    #[pyo3(get)]
    num_features: u32,
    /// (count, tiles, features) of each group of equal parts.
    #[pyo3(get)]
    parts: Vec<(u32, u32, u32)>,
    #[pyo3(get)]
    patches: Option<(u32, u32)>,
    #[pyo3(get)]
    first_patches: Option<(u32, u32)>,
    #[pyo3(get)]
    last_patches: Option<(u32, u32)>,
    #[pyo3(get)]
    last_segment_tokens: u32,
    #[pyo3(get)]
    sampled_fps: Option<f64>,
}

#[pymethods]
impl Media {
    #[getter]
    fn path(&self) -> String {
        // Not a `Path`: Python's would fold the two slashes of a URL.
        self.place.to_string()
    }

    #[getter]
    const fn is_local(&self) -> bool {
        matches!(self.place, MediaPlace::Whole(Location::Local(_)))
    }

    #[getter]
    fn held_bytes(&self) -> usize {
        match &self.place {
            MediaPlace::Bytes { bytes, .. } => bytes.len(),
            MediaPlace::Whole(_) | MediaPlace::Range { .. } => 0,
        }
    }

    fn read<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| self.stores.read_media(&self.place)).map_err(map(Kind::Profile))?;
        Ok(PyBytes::new(py, &bytes))
    }
}

/// A sample as tokens; see `_native/__init__.pyi`.
#[pyclass(frozen, get_all, module = "dflop._native")]
pub(crate) struct EncodedSample {
    id: String,
    input_ids: Vec<u32>,
    feature_mask: Vec<bool>,
    labels: Vec<i64>,
    media: Vec<Py<Media>>,
    notice: Option<String>,
}

/// The samples of a data profile; see `_native/__init__.pyi`.
#[pyclass(frozen, module = "dflop._native")]
pub(crate) struct Dataset(dflop_data::dataset::Dataset);

#[pymethods]
impl Dataset {
    #[new]
    #[pyo3(signature = (config_path, data_profile_path, family = None, *, evaluation = false))]
    fn new(
        py: Python<'_>,
        config_path: PathBuf,
        data_profile_path: PathBuf,
        family: Option<Bound<'_, PyAny>>,
        evaluation: bool,
    ) -> PyResult<Self> {
        let config = dflop_cli::config::load_data(&config_path).map_err(map(Kind::Profile))?;
        let directory = config.model.family_directory(&config.directory);
        let family = crate::family::find(py, family, config.model.family.as_deref(), directory)?;
        let settings = if evaluation {
            config.evaluation_settings().map_err(|rule| raise(Kind::Profile, &rule, None))?
        } else {
            config.profile_settings()
        };
        let settings = ProfileSettings { family, ..settings };
        let profile = py.detach(|| table::read(&data_profile_path)).map_err(artifact)?;
        py.detach(|| dflop_data::dataset::Dataset::open(&settings, profile))
            .map(Self)
            .map_err(map(Kind::Profile))
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn encode(&self, py: Python<'_>, sample: u32) -> PyResult<EncodedSample> {
        self.profiled(sample)?;
        let encoded = py.detach(|| self.0.encode(SampleIndex(sample))).map_err(|error| {
            let is_of_sample = matches!(error, DataError::TurnedBad { .. });
            let error = map(Kind::Profile)(error);
            // An attribute that cannot be set changes only what a policy for bad samples makes of it.
            let _ = error.value(py).setattr("is_of_sample", is_of_sample);
            error
        })?;
        let media = encoded.media.into_iter().map(|medium| {
            Py::new(
                py,
                Media {
                    // Before its place is taken apart.
                    kind: medium.use_name(),
                    sampled_fps: medium.sampled_fps(),
                    place: medium.place.alone(),
                    stores: self.0.stores().clone(),
                    num_tiles: medium.shape.num_tiles,
                    height: medium.height,
                    width: medium.width,
                    num_features: medium.shape.feature_tokens(),
                    parts: parts(&medium.shape),
                    patches: medium.shape.patches,
                    first_patches: medium.shape.first_patches,
                    last_patches: medium.shape.last_patches,
                    last_segment_tokens: medium.shape.segments.last().map_or(0, |group| group.tokens),
                    frame_indices: medium.shape.frame_indices,
                },
            )
        });
        Ok(EncodedSample {
            id: encoded.id,
            input_ids: encoded.input_ids,
            feature_mask: encoded.feature_mask,
            labels: encoded.labels,
            media: media.collect::<PyResult<_>>()?,
            notice: encoded.notice,
        })
    }

    fn messages(&self, py: Python<'_>, sample: u32) -> PyResult<String> {
        self.profiled(sample)?;
        py.detach(|| self.0.messages(SampleIndex(sample))).map_err(map(Kind::Profile))
    }

    fn kind(&self, sample: u32) -> PyResult<String> {
        Ok(self.profiled(sample)?.kind.to_string())
    }

    fn source(&self, sample: u32) -> PyResult<String> {
        let source = self.profiled(sample)?.source as usize;
        // A profile is checked when it is read: each sample's source is there.
        Ok(self.0.profile().sources.get(source).cloned().unwrap_or_default())
    }

    fn shape(&self, sample: u32) -> PyResult<(u64, u32, u32)> {
        let shape = &self.profiled(sample)?.shape;
        Ok((shape.encoder_tokens(), shape.llm_tokens, shape.label_tokens))
    }

    fn giants(&self, llm_tokens_max: u64) -> Vec<u32> {
        let shapes = self.0.profile().samples.iter().map(|sample| &sample.shape);
        dflop_step::giants(shapes, llm_tokens_max).map(|(sample, _)| sample.0).collect()
    }

    fn digest(&self, samples: Vec<u32>) -> String {
        let samples: Vec<SampleIndex> = samples.into_iter().map(SampleIndex).collect();
        self.0.profile().digest(&samples)
    }
}

impl Dataset {
    pub(crate) fn profiled(&self, sample: u32) -> PyResult<&dflop_types::ProfiledSample> {
        let samples = &self.0.profile().samples;
        samples.get(sample as usize).ok_or_else(|| {
            let message =
                format!("sample {sample} is not in the data profile: it has {} samples", samples.len());
            raise(Kind::Profile, &message, None)
        })
    }
}

/// (count, segments, features) of each group of equal parts of a medium.
fn parts(shape: &family::MediaShape) -> Vec<(u32, u32, u32)> {
    shape.encoder_parts().iter().map(|p| (p.count, p.segments, p.feature_tokens)).collect()
}

/// Index, encoder and LLM tokens.
type RecordSizes = (u64, u64, u32);

/// [`RecordSizes`] of each good sample, and how many are bad; see `_native/__init__.pyi`.
#[pyfunction]
pub(crate) fn profile_shapes(
    py: Python<'_>,
    data_profile_path: PathBuf,
) -> PyResult<(Vec<RecordSizes>, u64)> {
    let found = py.detach(|| records::read(&data_profile_path)).map_err(|error| match error {
        DataError::Artifact(error) => artifact(error),
        error => map(Kind::Artifact)(error),
    })?;
    let sizes = |r: &Record| (r.index, r.shape.encoder_tokens(), r.shape.llm_tokens);
    Ok((found.good.iter().map(sizes).collect(), found.num_bad))
}

/// Conversations as tokens, by the tokenizer and the chat template of a model directory; see `_native/__init__.pyi`.
#[pyfunction]
pub(crate) fn encode_conversations(
    py: Python<'_>,
    model_dir: PathBuf,
    marks: Vec<(String, String, String)>,
    samples: Vec<(String, Vec<Pieces>)>,
) -> PyResult<Vec<TokenLists>> {
    py.detach(|| {
        let mut of_kinds = [None, None, None];
        for (kind, placeholder, feature_token) in marks {
            let known = MediaKind::parse(&kind).ok_or_else(|| {
                let message = format!("kind `{kind}`, must be one of: image, video, audio");
                raise(Kind::Profile, &message, None)
            })?;
            of_kinds[known.index()] =
                Some(Marks { placeholder, feature_token, id_fields: &[], number: None });
        }
        let tokenizer = ChatTokenizer::of_model(&model_dir, of_kinds).map_err(map(Kind::Profile))?;
        samples.iter().map(|(record, shapes)| encode_one(&tokenizer, record, shapes)).collect()
    })
}

/// Input ids, feature mask and labels.
type TokenLists = (Vec<u32>, Vec<bool>, Vec<i64>);

/// What takes the place of one medium: a text, or a number of features.
type Pieces = Vec<(Option<String>, u32)>;

fn encode_one(tokenizer: &ChatTokenizer, record: &str, shapes: &[Pieces]) -> PyResult<TokenLists> {
    let refuse = |message: String| raise(Kind::Profile, &message, None);
    let record = serde_json::from_str(record).map_err(|error| refuse(format!("it is not JSON: {error}")))?;
    let conversation = Conversation::parse(&record).map_err(refuse)?;
    if conversation.media.len() != shapes.len() {
        return Err(refuse(format!("{} media, but {} shapes", conversation.media.len(), shapes.len())));
    }
    let piece = |(text, count): &(Option<String>, u32)| match text {
        Some(text) => Piece::Text(text.clone()),
        None => Piece::Features(*count),
    };
    let shapes: Vec<_> = shapes
        .iter()
        .map(|pieces| dflop_data::family::MediaShape {
            num_tiles: 1,
            segments: Vec::new(),
            pieces: pieces.iter().map(piece).collect(),
            frame_indices: Vec::new(),
            parts: Vec::new(),
            patches: None,
            first_patches: None,
            last_patches: None,
        })
        .collect();
    let tokens = tokenizer
        .tokenize(&conversation, &shapes.iter().collect::<Vec<_>>())
        .map_err(|fault| refuse(fault.cause))?
        .expand();
    Ok((tokens.input_ids, tokens.feature_mask, tokens.labels))
}

/// What one medium costs, by the files of a model directory; see `_native/__init__.pyi`.
#[pyfunction]
#[pyo3(signature = (config_json, preprocessor_json, video_preprocessor_json, kind, height = 0, width = 0, num_images = 1, num_frames = 0, fps = None, duration_s = None, sample_rate = 0, max_frames = None, sample_fps = None))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn media_shape(
    config_json: &str,
    preprocessor_json: &str,
    video_preprocessor_json: &str,
    kind: &str,
    height: u32,
    width: u32,
    num_images: usize,
    num_frames: u64,
    fps: Option<f64>,
    duration_s: Option<f64>,
    sample_rate: u32,
    max_frames: Option<u32>,
    sample_fps: Option<f64>,
) -> PyResult<MediaShape> {
    let json = |name: &str, text: &str| {
        serde_json::from_str::<serde_json::Value>(text)
            .map_err(|error| raise(Kind::Profile, &format!("`{name}` is not JSON: {error}"), None))
    };
    let files = FamilyFiles {
        config: json("config_json", config_json)?,
        preprocessor: json("preprocessor_json", preprocessor_json)?,
        video_preprocessor: json("video_preprocessor_json", video_preprocessor_json)?,
        ..FamilyFiles::default()
    };
    let rule = family::open(&files).map_err(map(Kind::Profile))?.ok_or_else(|| {
        let message = format!("`model_type` of `config_json` must be one of: {}", family::known().join(", "));
        raise(Kind::Profile, &message, None)
    })?;
    let size = Size { height, width };
    match kind {
        "image" => rule.image(size, num_images),
        "video" => rule.video(
            &Clip { size, num_frames, fps, duration_s },
            VideoSampling { max_frames, fps: sample_fps },
        ),
        "audio" => rule.audio(&Sound { duration_s: duration_s.unwrap_or(0.0), sample_rate }),
        _ => {
            let message = format!("kind `{kind}`, must be one of: image, video, audio");
            return Err(raise(Kind::Profile, &message, None));
        }
    }
    .map(|shape| MediaShape {
        num_tiles: shape.num_tiles,
        segments: shape.segments.iter().map(|s| (s.count, s.tokens)).collect(),
        feature_tokens: shape.feature_tokens(),
        pieces: shape
            .pieces
            .iter()
            .map(|piece| match piece {
                Piece::Text(text) => (Some(text.clone()), 0),
                Piece::Features(count) => (None, *count),
            })
            .collect(),
        parts: parts(&shape),
        patches: shape.patches,
        first_patches: shape.first_patches,
        last_patches: shape.last_patches,
        frame_indices: shape.frame_indices,
    })
    .map_err(map(Kind::Profile))
}

/// What one medium costs; see `_native/__init__.pyi`.
#[pyclass(frozen, get_all, module = "dflop._native.testing")]
pub(crate) struct MediaShape {
    num_tiles: u32,
    segments: Vec<(u32, u32)>,
    feature_tokens: u32,
    pieces: Vec<(Option<String>, u32)>,
    frame_indices: Vec<u32>,
    parts: Vec<(u32, u32, u32)>,
    patches: Option<(u32, u32)>,
    first_patches: Option<(u32, u32)>,
    last_patches: Option<(u32, u32)>,
}
