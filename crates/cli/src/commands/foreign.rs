//! `dflop plan --emit megatron|torchtitan`: the arguments of other trainers that come nearest to a plan, in their own names, and
//! what of it they cannot express.
//!
//! Names as in Megatron-LM's `megatron/training/arguments.py` and its Megatron-FSDP guide (`docs/user-guide/features`), read on
//! 2026-11-23, and as torchtitan 0.3.0 parses them (`torchtitan/config`).

use dflop_types::number::counted;
use dflop_types::{Component, Layout, RankOrder, RankedPlan, Recompute, Zero};

/// Arguments, one a line, and what they leave out as comments.
fn lines(arguments: &[String], lacks: &[String]) -> String {
    let lacks = lacks.iter().map(|lack| format!("# not expressed: {lack}\n"));
    lacks.chain(arguments.iter().map(|argument| format!("{argument}\n"))).collect()
}

/// What neither of them has.
fn of_both(plan: &RankedPlan) -> Vec<String> {
    let mut lacks = vec![
        "samples balanced by predicted time: their loaders take arrival order, or dflop.BalancedBatchSampler in your own".to_owned(),
    ];
    if !plan.layout.is_colocated() {
        let (encoder, llm) = (plan.layout.encoder, plan.layout.llm);
        lacks.push(format!(
            "encoder ranks apart ({} of {}): the encoder stands before the first stage",
            encoder.num_ranks(),
            encoder.num_ranks() + llm.num_ranks()
        ));
    }
    if plan.layout.has_whole_encoders() {
        let tp = plan.layout.llm.tp;
        lacks.push(format!(
            "whole encoders on ranks that cut the LLM backbone: the layers of theirs are cut {tp} ways too, or each group of {tp} encodes the same"
        ));
    }
    lacks
}

/// Replicas of the LLM backbone that all ranks of the plan make in a trainer without ranks of the encoder's own.
fn replicas(plan: &RankedPlan) -> u32 {
    plan.layout.num_ranks() / (plan.layout.llm.tp * plan.layout.llm.pp).max(1)
}

/// What does not divide, where ranks would be left over.
fn left_over(plan: &RankedPlan) -> Option<String> {
    let llm = plan.layout.llm;
    let left = plan.layout.num_ranks() % (llm.tp * llm.pp).max(1);
    (left > 0)
        .then(|| format!("{left} ranks that are left over by {} x {} of the LLM backbone", llm.tp, llm.pp))
}

/// Whether the stages of a replica stand next to each other. Both trainers number the replicas of a stage so.
fn has_stages_side_by_side(layout: &Layout) -> bool {
    layout.has_rank_orders() && layout.rank_order == RankOrder::TpPpDp
}

/// Samples of a microbatch of a trainer whose microbatches are of one size, and what is left over where the global batch is no
/// whole number of them: both trainers refuse to start then.
fn microbatch(plan: &RankedPlan, global_batch_size: u32) -> (u32, Option<String>) {
    let dp = replicas(plan).max(1);
    let samples = (global_batch_size / (plan.num_microbatches * dp).max(1)).max(1);
    let all = dp * samples;
    let below = global_batch_size - global_batch_size % all;
    let near = if below > 0 { format!("{below} or {}", below + all) } else { all.to_string() };
    let lack = (!global_batch_size.is_multiple_of(all)).then(|| {
        format!(
            "a global batch of {}, which {} with {} each do not divide: they start with {near}",
            counted(global_batch_size.into(), "sample"),
            counted(dp.into(), "replica"),
            counted(samples.into(), "sample")
        )
    });
    (samples, lack)
}

/// Layers of the LLM backbone by stage, as people read them.
fn cut_lack(stages: &[u32], theirs: &str) -> String {
    let layers: Vec<String> = stages.iter().map(u32::to_string).collect();
    format!("stages of {} layers: {theirs}", layers.join("+"))
}

/// Megatron-LM's arguments for a cut into stages; `None` if it has none. The first and the last rank may hold other numbers of
/// layers than those between, which are equal; the chunks of a rank are equal.
fn megatron_cut(stages: &[u32], pp: u32) -> Option<Vec<String>> {
    let pp = pp.max(1) as usize;
    let of_rank = |rank: usize| stages.iter().skip(rank).step_by(pp);
    let is_equal = |rank: usize| of_rank(rank).all(|layers| Some(layers) == stages.get(rank));
    if !(0..pp).all(is_equal) {
        return None;
    }
    let all: Vec<u32> = (0..pp).map(|rank| of_rank(rank).sum()).collect();
    let (&[first, .., last], inner) = (all.as_slice(), all.get(1..pp - 1).unwrap_or_default()) else {
        return Some(Vec::new());
    };
    if inner.windows(2).any(|pair| pair[0] != pair[1]) {
        return None;
    }
    if all.iter().all(|&layers| layers == first) {
        return Some(Vec::new());
    }
    Some(vec![
        format!("--decoder-first-pipeline-num-layers {first}"),
        format!("--decoder-last-pipeline-num-layers {last}"),
    ])
}

/// Layers that torchtitan's first and last stage have less than its even cut, for a cut into stages; `None` if it has none. It
/// cuts the layers and both numbers together evenly, the first stages one more, and takes the numbers off again
/// (`generate_llm_fqn_per_model_part` in its `distributed/pipeline_parallel.py`).
fn torchtitan_cut(stages: &[u32]) -> Option<[u32; 2]> {
    let &[.., last] = stages else { return None };
    let most = stages.iter().copied().max().unwrap_or(0);
    let count = stages.len() as u32;
    let is_it = |&[less_first, less_last]: &[u32; 2]| {
        let all = stages.iter().sum::<u32>() + less_first + less_last;
        let (even, more) = (all / count, all % count);
        let theirs = (0..count).map(|stage| even + u32::from(stage < more));
        let ours = (0..count).zip(stages).map(|(stage, &layers)| {
            layers + if stage == 0 { less_first } else { 0 } + if stage == count - 1 { less_last } else { 0 }
        });
        less_first.max(less_last) <= even && theirs.eq(ours)
    };
    let tried = (0..=most - stages[0] + 1)
        .flat_map(|less_first| (0..=most - last + 1).map(move |less_last| [less_first, less_last]));
    tried.into_iter().find(is_it)
}

/// Megatron-LM's.
pub(super) fn megatron(plan: &RankedPlan, global_batch_size: u32, num_llm_layers: u32) -> String {
    let (layout, llm) = (plan.layout, plan.layout.llm);
    let mut lacks = of_both(plan);
    lacks.extend(left_over(plan));
    let (microbatch, lack) = microbatch(plan, global_batch_size);
    lacks.extend(lack);
    let mut arguments = vec![
        format!("--tensor-model-parallel-size {}", llm.tp),
        format!("--pipeline-model-parallel-size {}", llm.pp),
        format!("--global-batch-size {global_batch_size}"),
        format!("--micro-batch-size {microbatch}"),
        "--bf16".to_owned(),
        "--calculate-per-token-loss".to_owned(),
    ];
    if layout.has_expert_groups() {
        // Experts stay whole, whatever the layers beside them are cut over.
        arguments.push(format!("--expert-model-parallel-size {}", layout.expert_parallel_degree));
        arguments.push("--expert-tensor-parallel-size 1".to_owned());
    }
    if layout.is_interleaved() {
        arguments.push(format!("--num-virtual-stages-per-pipeline-rank {}", layout.llm_interleave));
    }
    let stages = layout.stage_layers(Component::Llm, num_llm_layers);
    match megatron_cut(&stages, llm.pp) {
        Some(cut) => arguments.extend(cut),
        None => lacks.push(cut_lack(
            &stages,
            "its ranks between the first and the last have equal ones, and so have the chunks of a rank; with a total that these do not divide it does not start",
        )),
    }
    // Without it the replicas of a stage stand next to each other.
    if has_stages_side_by_side(&layout) {
        arguments.push("--use-tp-pp-dp-mapping".to_owned());
    }
    lacks.push(format!("microbatches of different size: each has {}", counted(microbatch.into(), "sample")));
    let strategy = match layout.zero {
        Zero::Nothing => None,
        Zero::States => Some("optim"),
        Zero::Gradients => Some("optim_grads"),
        Zero::Parameters => Some("optim_grads_params"),
    };
    if let Some(strategy) = strategy {
        arguments.push("--use-distributed-optimizer".to_owned());
        arguments.push("--overlap-grad-reduce".to_owned());
        arguments.push("--overlap-param-gather".to_owned());
        if layout.zero > Zero::States {
            // As its guide requires them.
            arguments.extend([
                "--use-megatron-fsdp".to_owned(),
                format!("--data-parallel-sharding-strategy {strategy}"),
                "--no-gradient-accumulation-fusion".to_owned(),
                "--ckpt-format fsdp_dtensor".to_owned(),
            ]);
        }
        if let Some(ranks) = layout.shard_ranks {
            arguments.push(format!(
                "--num-distributed-optimizer-instances {}",
                (replicas(plan) / ranks.max(1)).max(1)
            ));
        }
    }
    lacks.extend(recomputes_otherwise(plan));
    match plan.recompute.llm {
        Recompute::None => {}
        Recompute::Selective | Recompute::SelectiveOf(_) => {
            arguments.push("--recompute-granularity selective".to_owned());
            lacks.push("our selective recomputation: theirs recomputes the core of attention".to_owned());
        }
        Recompute::Full => arguments.extend(
            ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
                .map(str::to_owned),
        ),
        Recompute::FullOf(num_layers) => {
            arguments.extend(["--recompute-granularity full", "--recompute-method block"].map(str::to_owned));
            arguments.push(format!("--recompute-num-layers {num_layers}"));
            lacks.push(
                "selective recomputation of the other layers: theirs keep everything, and need more memory"
                    .to_owned(),
            );
        }
    }
    lines(&arguments, &lacks)
}

/// What an encoder recomputes that does not recompute what the LLM backbone does, and what differs between microbatches:
/// both trainers have one mode.
fn recomputes_otherwise(plan: &RankedPlan) -> impl Iterator<Item = String> {
    let mode = plan.recompute.encoder;
    let unequal = plan.recompute.of_both().is_none();
    let of_encoder = unequal.then(|| format!("recomputation of the encoder by itself: {mode}"));
    let eased = plan
        .is_eased
        .then(|| "recomputation by microbatch: theirs recompute in each what the largest needs".to_owned());
    let partly = match plan.recompute.llm {
        Recompute::SelectiveOf(num_layers) => {
            let layers = counted(num_layers.get().into(), "layer");
            Some(format!("selective recomputation of {layers} of each stage alone: all recompute"))
        }
        _ => None,
    };
    of_encoder.into_iter().chain(eased).chain(partly)
}

/// torchtitan's. The mode of recomputation is a word of its own, which must come last: what follows it is read as an option of it.
pub(super) fn torchtitan(plan: &RankedPlan, global_batch_size: u32, num_llm_layers: u32) -> String {
    let (layout, llm) = (plan.layout, plan.layout.llm);
    let mut lacks = of_both(plan);
    lacks.extend(left_over(plan));
    if has_stages_side_by_side(&layout) {
        lacks.push("stages next to each other: its replicas of a stage are".to_owned());
    }
    let (microbatch, lack) = microbatch(plan, global_batch_size);
    lacks.extend(lack);
    let dp = replicas(plan);
    // With a pipeline, the local batch is all microbatches of a step.
    let in_flight = if llm.pp > 1 { plan.num_microbatches } else { 1 };
    let local = (global_batch_size / dp.max(1)).min(microbatch * in_flight).max(1);
    let shard =
        if layout.zero == Zero::Nothing { 1 } else { layout.shard_ranks.unwrap_or(dp).min(dp).max(1) };
    let mut arguments = vec![
        format!("--parallelism.tensor_parallel_degree {}", llm.tp),
        format!("--parallelism.pipeline_parallel_degree {}", llm.pp),
        format!("--parallelism.data_parallel_replicate_degree {}", dp / shard),
        format!("--parallelism.data_parallel_shard_degree {shard}"),
        format!("--training.global_batch_size {global_batch_size}"),
        format!("--training.local_batch_size {local}"),
    ];
    if layout.has_expert_groups() {
        arguments.push(format!("--parallelism.expert_parallel_degree {}", layout.expert_parallel_degree));
        if layout.zero == Zero::Nothing {
            lacks.push(
                "experts dealt out over ranks that cut nothing: its expert groups are of ranks that shard"
                    .to_owned(),
            );
        }
    }
    if llm.pp > 1 {
        // It captures steps of one stage only, and does not start with both.
        arguments.push("--training.disable_cuda_graphs".to_owned());
        arguments.push(format!("--parallelism.pipeline_parallel_microbatch_size {microbatch}"));
        let stages = layout.stage_layers(Component::Llm, num_llm_layers);
        match torchtitan_cut(&stages) {
            // Both are 1 where they are not given.
            Some([first, last]) => arguments.extend([
                format!("--parallelism.pipeline_parallel_first_stage_less_layers {first}"),
                format!("--parallelism.pipeline_parallel_last_stage_less_layers {last}"),
            ]),
            None => lacks.push(cut_lack(
                &stages,
                "its own differ by one but for the first and the last (`module_fqns_per_model_part` in the configuration names the modules of each)",
            )),
        }
    }
    match layout.zero {
        Zero::Nothing | Zero::Gradients => {}
        Zero::States => lacks.push("optimizer states cut alone: its FSDP cuts gradients too".to_owned()),
        Zero::Parameters => arguments.push("--parallelism.fsdp_reshard_after_forward always".to_owned()),
    }
    if matches!(layout.zero, Zero::States | Zero::Gradients) {
        arguments.push("--parallelism.fsdp_reshard_after_forward never".to_owned());
    }
    if layout.is_interleaved() {
        arguments.push("--parallelism.pipeline_parallel_schedule Interleaved1F1B".to_owned());
        let chunks = layout.llm_interleave;
        lacks.push(format!(
            "{chunks} chunks of layers a rank: its layers of a stage decide how many there are"
        ));
    } else if llm.pp > 1 {
        arguments.push("--parallelism.pipeline_parallel_schedule 1F1B".to_owned());
    }
    lacks.extend(recomputes_otherwise(plan));
    if let Recompute::FullOf(num_layers) = plan.recompute.llm {
        let layers = counted(num_layers.get().into(), "layer");
        lacks.push(format!("full recomputation of {layers} of each stage alone: all are recomputed"));
    }
    arguments.push(format!("activation-checkpoint:{}", plan.recompute.llm.of_first()));
    lines(&arguments, &lacks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_types::{ComponentLayout, LayerCut, PipelineOrder, PlanPrediction, Recomputation};

    fn plan(layout: Layout, mode: Recompute) -> RankedPlan {
        recomputing(layout, Recomputation::both(mode))
    }

    fn recomputing(layout: Layout, recompute: Recomputation) -> RankedPlan {
        RankedPlan {
            layout,
            num_microbatches: 4,
            pipeline_order: PipelineOrder::OneFOneB,
            recompute,
            is_eased: false,
            prediction: PlanPrediction::default(),
        }
    }

    #[test]
    fn fully_sharded_ranks_have_their_names() {
        let hybrid = Layout { shard_ranks: Some(8), ..Layout::colocated(64, Zero::Parameters) };
        let of = |text: &str| {
            text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect::<Vec<_>>()
        };
        let megatron = of(&megatron(&plan(hybrid, Recompute::Full), 256, 28));
        for argument in [
            "--tensor-model-parallel-size 1",
            "--global-batch-size 256",
            "--micro-batch-size 1",
            "--data-parallel-sharding-strategy optim_grads_params",
            "--num-distributed-optimizer-instances 8",
            "--recompute-granularity full",
        ] {
            assert!(megatron.contains(&argument.to_owned()), "{argument}: {megatron:?}");
        }
        let torchtitan = of(&torchtitan(&plan(hybrid, Recompute::Selective), 256, 28));
        for argument in [
            "--parallelism.data_parallel_replicate_degree 8",
            "--parallelism.data_parallel_shard_degree 8",
            "--parallelism.fsdp_reshard_after_forward always",
            "activation-checkpoint:selective",
        ] {
            assert!(torchtitan.contains(&argument.to_owned()), "{argument}: {torchtitan:?}");
        }
    }

    /// Experts that are dealt out have names of theirs, and nothing is said of them where they are not.
    #[test]
    fn experts_that_are_dealt_out_have_their_names() {
        let of = |ep, zero| {
            let layout = Layout { expert_parallel_degree: ep, ..Layout::colocated(64, zero) };
            let plan = plan(layout, Recompute::None);
            [megatron(&plan, 256, 28), torchtitan(&plan, 256, 28)]
        };
        let [of_megatron, of_torchtitan] = of(8, Zero::Parameters);
        assert!(of_megatron.contains("--expert-model-parallel-size 8"), "{of_megatron}");
        assert!(of_megatron.contains("--expert-tensor-parallel-size 1"), "{of_megatron}");
        assert!(of_torchtitan.contains("--parallelism.expert_parallel_degree 8"), "{of_torchtitan}");
        assert!(!of_torchtitan.contains("experts dealt out over ranks that cut nothing"), "{of_torchtitan}");
        assert!(
            of(8, Zero::Nothing)[1]
                .contains("# not expressed: experts dealt out over ranks that cut nothing")
        );
        assert!(of(1, Zero::Parameters).iter().all(|text| !text.contains("expert")));
    }

    /// What they cannot do is said: an encoder on ranks of its own, ranks left over, our balance.
    #[test]
    fn what_they_lack_is_said() {
        let degrees = |pp, dp| ComponentLayout { tp: 1, pp, dp };
        let apart = plan(Layout::disaggregated(degrees(1, 2), degrees(4, 3)), Recompute::None);
        for text in [megatron(&apart, 32, 28), torchtitan(&apart, 32, 28)] {
            assert!(text.contains("# not expressed: encoder ranks apart (2 of 14)"), "{text}");
            assert!(text.contains("# not expressed: 2 ranks that are left over by 1 x 4"), "{text}");
            assert!(text.contains("# not expressed: samples balanced"), "{text}");
        }
        let near = Layout { rank_order: RankOrder::TpDpPp, ..apart.layout };
        for (layout, is_said) in [(apart.layout, true), (near, false)] {
            let of = plan(layout, Recompute::None);
            assert_eq!(megatron(&of, 32, 28).contains("--use-tp-pp-dp-mapping"), is_said);
            assert_eq!(
                torchtitan(&of, 32, 28).contains("# not expressed: stages next to each other"),
                is_said
            );
        }
        let llm_alone = Recomputation { encoder: Recompute::None, llm: Recompute::Full };
        let unequal = recomputing(Layout::colocated(4, Zero::Nothing), llm_alone);
        for (text, argument) in [
            (megatron(&unequal, 32, 28), "--recompute-granularity full"),
            (torchtitan(&unequal, 32, 28), "activation-checkpoint:full"),
        ] {
            assert!(text.contains(argument), "{text}");
            assert!(text.contains("# not expressed: recomputation of the encoder by itself: none"), "{text}");
        }
        assert!(
            !megatron(&plan(Layout::colocated(4, Zero::Nothing), Recompute::None), 16, 28)
                .contains("encoder ranks apart")
        );
        let of = |tp, dp| ComponentLayout { tp, pp: 1, dp };
        let whole = Layout { encoder: of(1, 8), llm: of(4, 2), ..Layout::colocated(1, Zero::States) };
        let both_cut = Layout { encoder: of(4, 2), ..whole };
        for (layout, is_said) in [(whole, true), (both_cut, false)] {
            let of = plan(layout, Recompute::None);
            for text in [megatron(&of, 32, 28), torchtitan(&of, 32, 28)] {
                assert_eq!(
                    text.contains("# not expressed: whole encoders on ranks that cut"),
                    is_said,
                    "{text}"
                );
            }
        }
    }

    /// A cut is in their own arguments where they have some for it, and is said where they have none.
    #[test]
    fn a_cut_is_theirs_or_said() {
        let argument = |first: u32, last: u32| {
            Some(vec![
                format!("--decoder-first-pipeline-num-layers {first}"),
                format!("--decoder-last-pipeline-num-layers {last}"),
            ])
        };
        for (stages, pp, megatron, torchtitan) in [
            (&[7, 7, 7, 7][..], 4, Some(Vec::new()), Some([0, 0])),
            (&[5, 6, 6, 6, 5], 5, argument(5, 5), Some([1, 0])),
            // 29 over five stages are 6+6+6+6+5, and the last has one less.
            (&[6, 6, 6, 6, 4], 5, argument(6, 4), Some([0, 1])),
            (&[13, 15], 2, argument(13, 15), Some([2, 0])),
            (&[7, 6, 5, 5, 5], 5, None, None),
            (&[5, 7, 6, 5, 5], 5, None, None),
            // Chunks of two ranks: both of a rank are equal.
            (&[6, 8, 6, 8], 2, argument(12, 16), None),
            (&[6, 8, 7, 7], 2, None, Some([2, 0])),
            (&[28], 1, Some(Vec::new()), Some([0, 0])),
        ] {
            assert_eq!(megatron_cut(stages, pp), megatron, "{stages:?}");
            assert_eq!(torchtitan_cut(stages), torchtitan, "{stages:?}");
        }
    }

    /// 64 samples on 3 pipelines of 5 stages: 28 layers are no multiple of 5, nor 64 of 3.
    #[test]
    fn what_does_not_divide_is_said() {
        let degrees = |pp, dp| ComponentLayout { tp: 1, pp, dp };
        let cut = LayerCut::new(&[5, 6, 6, 6, 5]).unwrap();
        let even = Layout::disaggregated(degrees(1, 2), degrees(5, 3));
        let of = plan(Layout { llm_cut: Some(cut), ..even }, Recompute::None);
        let texts = [megatron(&of, 64, 28), torchtitan(&of, 64, 28)];
        for text in &texts {
            assert!(
                text.contains("# not expressed: a global batch of 64 samples, which 3 replicas with 5 samples each do not divide: they start with 60 or 75\n"),
                "{text}"
            );
            assert!(!text.contains("# not expressed: stages of"), "{text}");
        }
        assert!(
            texts[0]
                .contains("--decoder-first-pipeline-num-layers 5\n--decoder-last-pipeline-num-layers 5\n")
        );
        for argument in ["first_stage_less_layers 1", "last_stage_less_layers 0", "microbatch_size 5"] {
            assert!(
                texts[1].contains(&format!("--parallelism.pipeline_parallel_{argument}\n")),
                "{}",
                texts[1]
            );
        }
        assert!(texts[1].contains("--training.local_batch_size 20\n"), "{}", texts[1]);
        let uneven = LayerCut::new(&[7, 6, 5, 5, 5]).unwrap();
        let of = plan(Layout { llm_cut: Some(uneven), ..even }, Recompute::None);
        for text in [megatron(&of, 60, 28), torchtitan(&of, 60, 28)] {
            assert!(text.contains("# not expressed: stages of 7+6+5+5+5 layers: "), "{text}");
            assert!(!text.contains("# not expressed: a global batch"), "{text}");
        }
    }
}
