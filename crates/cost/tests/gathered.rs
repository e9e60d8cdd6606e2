//! What is whole for a while where parameters are cut (zero 3), against closed forms.

use crate::memory::{list, one, profile};
use dflop_cost::{CostModel, RankRole, RankSteps, Sharding, StageLayers};
use dflop_types::ModelProfile;

/// Under ZeRO-3 a head is whole while it runs; behind it its gradient exists twice, and then one copy beside the layers.
#[test]
fn a_large_head_is_whole_while_it_runs() {
    let whole = RankRole::Stage(StageLayers { num_layers: 7, is_first: true, is_last: true });
    let mut profile = profile();
    let bytes = |profile: &ModelProfile, name: &str| 4 * profile.modules[name].num_parameters;
    let layer = bytes(&profile, "llm_layer");
    let head = profile.modules.get_mut("llm_head").expect("it is there");
    (head.num_parameters, head.parameter_bytes) = (10 * layer / 4, 10 * layer);
    let model = CostModel::new(&profile).expect("the profile is sound");
    let sharding = Sharding::whole(dflop_types::Zero::Parameters, 4);
    let of = |tokens, labels, sharding| {
        let actions = list("F0 B0");
        let steps = RankSteps {
            role: whole,
            microbatches: &[one(tokens, labels, 0)],
            actions: &actions,
            openings: &[],
            copies_rows: false,
            sharding,
        };
        model.rank_peak(&steps).expect("the list runs")
    };
    let gathered = 2 * layer + layer + 10 * layer;
    // With many labels the head is the fullest moment, and whole for less than what is counted all the time.
    let (alone, cut) = (of(9_000, 9_000, Sharding::NONE), of(9_000, 9_000, sharding));
    assert_eq!((cut.gathered_bytes, cut.workspace_bytes), (gathered, alone.workspace_bytes));
    // With one label layers are: behind the head is only its gradient.
    let (alone, cut) = (of(9_000, 1, Sharding::NONE), of(9_000, 1, sharding));
    assert_eq!((cut.gathered_bytes, cut.workspace_bytes), (gathered, alone.workspace_bytes));
    // With one token nothing but the sum of the head's gradient is.
    let cut = of(1, 1, sharding);
    let summing = 2 * 10 * layer + layer;
    assert_eq!((cut.workspace_bytes, cut.moment.to_string()), (summing - gathered, "0B0".to_owned()));
    assert_eq!(cut.logits_bytes, 0);
}
