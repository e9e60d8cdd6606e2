use super::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn ranks_and_coordinates_are_inverse(
        e_dp in 1u32..5, l_dp in 1u32..5, e_pp in 1u32..4, l_pp in 1u32..5, e_tp in 1u32..5, l_tp in 1u32..5,
        chunks in 1u32..4
    ) {
        let apart = Layout::disaggregated(
            ComponentLayout { tp: e_tp, pp: e_pp, dp: e_dp },
            ComponentLayout { tp: l_tp, pp: l_pp, dp: l_dp },
        );
        let one = ComponentLayout { tp: l_tp, pp: 1, dp: e_dp };
        let colocated = Layout { encoder: one, llm: one, ..Layout::colocated(e_dp, Zero::Parameters) };
        let interleaved = Layout { llm_interleave: chunks, ..apart };
        let other = |layout| Layout { rank_order: RankOrder::TpDpPp, ..layout };
        for layout in [apart, colocated, interleaved, other(apart), other(interleaved)] {
            let (mut held, mut rows) = (0, std::collections::BTreeSet::new());
            let mut groups = Vec::new();
            for rank in (0..layout.num_ranks()).map(Rank) {
                let at = layout.coordinates(rank).unwrap();
                prop_assert_eq!(layout.stages(rank).next(), Some(at.stage));
                let group = layout.group(rank).unwrap();
                prop_assert_eq!(layout.ranks_of_group(group).nth(at.tensor as usize), Some(rank));
                prop_assert_eq!(layout.by_group().coordinates(group).unwrap(), Coordinates { tensor: 0, ..at });
                groups.push(group.0);
                for stage in layout.stages(rank) {
                    prop_assert_eq!(layout.rank(at.replica, stage).0 + at.tensor, rank.0);
                    prop_assert!(at.tensor < layout.tensor_degree(stage));
                    rows.insert(layout.row(at.replica, stage));
                    held += u32::from(at.tensor == 0);
                }
            }
            // Groups lie side by side, and each is there.
            prop_assert!(groups.is_sorted());
            groups.dedup();
            prop_assert!(groups.into_iter().eq(0..layout.by_group().num_ranks()));
            // Each stage of each replica stands on one rank.
            let of_llm = layout.llm.pp * layout.llm_interleave * layout.llm.dp;
            prop_assert_eq!(held, layout.encoder.pp * layout.encoder.dp + of_llm);
            prop_assert_eq!(held, layout.num_rows());
            prop_assert!(rows.into_iter().eq(0..held as usize));
            prop_assert_eq!(layout.coordinates(Rank(layout.num_ranks())), None);
            prop_assert_eq!(layout.stages(Rank(layout.num_ranks())).count(), 0);
        }
    }
}

/// Two groups of four ranks that share the LLM's layers, each rank with the whole encoder: encoder replica r stands on rank r.
#[test]
fn each_rank_of_a_group_may_hold_an_encoder() {
    let degrees = |tp, dp| ComponentLayout { tp, pp: 1, dp };
    let layout = Layout { encoder: degrees(1, 8), llm: degrees(4, 2), ..Layout::colocated(1, Zero::States) };
    let mut problems = Vec::new();
    layout.check("layout", &mut problems);
    assert_eq!(problems, Vec::<String>::new());
    assert_eq!((layout.num_ranks(), layout.encoders_per_group(), layout.num_rows()), (8, 4, 4));
    assert_eq!(layout.by_group(), Layout::colocated(2, Zero::States));
    assert_eq!(layout.to_string(), "colocated encoder tp 1 dp 8, llm tp 4 dp 2, zero 1");
    let [encoder, llm] = [0, 1].map(StageIndex);
    assert_eq!((layout.tensor_degree(encoder), layout.tensor_degree(llm)), (1, 4));
    for rank in (0..8).map(Rank) {
        let at = layout.coordinates(rank).unwrap();
        assert_eq!((at.component, at.replica, at.tensor), (Component::Both, rank.0 / 4, rank.0 % 4));
        assert_eq!(layout.encoder_replica(rank), Some(rank.0));
        assert_eq!(layout.rank(rank.0, encoder), rank);
        assert_eq!(layout.rank(at.replica, llm).0 + at.tensor, rank.0);
        assert_eq!(layout.group(rank), Some(Rank(rank.0 / 4)));
        assert!(layout.ranks_of_group(Rank(rank.0 / 4)).any(|other| other == rank));
    }
    assert_eq!(layout.encoder_replica(Rank(8)), None);
    // Shards of the encoder are cut over all ranks, those of the LLM over its groups.
    assert_eq!([Component::Encoder, Component::Llm].map(|of| layout.shard_degree(of)), [8, 2]);
    assert_eq!([Component::Encoder, Component::Llm].map(|of| layout.replica_stride(of)), [1, 4]);
    // An encoder that is cut otherwise than the LLM, or has another number of ranks, is no such layout.
    for encoder in [degrees(2, 4), degrees(1, 4), degrees(4, 4)] {
        let other = Layout { encoder, ..layout };
        let mut problems = Vec::new();
        other.check("layout", &mut problems);
        assert_eq!(problems.len(), 1, "{other}");
        assert!(problems[0].contains("or the encoder tp 1 with a replica on each rank"), "{problems:?}");
        assert_eq!(other.encoders_per_group(), 1);
    }
    let cut = Layout { encoder: layout.llm, ..layout };
    assert_eq!((cut.encoders_per_group(), cut.encoder_replica(Rank(5))), (1, Some(1)));
    let apart = Layout::disaggregated(degrees(2, 2), degrees(4, 1));
    assert_eq!([3, 4].map(|rank| apart.encoder_replica(Rank(rank))), [Some(1), None]);
}

/// What older files hold is read as before, and the fields that say nothing new are left out.
#[test]
fn only_what_differs_from_a_plain_pipeline_is_written() {
    let degrees = |dp| ComponentLayout { tp: 1, pp: 1, dp };
    let plain = Layout::disaggregated(degrees(2), degrees(3));
    let text = serde_json::to_string(&plain).unwrap();
    assert!(
        !text.contains("placement")
            && !text.contains("zero")
            && !text.contains("shard_ranks")
            && !text.contains("cut")
            && !text.contains("interleave"),
        "{text}"
    );
    let hybrid = Layout { shard_ranks: Some(4), ..Layout::colocated(8, Zero::Parameters) };
    let text = serde_json::to_string(&hybrid).unwrap();
    assert!(text.ends_with(r#""placement":"colocated","zero":3,"shard_ranks":4}"#), "{text}");
    assert_eq!(serde_json::from_str::<Layout>(&text).unwrap(), hybrid);
    assert_eq!(hybrid.to_string(), "colocated tp 1 dp 8, zero 3 over 4 ranks");
    let error = serde_json::from_str::<Layout>(&text.replace("\"zero\":3", "\"zero\":4")).unwrap_err();
    assert!(error.to_string().starts_with("4, must be 0, 1, 2 or 3"), "{error}");
}

/// Encoder on ranks 0 and 1; the LLM's 2 stages of 3 replicas on ranks 2 to 7: (2 3) (4 5) (6 7), or (2 5) (3 6) (4 7).
#[test]
fn the_rank_order_decides_who_stands_next_to_whom() {
    let degrees = |pp, dp| ComponentLayout { tp: 1, pp, dp };
    let stages = Layout::disaggregated(degrees(1, 2), degrees(2, 3));
    let replicas = Layout { rank_order: RankOrder::TpDpPp, ..stages };
    let ranks = |layout: Layout, replica| [1, 2].map(|stage| layout.rank(replica, StageIndex(stage)).0);
    assert_eq!([0, 1, 2].map(|replica| ranks(stages, replica)), [[2, 3], [4, 5], [6, 7]]);
    assert_eq!([0, 1, 2].map(|replica| ranks(replicas, replica)), [[2, 5], [3, 6], [4, 7]]);
    assert_eq!([stages, replicas].map(|layout| layout.replica_stride(Component::Llm)), [2, 1]);
    assert_eq!([stages, replicas].map(|layout| layout.replica_stride(Component::Encoder)), [1, 1]);
    // Nodes of 4: no stage is on another node than the one before; (2 5) and (3 6) are apart. From the encoder's two
    // ranks, on node 0, each replica gets features: 2 of 3 first stages are elsewhere, or 1 of 3.
    let permille = |ratio: f64| (1_000.0 * ratio).round() as u32;
    let across = |layout: Layout| permille(layout.borders_across_nodes(Component::Llm, 4));
    assert_eq!([stages, replicas].map(across), [0, 667]);
    let ratio = |layout: Layout, node| permille(layout.ratio_across_nodes(node));
    assert_eq!([ratio(stages, 4), ratio(replicas, 4)], [333, 500]);
    assert_eq!([ratio(stages, 8), ratio(replicas, 8)], [0, 0]);
    let together = Layout::colocated(8, Zero::Parameters);
    assert_eq!([ratio(together, 8), ratio(together, 4)], [0, 1_000]);
    let text = serde_json::to_string(&replicas).unwrap();
    assert!(text.ends_with(r#","rank_order":"tp-dp-pp"}"#), "{text}");
    assert_eq!(serde_json::from_str::<Layout>(&text).unwrap(), replicas);
    assert_eq!(replicas.to_string(), "encoder tp 1 pp 1 dp 2, llm tp 1 pp 2 dp 3, order tp-dp-pp");
    let is_free = |layout: Layout| layout.has_rank_orders();
    assert!(is_free(stages) && !is_free(together) && !is_free(Layout { llm: degrees(3, 1), ..stages }));
    let mut problems = Vec::new();
    Layout { rank_order: RankOrder::TpDpPp, ..together }.check("layout", &mut problems);
    assert_eq!(
        problems,
        ["layout.rank_order: tp-dp-pp, must be tp-pp-dp where the components are colocated"]
    );
}

#[test]
fn an_uneven_cut_is_the_layouts_own() {
    let degrees = |pp| ComponentLayout { tp: 1, pp, dp: 1 };
    let even = Layout::disaggregated(degrees(2), degrees(3));
    assert_eq!(even.stage_layers(Component::Llm, 20), [7, 7, 6]);
    let cut = |layers: &[u32]| Some(LayerCut::new(layers).unwrap());
    let uneven = Layout { encoder_cut: cut(&[5, 3]), llm_cut: cut(&[7, 8, 5]), ..even };
    assert_eq!(uneven.stage_layers(Component::Llm, 20), [7, 8, 5]);
    assert_eq!(uneven.stage_layers(Component::Encoder, 8), [5, 3]);
    assert_eq!(uneven.to_string(), "encoder tp 1 pp 2 dp 1 layers 5+3, llm tp 1 pp 3 dp 1 layers 7+8+5");
    let text = serde_json::to_string(&uneven).unwrap();
    assert!(text.ends_with(r#""encoder_cut":[5,3],"llm_cut":[7,8,5]}"#), "{text}");
    assert_eq!(serde_json::from_str::<Layout>(&text).unwrap(), uneven);
    let mut problems = Vec::new();
    Layout { llm_cut: cut(&[10, 10]), ..even }.check("layout", &mut problems);
    let rule = "llm.pipeline_parallel_degree is 3, must be equal";
    assert_eq!(problems, [format!("layout.llm_cut: 10+10 has 2 stages, {rule}")]);
}

#[test]
fn chunks_are_dealt_round_over_the_pipeline_ranks() {
    let degrees = |pp, dp| ComponentLayout { tp: 1, pp, dp };
    let plain = Layout::disaggregated(degrees(2, 1), degrees(3, 2));
    let layout = Layout { llm_interleave: 2, ..plain };
    assert_eq!((layout.num_ranks(), layout.num_stages(), layout.num_rows()), (8, 8, 14));
    let stages = |rank| layout.stages(Rank(rank)).map(|stage| stage.0).collect::<Vec<_>>();
    assert_eq!([stages(1), stages(2), stages(4), stages(6)], [vec![1], vec![2, 5], vec![4, 7], vec![3, 6]]);
    assert_eq!(layout.stage_layers(Component::Llm, 20), [4, 4, 3, 3, 3, 3]);
    assert_eq!(layout.layers_of_stage(Component::Llm, StageIndex(5), 20), Ok((11, 3)));
    let error = layout.layers_of_stage(Component::Llm, StageIndex(5), 4).unwrap_err();
    assert_eq!(error, "llm pp 3 x interleave 2 exceeds the 4 layers of the llm");
    assert_eq!(layout.to_string(), "encoder tp 1 pp 2 dp 1, llm tp 1 pp 3 dp 2 interleave 2");
    let text = serde_json::to_string(&layout).unwrap();
    assert!(text.ends_with(r#","llm_interleave":2}"#), "{text}");
    assert_eq!(serde_json::from_str::<Layout>(&text).unwrap(), layout);
    let problems = |layout: Layout| {
        let mut problems = Vec::new();
        layout.check("layout", &mut problems);
        problems
    };
    let cut = LayerCut::new(&[1, 2, 3]).unwrap();
    let rule = "llm.pipeline_parallel_degree x llm_interleave is 3 x 2, must be equal";
    let expected = [format!("layout.llm_cut: 1+2+3 has 3 stages, {rule}")];
    assert_eq!(problems(Layout { llm_cut: Some(cut), ..layout }), expected);
    let alone = Layout { llm: degrees(1, 2), ..layout };
    let rule = "must be 1 where llm.pipeline_parallel_degree is 1";
    assert_eq!(problems(alone), [format!("layout.llm_interleave: 2, {rule}")]);
    assert_eq!(problems(Layout { llm_interleave: 0, ..layout }), ["layout.llm_interleave: must not be 0"]);
    let together = Layout { llm_interleave: 2, ..Layout::colocated(2, Zero::Nothing) };
    let rule = "must be 1 where the components are colocated";
    assert_eq!(problems(together), [format!("layout.llm_interleave: 2, {rule}")]);
}

#[test]
fn states_are_cut_over_all_replicas_or_over_groups_of_them() {
    let degrees = |dp| ComponentLayout { tp: 1, pp: 1, dp };
    let apart = Layout { zero: Zero::States, ..Layout::disaggregated(degrees(2), degrees(6)) };
    let degree =
        |layout: Layout| [Component::Encoder, Component::Llm].map(|component| layout.shard_degree(component));
    assert_eq!(degree(Layout { zero: Zero::Nothing, ..apart }), [1, 1]);
    assert_eq!(degree(apart), [2, 6]);
    assert_eq!(degree(Layout { shard_ranks: Some(2), ..apart }), [2, 2]);
    assert_eq!(degree(Layout::colocated(8, Zero::Gradients)), [8, 8]);
}

/// Experts are dealt out over ranks that follow each other; what says nothing of it is as before.
#[test]
fn experts_are_dealt_out_over_neighbours() {
    let plain = Layout::colocated(8, Zero::Parameters);
    let layout = Layout { expert_parallel_degree: 4, ..plain };
    assert_eq!(layout.to_string(), "colocated tp 1 dp 8, ep 4, zero 3");
    let text = serde_json::to_string(&layout).unwrap();
    assert!(text.ends_with(r#","zero":3,"expert_parallel_degree":4}"#), "{text}");
    assert_eq!(serde_json::from_str::<Layout>(&text).unwrap(), layout);
    let without = text.replace(r#","expert_parallel_degree":4"#, "");
    assert_eq!(serde_json::from_str::<Layout>(&without).unwrap(), plain);
    assert_eq!(serde_json::to_string(&plain).unwrap(), without);
    let groups = |layout: Layout| [0, 3, 4, 7, 8].map(|rank| layout.expert_group(Rank(rank)));
    assert_eq!(groups(layout), [Some(0), Some(0), Some(1), Some(1), None]);
    assert_eq!(groups(plain), [Some(0), Some(3), Some(4), Some(7), None]);
    let whole = |zero| Layout::colocated(8, zero);
    let with = |zero| Layout { expert_parallel_degree: 4, ..whole(zero) };
    assert!(with(Zero::Nothing).meets_in_layers() && whole(Zero::Parameters).meets_in_layers());
    assert!(!whole(Zero::Gradients).meets_in_layers());
}

#[test]
fn expert_groups_that_cannot_be_are_refused_with_their_numbers() {
    let problems = |layout: Layout| {
        let mut problems = Vec::new();
        layout.check("layout", &mut problems);
        problems
    };
    let of = |ep, layout: Layout| Layout { expert_parallel_degree: ep, ..layout };
    let plain = Layout::colocated(12, Zero::Parameters);
    let degrees = |tp, pp, dp| ComponentLayout { tp, pp, dp };
    assert_eq!(problems(of(4, plain)), Vec::<String>::new());
    for (layout, rule) in [
        (of(0, plain), "0, must not be 0"),
        (of(8, plain), "8, must divide the 12 replicas"),
        (of(24, plain), "24, must divide the 12 replicas"),
        (
            of(2, Layout::disaggregated(degrees(1, 1, 2), degrees(1, 1, 2))),
            "2, must be 1 where encoder and llm have ranks of their own",
        ),
        (
            of(2, Layout { encoder: degrees(1, 1, 12), llm: degrees(2, 1, 6), ..plain }),
            "2, must be 1 where layers are cut over ranks: encoder tp 1, llm tp 2",
        ),
        (
            of(2, Layout { shard_ranks: Some(4), ..plain }),
            "2, must be 1 where shards are cut over groups of replicas: `shard_ranks` is 4",
        ),
    ] {
        assert_eq!(problems(layout), [format!("layout.expert_parallel_degree: {rule}")], "{layout}");
    }
}
