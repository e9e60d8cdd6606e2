//! The memory model against a plain simulation that allocates and frees named buffers, on random steps.

use crate::heap::Rank;
use crate::memory::{model, model_with, one, peak};
use dflop_cost::{Moment, RankMicrobatch, RankRole, RankSteps, Sharding, StageLayers, openings_ahead};
use dflop_types::{Action, ActionKind, EncoderSegments, StageIndex};
use proptest::prelude::*;

/// Any order in which each backward, whole or in two parts, follows its forward.
fn any_list(num_microbatches: u32, choices: &[u8]) -> Vec<Action> {
    let waiting: Vec<_> = (0..num_microbatches).map(|microbatch| (ActionKind::F, microbatch)).collect();
    // What may come next: all forwards, backwards of those, the W of what had its I.
    let mut next = [waiting, Vec::new(), Vec::new()];
    let mut actions = Vec::new();
    for choice in choices.iter().cycle() {
        let open: Vec<usize> = (0..3).filter(|&stack| !next[stack].is_empty()).collect();
        let Some(&stack) = open.get(usize::from(choice % 3) % open.len().max(1)) else { break };
        let at = usize::from(choice / 3) % next[stack].len();
        let (kind, microbatch) = next[stack].remove(at);
        actions.push(Action { stage: StageIndex(0), kind, microbatch });
        match kind {
            ActionKind::F if choice % 5 < 2 => next[1].push((ActionKind::B, microbatch)),
            ActionKind::F => next[1].push((ActionKind::I, microbatch)),
            ActionKind::I => next[2].push((ActionKind::W, microbatch)),
            ActionKind::B | ActionKind::W => {}
        }
    }
    actions
}

fn microbatch() -> impl Strategy<Value = RankMicrobatch> {
    (0u32..400, prop_oneof![1 => Just(0u64), 4 => 1u64..200], 0u64..300).prop_map(
        |(llm, labels, features)| {
            if llm == 0 { RankMicrobatch::default() } else { one(llm, labels, features) }
        },
    )
}

fn role() -> impl Strategy<Value = RankRole> {
    (0u32..4, any::<bool>(), any::<bool>()).prop_map(|(num_layers, is_first, is_last)| match num_layers {
        0 => RankRole::Encoder,
        _ => RankRole::Stage(StageLayers { num_layers, is_first, is_last }),
    })
}

proptest! {
    #[test]
    fn the_walk_is_a_heap_that_allocates_and_frees(
        role in role(), microbatches in prop::collection::vec(microbatch(), 1..8),
        choices in prop::collection::vec(any::<u8>(), 24), copies_rows: bool, is_cuda: bool, is_split_counted: bool,
        early in prop::collection::vec(0u32..24, 24)
    ) {
        let model = model_with(if is_cuda { "cuda" } else { "cpu" }, is_split_counted);
        let actions = any_list(microbatches.len() as u32, &choices);
        let openings: Vec<u32> = (0..actions.len() as u32).zip(early).map(|(at, early)| at.saturating_sub(early)).collect();
        let steps = RankSteps {
            role, microbatches: &microbatches, actions: &actions, openings: &openings, copies_rows, sharding: Sharding::NONE
        };
        let found = model.rank_peak(&steps).unwrap();
        let fixed = model.fixed_memory(role, 1);
        let rank = Rank { role, microbatches: &microbatches, copies: copies_rows, keeps: !is_cuda, is_split_counted };
        let most = rank.most(&actions, &openings);
        prop_assert_eq!(found.total_bytes(), fixed.static_bytes() + most.max(fixed.workspace_bytes));
        prop_assert_eq!(found.total_bytes(), found.by_use().iter().map(|of_use| of_use.1).sum::<u64>());
        // A lower bound: any one microbatch alone, its backward as in the list.
        for index in 0..microbatches.len() {
            let is_split = actions.iter().any(|a| a.microbatch as usize == index && a.kind == ActionKind::I);
            let alone = peak(
                &model, role, &microbatches[index..=index], if is_split { "F0 I0 W0" } else { "F0 B0" }
            );
            // Over NCCL what was sent is held until the next message goes, which may be a smaller one.
            let sent = if is_cuda { alone.boundary_bytes } else { 0 };
            prop_assert!(alone.total_bytes() <= found.total_bytes() + sent);
        }
    }

    #[test]
    fn a_sample_more_never_frees_anything(
        role in role(), microbatches in prop::collection::vec(microbatch(), 1..6), at in 0usize..6,
        extra in 1u32..400, choices in prop::collection::vec(any::<u8>(), 12)
    ) {
        let model = model("cpu");
        let actions = any_list(microbatches.len() as u32, &choices);
        let total = |microbatches: &[RankMicrobatch]| {
            let steps = RankSteps { role, microbatches, actions: &actions, openings: &openings_ahead(actions.len()), copies_rows: true, sharding: Sharding::NONE };
            model.rank_peak(&steps).unwrap().total_bytes()
        };
        let mut more = microbatches.clone();
        let index = at % more.len();
        let changed = &mut more[index];
        changed.shape.llm_tokens.push(extra);
        changed.shape.encoder_segments.push(EncoderSegments::of(1, extra));
        changed.shape.label_tokens += u64::from(extra / 3);
        changed.feature_tokens += u64::from(extra / 4);
        prop_assert!(total(&microbatches) <= total(&more));
    }

    #[test]
    fn a_later_w_frees_later(
        num_layers in 1u32..4, mut microbatches in prop::collection::vec(microbatch(), 1..6),
        choices in prop::collection::vec(any::<u8>(), 24), is_split_counted: bool, to in 0usize..18
    ) {
        // Text on a stage that is the whole backbone: a W among the next actions keeps no message from being open.
        let role = RankRole::Stage(StageLayers { num_layers, is_first: true, is_last: true });
        for microbatch in &mut microbatches {
            microbatch.feature_tokens = 0;
        }
        let model = model_with("cuda", is_split_counted);
        let actions = any_list(microbatches.len() as u32, &choices);
        let Some(from) = actions.iter().position(|action| action.kind == ActionKind::W) else { return Ok(()) };
        let mut late = actions.clone();
        let moved = late.remove(from);
        late.insert(to.clamp(from, late.len()), moved);
        let total = |actions: &[Action]| {
            let steps = RankSteps { role, microbatches: &microbatches, actions, openings: &openings_ahead(actions.len()), copies_rows: false, sharding: Sharding::NONE };
            model.rank_peak(&steps).unwrap()
        };
        let early = total(&actions);
        // What W itself takes for a while may come at a better time.
        if early.moment != Moment::Action(moved) {
            prop_assert!(early.total_bytes() <= total(&late).total_bytes());
        }
    }
}
