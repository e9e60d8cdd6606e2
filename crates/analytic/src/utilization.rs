//! Model FLOPs utilization (MFU): the operations that a model needs, over what the devices could do in the time.

use crate::architecture::{Architecture, LLM_LAYERS};
use dflop_types::{MicrobatchShape, ModelProfile, Tower, Trained};

impl Architecture {
    /// Floating point operations of forward and backward over the samples of `shape`, encoder and projector included, all of it
    /// trained.
    ///
    /// As `torch.utils.flop_counter` counts them: attention over the whole square, whatever the mask; but within a window
    /// each token counts those that it sees at most. What is recomputed does not count: it is no work of the model.
    pub fn training_flops(&self, shape: &MicrobatchShape) -> u128 {
        self.training_flops_of(shape, &Trained::default())
    }

    /// As [`Self::training_flops`], where only `trained` trains: what is frozen has no gradients of its weights, and passes
    /// one on only where something before it trains. Adapters count with their products.
    pub fn training_flops_of(&self, shape: &MicrobatchShape, trained: &Trained) -> u128 {
        let read_by = |tower: Tower| -> Vec<u64> {
            let groups = shape.encoder_segments.iter().filter(|group| group.tower == tower);
            groups
                .flat_map(|group| std::iter::repeat_n(u64::from(group.tokens), group.count as usize))
                .collect()
        };
        let encoders = Tower::ALL.map(read_by);
        let llm: Vec<u64> = shape.llm_tokens.iter().copied().map(u64::from).collect();
        let labels = [shape.label_tokens];
        let of_module = |module: &crate::Module| {
            let adapted = module.with_adapters(trained.lora_rank);
            let module = adapted.as_ref().unwrap_or(module);
            let segments = match module.name {
                "llm_head" => labels.to_vec(),
                name if name == "llm_embedding" || LLM_LAYERS.contains(&name) => llm.clone(),
                ModelProfile::WINDOW_LAYER => windows(&encoders[0], module.segment_tokens),
                name => encoders[ModelProfile::tower_of(name).index()].clone(),
            };
            let flops = module.flops(&segments);
            let (is_before, is_own) = match module.name {
                name if name.starts_with("llm_") => {
                    let is_own = trained.llm && (trained.lora_rank == 0 || adapted.is_some());
                    (trained.llm || trained.projector || trained.encoder, is_own)
                }
                name if ModelProfile::is_projector(name) => (trained.encoder, trained.projector),
                _ => (trained.encoder, trained.encoder),
            };
            let gradients = if is_before { flops.input } else { 0 } + if is_own { flops.weight } else { 0 };
            u128::from(module.count) * (flops.forward + gradients)
        };
        self.modules().iter().map(of_module).sum()
    }
}

/// Segments cut into windows of so many tokens, the last of each perhaps shorter.
fn windows(segments: &[u64], tokens: Option<u64>) -> Vec<u64> {
    let Some(tokens) = tokens.filter(|&tokens| tokens > 0) else { return segments.to_vec() };
    let cut = |&segment: &u64| {
        let whole = std::iter::repeat_n(tokens, (segment / tokens) as usize);
        whole.chain((segment % tokens > 0).then_some(segment % tokens))
    };
    segments.iter().flat_map(cut).collect()
}

/// The share of the peak that `flops` in `step_ns` on `num_ranks` devices of `peak_gflops` 10^9 operations a second are; 0 where
/// nothing could be done.
///
/// *References*: Chowdhery et al., 2022, arXiv 2204.02311, appendix B.
pub fn mfu(flops: u128, step_ns: u64, num_ranks: u32, peak_gflops: u64) -> f64 {
    // 10^9 operations a second are one a nanosecond.
    let could = step_ns as f64 * f64::from(num_ranks) * peak_gflops as f64;
    if could > 0.0 { flops as f64 / could } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue_model;
    use dflop_types::{EncoderSegments, Recipe};

    /// Six operations a parameter and token in products, twelve a width and pair of tokens in attention, of either part.
    #[test]
    fn both_parts_count() {
        let architecture = catalogue_model("llava-onevision-qwen2-7b").unwrap().architecture().unwrap();
        let text =
            MicrobatchShape { llm_tokens: vec![1_000], label_tokens: 1_000, ..MicrobatchShape::default() };
        let llm = architecture.training_flops(&text);
        // 28 layers of queries and out 3,584 x 3,584, keys and values 3,584 x 512, MLP 3 x 3,584 x 18,944; head of 152,064.
        let layer: u128 = 2 * 3_584 * 3_584 + 2 * 3_584 * 512 + 3 * 3_584 * 18_944;
        let attention: u128 = 14 * 3_584 * 1_000 * 1_000;
        let head: u128 = 3_584 * u128::from(architecture.llm.vocabulary);
        assert_eq!(llm, 28 * (6_000 * layer + attention) + 6_000 * head);
        let segments = vec![EncoderSegments::of(5, 729)];
        let image = MicrobatchShape { encoder_segments: segments, ..text };
        let encoder = architecture.training_flops(&image) - llm;
        // About 0.4 billion parameters in the layers of SigLIP over 3,645 tokens, with attention.
        let tokens = 5.0 * 729.0;
        assert!((6.0 * 0.40e9 * tokens..6.0 * 0.55e9 * tokens).contains(&(encoder as f64)), "{encoder}");
        assert_eq!(windows(&[100, 64, 20], Some(64)), [64, 36, 64, 20]);
    }

    /// Without gradients of the weights of what is frozen, and without those that nothing before it wants.
    #[test]
    fn what_is_frozen_counts_less() {
        let architecture = catalogue_model("llava-onevision-qwen2-7b").unwrap().architecture().unwrap();
        let segments = vec![EncoderSegments::of(2, 729)];
        let shape = MicrobatchShape { encoder_segments: segments, llm_tokens: vec![500], label_tokens: 100 };
        let flops = |recipe: Recipe| architecture.training_flops_of(&shape, &recipe.trained(16));
        let sum = |name: &str, of: &dyn Fn(&crate::ModuleFlops) -> u128| -> u128 {
            let segments: &[u64] = match name {
                "llm_head" => &[100],
                "llm_embedding" | "llm_layer" => &[500],
                _ => &[729, 729],
            };
            let modules = architecture.modules();
            modules
                .iter()
                .filter(|module| module.name == name)
                .map(|module| u128::from(module.count) * of(&module.flops(segments)))
                .sum()
        };
        let encoder = |of: &dyn Fn(&crate::ModuleFlops) -> u128| {
            sum("encoder_embedding", of) + sum("encoder_layer", of)
        };
        let llm = |of: &dyn Fn(&crate::ModuleFlops) -> u128| {
            sum("llm_embedding", of) + sum("llm_layer", of) + sum("llm_head", of)
        };
        let full = architecture.training_flops(&shape);
        assert_eq!(flops(Recipe::Full), full);
        let of_encoder = encoder(&|f| f.input + f.weight) + sum("projector", &|f| f.input);
        assert_eq!(flops(Recipe::FrozenEncoder), full - of_encoder);
        assert_eq!(flops(Recipe::FrozenLlm), full - llm(&|f| f.weight));
        assert_eq!(flops(Recipe::Projector), full - of_encoder - llm(&|f| f.weight));
        // 28 layers: queries and out 3,584 + 3,584, keys and values 3,584 + 512, MLP 3 x (3,584 + 18,944), each three times.
        let adapters: u128 = 28 * 16 * (2 * (3_584 + 3_584) + 2 * (3_584 + 512) + 3 * (3_584 + 18_944));
        assert_eq!(flops(Recipe::Lora), flops(Recipe::Projector) + 6 * 500 * adapters);
    }

    #[test]
    fn a_share_of_the_peak() {
        // Half of 312 TFLOP/s on 8 devices for a second.
        let flops = 8 * 156 * 1_000_000_000_000;
        assert!((mfu(flops, 1_000_000_000, 8, 312_000) - 0.5).abs() < 1e-12);
        assert!(mfu(flops, 0, 8, 312_000) < f64::EPSILON);
    }
}
