//! Predictions of a model profile, for whoever compares them with measurements.

use crate::error::{Kind, artifact, map, raise};
use dflop_cost::{Prediction, RankMicrobatch, RankRole, RankSteps, Sharding, StageLayers};
use dflop_types::{Action, ActionKind, EncoderSegments, MicrobatchShape, ModelProfile, StageIndex};
use pyo3::prelude::*;
use std::path::PathBuf;

/// The cost model of a profile, frozen; see `_native/testing.pyi`.
#[pyclass(frozen, module = "dflop._native.testing")]
pub(crate) struct CostModel(dflop_cost::CostModel);

fn times(prediction: Prediction) -> (u64, u64, bool) {
    (prediction.forward_ns, prediction.backward_ns, prediction.extrapolated)
}

fn encoder_shape(segments: Vec<(u32, u32)>) -> MicrobatchShape {
    let encoder_segments =
        segments.into_iter().map(|(count, tokens)| EncoderSegments::of(count, tokens)).collect();
    MicrobatchShape { encoder_segments, ..MicrobatchShape::default() }
}

impl CostModel {
    /// Tensor bytes of a rank that runs the forward and backward of one microbatch, and what it holds in any case.
    fn peak(&self, role: RankRole, shape: MicrobatchShape, feature_tokens: u64) -> PyResult<(u64, u64)> {
        let stage = StageIndex(u32::from(matches!(role, RankRole::Stage(_))));
        let action = |kind| Action { stage, kind, microbatch: 0 };
        let steps = RankSteps {
            role,
            microbatches: &[RankMicrobatch { shape, feature_tokens }],
            actions: &[action(ActionKind::F), action(ActionKind::B)],
            openings: &[],
            copies_rows: false,
            sharding: Sharding::NONE,
        };
        let memory =
            self.0.rank_peak(&steps).map_err(|error| raise(Kind::Profile, &error.to_string(), None))?;
        let fixed = memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes;
        Ok((memory.tensor_bytes(), fixed))
    }
}

#[pymethods]
impl CostModel {
    #[staticmethod]
    fn read(path: PathBuf) -> PyResult<Self> {
        let profile: ModelProfile = dflop_types::artifact::read(&path).map_err(artifact)?;
        dflop_cost::CostModel::new(&profile).map(Self).map_err(map(Kind::Profile))
    }

    fn encoder(&self, segments: Vec<(u32, u32)>) -> (u64, u64, bool) {
        times(self.0.encoder(&encoder_shape(segments)))
    }

    fn llm_stage(
        &self,
        llm_tokens: Vec<u32>,
        label_tokens: u64,
        num_layers: u32,
        is_first: bool,
        is_last: bool,
    ) -> (u64, u64, bool) {
        let shape = MicrobatchShape { llm_tokens, label_tokens, ..MicrobatchShape::default() };
        times(self.0.llm_stage(&shape, num_layers, is_first, is_last))
    }

    fn encoder_peak_bytes(&self, segments: Vec<(u32, u32)>, feature_tokens: u64) -> PyResult<(u64, u64)> {
        self.peak(RankRole::Encoder, encoder_shape(segments), feature_tokens)
    }

    fn stage_peak_bytes(
        &self,
        llm_tokens: Vec<u32>,
        label_tokens: u64,
        feature_tokens: u64,
        layers: (u32, bool, bool),
    ) -> PyResult<(u64, u64)> {
        let (num_layers, is_first, is_last) = layers;
        let shape = MicrobatchShape { llm_tokens, label_tokens, ..MicrobatchShape::default() };
        let stage = StageLayers { num_layers, is_first, is_last };
        self.peak(RankRole::Stage(stage), shape, feature_tokens)
    }
}
