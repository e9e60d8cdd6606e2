//! What the tests of this crate ask of a search unless they say otherwise.

use crate::fixture;
use dflop_plan::{Objective, SearchEffort, SearchInput};
use dflop_step::GiantRule;
use dflop_types::{MadeFrom, ModelProfile, PipelineOrder, SampleShape, Trained};

/// A whole search over pipelines, on four global batches of 32 samples.
pub(crate) fn input<'a>(
    shapes: &[SampleShape],
    model_profile: &'a ModelProfile,
    num_ranks: u32,
) -> SearchInput<'a> {
    SearchInput {
        shapes: shapes.into(),
        model_profile,
        cluster: fixture::cluster(num_ranks, None),
        global_batch_size: 32,
        num_microbatches: None,
        giants: GiantRule::default(),
        bucket_tokens_max: None,
        order: Some(PipelineOrder::OneFOneB),
        objective: Objective::Mean,
        trained: Trained::default(),
        num_steps: 0,
        num_sampled_batches: 4,
        only: "colocated=false".parse().expect("it is a part of a plan"),
        compares: false,
        effort: SearchEffort::Whole,
        halt: &|| false,
        seed: 11,
        made_from: MadeFrom::from([("data_profile".to_owned(), "sha256:0".to_owned())]),
        progress: &|_, _| {},
    }
}
