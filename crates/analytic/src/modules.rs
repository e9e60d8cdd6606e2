//! The modules of a model as steps: by the names that a model profile has.

use crate::architecture::{Architecture, Encoder, LLM_LAYERS, MlpKind, NormKind, Patches, VOCABULARY};
use crate::operations::{Attention, Kind, Operation, Rows};
use crate::pass::Pass;
use crate::product::{Cut, Product};
use crate::work::{Phase, Work};
use dflop_types::{ExpertsProfile, ModelProfile};

/// One module of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Its name in a model profile.
    pub name: &'static str,
    /// How many of it the model has.
    pub count: u64,
    /// Its steps, in order.
    pub operations: Vec<Operation>,
    /// Parameters that no step has: tables of positions, tokens, factors, and what no forward reads.
    pub num_table_parameters: u64,
    /// Whether what it reads wants a gradient.
    pub has_input_gradient: bool,
    /// Whether its last steps look something up, so that recomputation runs all of it.
    pub ends_with_lookup: bool,
    /// Width of what it reads, which full recomputation keeps.
    pub input_width: u64,
    /// Sizes are multiples of this.
    pub unit_tokens: u64,
    /// Tokens of the segments that its attention works on, where the model knows no other.
    pub segment_tokens: Option<u64>,
}

/// Floating point operations of a module over segments, as `torch.utils.flop_counter` counts them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ModuleFlops {
    /// F.
    pub forward: u128,
    /// I: gradients of what it reads, and of all between.
    pub input: u128,
    /// W: gradients of its weights.
    pub weight: u128,
    /// Recomputed by a checkpoint over the whole module: the forward up to the last value that the backward reads
    /// (`torch.utils.checkpoint` stops there).
    pub recomputed: u128,
}

impl Module {
    /// Parameters of one.
    pub fn num_parameters(&self) -> u64 {
        self.num_table_parameters + self.operations.iter().map(Operation::num_parameters).sum::<u64>()
    }

    /// The experts among its steps, with values of `size` bytes; `None` where it has none.
    pub(super) fn experts(&self, size: u64) -> Option<ExpertsProfile> {
        let of_expert = |operation: &&Operation| match operation.kind {
            Kind::Product(product) => product.num_experts > 1,
            _ => false,
        };
        let own = || self.operations.iter().filter(of_expert);
        let first = own().next()?;
        let Kind::Product(product) = first.kind else { return None };
        let num_parameters = own().map(Operation::num_parameters).sum();
        Some(ExpertsProfile {
            count: product.num_experts as u32,
            per_token: first.rows.factor as u32,
            num_parameters,
            parameter_bytes: num_parameters * size,
        })
    }

    /// Floating point operations over segments of the given numbers of tokens (label tokens, for the head).
    pub fn flops(&self, segments: &[u64]) -> ModuleFlops {
        let sum = |phase| self.operations.iter().map(|o| o.work(segments, phase, 1).flops).sum();
        let recomputed = self.recomputed().iter().map(|o| o.work(segments, Phase::Forward, 1).flops).sum();
        ModuleFlops {
            forward: sum(Phase::Forward),
            input: sum(Phase::Input),
            weight: sum(Phase::Weight),
            recomputed,
        }
    }

    /// The steps that full recomputation runs again: a product keeps what it reads, so the last need not run.
    pub(super) fn recomputed(&self) -> &[Operation] {
        if self.ends_with_lookup {
            return &self.operations;
        }
        let keeps = |operation: &Operation| operation.kept_bytes(&[self.unit_tokens.max(4)], 1) > 0;
        let Some(last) = self.operations.iter().rposition(keeps) else { return &[] };
        let is_product = matches!(self.operations[last].kind, Kind::Product(_));
        &self.operations[..last + usize::from(!is_product)]
    }

    /// The attention among its steps whose time depends on the sizes of segments.
    pub fn attention(&self) -> Option<&Operation> {
        self.operations.iter().find(|operation| match operation.kind {
            Kind::Attention(attention) => !attention.is_of_blocks(),
            Kind::Scores(_) => true,
            _ => false,
        })
    }

    /// The part of one of `degree` ranks; `None` where the degree does not divide it, or nothing of it is cut.
    pub fn cut(&self, degree: u64) -> Option<Self> {
        let shares_rows = LLM_LAYERS.contains(&self.name);
        let part = |o: &Operation| if shares_rows { o.cut_rows(degree) } else { o.cut(degree) };
        let operations: Option<Vec<Operation>> = self.with_heads_for(degree).iter().map(part).collect();
        let operations = operations?;
        let input_width = if shares_rows { self.input_width.div_ceil(degree) } else { self.input_width };
        (operations != self.operations).then(|| Self { operations, input_width, ..self.clone() })
    }

    /// Embedding or head with one of `degree` ranks' rows of the vocabulary; `None` of another module. A rank may have a row less
    /// than this, where the degree does not divide them.
    pub(super) fn with_vocabulary_cut(&self, degree: u64) -> Option<Self> {
        let cut = |mut one: Operation| {
            match &mut one.kind {
                Kind::Lookup { rows, .. } => *rows = rows.div_ceil(degree),
                Kind::Product(product) => product.outputs = product.outputs.div_ceil(degree),
                Kind::Loss { classes, .. } => *classes = classes.div_ceil(degree),
                _ => {}
            }
            one
        };
        let operations = self.operations.iter().copied().map(cut).collect();
        VOCABULARY.contains(&self.name).then(|| Self { operations, ..self.clone() })
    }

    /// The steps with a head of keys and values for each of `degree` ranks, where there are fewer: training repeats them
    /// (`python/dflop/models/tensor.py`).
    fn with_heads_for(&self, degree: u64) -> Vec<Operation> {
        let mut operations = self.operations.clone();
        let at = operations.iter().position(|one| matches!(one.kind, Kind::Attention(_)));
        let Some((at, Kind::Attention(attention))) = at.map(|at| (at, operations[at].kind)) else {
            return operations;
        };
        let Attention { num_heads, num_key_value_heads, head_size, .. } = attention;
        if num_key_value_heads >= degree || !degree.is_multiple_of(num_key_value_heads.max(1)) {
            return operations;
        }
        operations[at].kind = Kind::Attention(Attention { num_key_value_heads: degree, ..attention });
        let (keys, repeated) = (num_key_value_heads * head_size, degree * head_size);
        for one in &mut operations[..at] {
            match &mut one.kind {
                Kind::Product(product) if product.cut == Cut::Outputs && product.outputs == keys => {
                    product.outputs = repeated;
                    product.num_biases *= degree / num_key_value_heads;
                }
                // What is done to queries and keys, or to a part of each head.
                Kind::Pass(pass)
                    if pass.is_cut && pass.width.is_multiple_of(num_heads + num_key_value_heads) =>
                {
                    pass.width = pass.width / (num_heads + num_key_value_heads) * (num_heads + degree);
                }
                Kind::Norm(..) if one.rows.factor == num_key_value_heads && num_key_value_heads > 1 => {
                    one.rows.factor = degree;
                }
                _ => {}
            }
        }
        operations
    }

    /// Work of a phase over segments, with values of `size` bytes.
    pub fn work(&self, segments: &[u64], phase: Phase, size: u64) -> Work {
        self.operations.iter().fold(Work::default(), |sum, operation| {
            let work = operation.work(segments, phase, size);
            Work {
                flops: sum.flops + work.flops,
                bytes: sum.bytes + work.bytes,
                kernels: sum.kernels + work.kernels,
            }
        })
    }
}

impl Architecture {
    /// The modules, each once, in the order of the forward.
    pub fn modules(&self) -> Vec<Module> {
        let encoder = &self.encoder;
        let mut modules = vec![encoder.embedding(), encoder.layer(false)];
        if encoder.num_window_layers > 0 {
            modules.push(encoder.layer(true));
        }
        modules.extend(encoder.merged_layer());
        modules.retain(|module| module.count > 0);
        modules.push(self.projector());
        modules.extend(self.sound_modules());
        modules.extend([self.llm.embedding(), self.llm.layer()]);
        modules.extend(self.llm.linear_layer());
        modules.extend(self.llm.sliding_layer());
        modules.extend(self.llm.conv_layer());
        modules.extend(self.llm.dense_layer());
        modules.push(self.llm.head());
        modules
    }

    /// Those of the second encoder, by its own names.
    fn sound_modules(&self) -> Vec<Module> {
        let Some((encoder, projector)) = self.sound else { return Vec::new() };
        let alone = Self { encoder, projector, sound: None, ..self.clone() };
        let modules = [encoder.embedding(), encoder.layer(false), alone.projector()];
        let named = modules.into_iter().zip(ModelProfile::SECOND_TOWER);
        named.map(|(module, name)| Module { name, ..module }).collect()
    }

    /// Parameters of the whole model, each matrix once, as its checkpoint has them.
    pub fn num_parameters(&self) -> u64 {
        let all: u64 = self.modules().iter().map(|module| module.count * module.num_parameters()).sum();
        // Head and embedding each hold the matrix that is one in the checkpoint.
        let shared = if self.llm.is_tied { self.llm.vocabulary * self.llm.width } else { 0 };
        all - shared
    }
}

impl Encoder {
    fn embedding(&self) -> Module {
        let patches = Rows { dropped: self.num_class_tokens, ..Rows::EACH };
        let mut operations = match self.patches {
            Patches::Pixels { values, has_bias } => {
                let num_biases = if has_bias { self.width } else { 0 };
                let Operation { rows, kind } = product(patches, values, self.width, num_biases);
                vec![Operation { rows, kind: without_input_gradient(kind) }]
            }
            Patches::Sound { mel_bins } => {
                let twice = Rows { factor: 2, ..Rows::EACH };
                let first = product(twice, 3 * mel_bins, self.width, self.width);
                vec![
                    Operation { rows: twice, kind: without_input_gradient(first.kind) },
                    Operation { rows: twice, kind: activation(self.width, 1) },
                    product(Rows::EACH, 3 * self.width, self.width, self.width),
                    Operation { rows: Rows::EACH, kind: activation(self.width, 1) },
                ]
            }
            Patches::Chunks { mel_bins, frames, channels } => {
                chunk_operations(mel_bins, frames, channels, self.width)
            }
        };
        operations.push(Operation { rows: Rows::EACH, kind: residual(self.width) });
        if self.has_norm_before {
            operations.push(Operation { rows: Rows::EACH, kind: Kind::Norm(self.norm, self.width) });
        }
        operations.extend(self.merger_operations());
        Module {
            name: "encoder_embedding",
            count: 1,
            operations,
            num_table_parameters: self.num_table_parameters,
            has_input_gradient: false,
            ends_with_lookup: self.has_position_lookup,
            input_width: match self.patches {
                Patches::Pixels { values, .. } => values,
                Patches::Sound { mel_bins } => 2 * mel_bins,
                // The frames of a chunk are dealt out to its tokens.
                Patches::Chunks { mel_bins, frames, .. } => {
                    (mel_bins * frames).div_ceil(halved_thrice(frames)[2])
                }
            },
            unit_tokens: self.segment_tokens.unwrap_or(self.unit_tokens),
            segment_tokens: self.segment_tokens,
        }
    }

    pub(super) fn layer(&self, is_window: bool) -> Module {
        let width = self.width;
        let attention = Attention {
            num_heads: self.num_heads,
            num_key_value_heads: self.num_heads,
            head_size: width / self.num_heads,
            is_causal: false,
            window: None,
        };
        let mut kinds = vec![Kind::Norm(self.norm, width)];
        if self.has_one_qkv_product {
            kinds.push(matrix(width, 3 * width, self.num_qkv_biases * width, true, Cut::Outputs));
        } else {
            for index in 0..3 {
                let num_biases = if index < self.num_qkv_biases { width } else { 0 };
                kinds.push(matrix(width, width, num_biases, index == 0, Cut::Outputs));
            }
        }
        if self.has_qk_norm {
            kinds.extend([Kind::Norm(NormKind::Rms, width), Kind::Norm(NormKind::Rms, width)]);
        }
        let num_before = kinds.len();
        if self.has_rotation {
            kinds.push(rotation(2 * width));
        }
        if self.has_more_norms {
            // Either half of a head is rotated by one axis; then the halves stand side by side again.
            kinds.push(cut_pass(pass(2 * width, 2, 2, 0, 2, 2)));
        }
        kinds.push(Kind::Attention(attention));
        if self.num_kept_copies > 0 {
            kinds.push(cut_pass(pass(self.num_kept_copies * width, 0, 0, 1, 0, 0)));
        }
        let num_biases = if self.has_other_biases { width } else { 0 };
        kinds.push(matrix(width, width, num_biases, true, Cut::Inputs));
        let scale = |kinds: &mut Vec<Kind>| {
            if self.has_more_norms {
                kinds.push(Kind::Norm(self.norm, width));
            }
            if self.has_layer_scale {
                kinds.push(layer_scale(width));
            }
            kinds.push(residual(width));
        };
        scale(&mut kinds);
        kinds.push(Kind::Norm(self.norm, width));
        kinds.extend(mlp(self.mlp, width, self.mlp_width, self.has_other_biases, self.num_kept_activations));
        scale(&mut kinds);
        let mut operations = each(kinds);
        if self.has_more_norms {
            let norms = [self.norm, self.norm, NormKind::RmsUnscaled].map(|norm| Operation {
                rows: Rows { factor: self.num_heads, ..Rows::EACH },
                kind: Kind::Norm(norm, width / self.num_heads),
            });
            operations.splice(num_before..num_before, norms);
        }
        if self.has_head_norm {
            let norm = Operation {
                rows: Rows { factor: self.num_heads, ..Rows::EACH },
                kind: Kind::Norm(self.norm, width / self.num_heads),
            };
            operations.splice(num_before..num_before, [norm; 2]);
        }
        Module {
            name: if is_window { ModelProfile::WINDOW_LAYER } else { "encoder_layer" },
            count: if is_window {
                self.num_window_layers
            } else {
                self.num_layers - self.num_window_layers - self.merger.map_or(0, |merger| merger.num_layers)
            },
            operations,
            num_table_parameters: if self.has_layer_scale { 2 * width } else { 0 },
            has_input_gradient: true,
            ends_with_lookup: false,
            input_width: width,
            unit_tokens: self.segment_tokens.unwrap_or(self.unit_tokens),
            segment_tokens: if is_window { self.window_tokens } else { self.segment_tokens },
        }
    }
}

/// A length after each of three convolutions that take every other position, the first and the last included.
fn halved_thrice(length: u64) -> [u64; 3] {
    let [first, second] = [length.div_ceil(2), length.div_ceil(4)];
    [first, second, length.div_ceil(8)]
}

/// From chunks of a spectrogram to tokens, of which a chunk has as many as the last convolution has columns.
///
/// A convolution is a product over windows of nine values of each channel. What it keeps is its input, which the activation
/// before it has made.
fn chunk_operations(mel_bins: u64, frames: u64, channels: u64, width: u64) -> Vec<Operation> {
    let (columns, bins) = (halved_thrice(frames), halved_thrice(mel_bins));
    let tokens = columns[2];
    let mut operations = Vec::new();
    for (index, (columns, bins)) in columns.into_iter().zip(bins).enumerate() {
        let rows = Rows { factor: columns * bins, merged: tokens, ..Rows::EACH };
        let inputs = if index == 0 { 1 } else { channels };
        let kind = match matrix(9 * inputs, channels, channels, false, Cut::Whole) {
            kind if index == 0 => without_input_gradient(kind),
            kind => kind,
        };
        if index == 0 {
            // Four values of the spectrogram for each position.
            operations.push(Operation { rows, kind: pass(4, 0, 0, 1, 0, 0) });
        }
        // Beside what goes into the activation: its result, which the next convolution reads.
        let kept = if index == 2 { 1 } else { 2 };
        let activated = pass(channels, 2, 3, kept, 1, 1);
        operations.extend([kind, activated].map(|kind| Operation { rows, kind }));
    }
    // Channels and bins of a column side by side: a copy, which the product keeps.
    let joined = bins[2] * channels;
    operations.push(Operation { rows: Rows::EACH, kind: pass(joined, 2, 2, 0, 1, 1) });
    operations.push(product(Rows::EACH, joined, width, 0));
    operations
}

pub(super) fn each(kinds: Vec<Kind>) -> Vec<Operation> {
    kinds.into_iter().map(|kind| Operation { rows: Rows::EACH, kind }).collect()
}

pub(super) fn product(rows: Rows, inputs: u64, outputs: u64, num_biases: u64) -> Operation {
    Operation { rows, kind: matrix(inputs, outputs, num_biases, true, Cut::Whole) }
}

pub(super) const fn matrix(inputs: u64, outputs: u64, num_biases: u64, keeps_input: bool, cut: Cut) -> Kind {
    let keepers = 1;
    Kind::Product(Product {
        inputs,
        outputs,
        num_biases,
        keeps_input,
        keeps_all_rows: false,
        keepers,
        has_input_gradient: true,
        cut,
        num_experts: 1,
        is_split: true,
        is_frozen: false,
    })
}

const fn without_input_gradient(kind: Kind) -> Kind {
    match kind {
        Kind::Product(product) => Kind::Product(Product { has_input_gradient: false, ..product }),
        other => other,
    }
}

pub(super) fn mlp(kind: MlpKind, width: u64, inner: u64, has_bias: bool, kept: u64) -> Vec<Kind> {
    let bias = |outputs: u64| if has_bias { outputs } else { 0 };
    let first = |keeps| matrix(width, inner, bias(inner), keeps, Cut::Outputs);
    let last = matrix(inner, width, bias(width), true, Cut::Inputs);
    match kind {
        MlpKind::Plain => vec![first(true), cut_pass(activation(inner, kept)), last],
        MlpKind::Gated => vec![first(true), first(false), gate(inner), last],
    }
}

/// An activation function: reads, writes; backward reads input and gradient, writes. Its input is kept, and where it is
/// written as a product also the factor.
pub(super) const fn activation(width: u64, kept: u64) -> Kind {
    pass(width, 2 * kept, 3 * kept, kept, kept, kept)
}

/// `SiLU` of one product times the other: two functions. Both products and the activation are kept.
pub(super) const fn gate(width: u64) -> Kind {
    cut_pass(pass(width, 5, 9, 3, 2, 3))
}

/// A sum with what came in; its gradient joins that of the branch. Nothing is kept.
pub(super) const fn residual(width: u64) -> Kind {
    pass(width, 3, 3, 0, 1, 1)
}

/// A learnt factor for each column.
const fn layer_scale(width: u64) -> Kind {
    pass(width, 2, 5, 1, 1, 3)
}

/// Queries and keys turned by their positions, as Hugging Face writes it: halves exchanged and negated, two products, a
/// sum, each over all values. Only sines and cosines are kept, once for all layers.
pub(super) const fn rotation(width: u64) -> Kind {
    cut_pass(pass(width, 11, 11, 0, 10, 10))
}

pub(super) const fn cut_pass(kind: Kind) -> Kind {
    match kind {
        Kind::Pass(pass) => Kind::Pass(Pass { is_cut: true, ..pass }),
        other => other,
    }
}

pub(super) const fn pass(
    width: u64,
    forward_moves: u64,
    backward_moves: u64,
    kept: u64,
    forward_kernels: u64,
    backward_kernels: u64,
) -> Kind {
    Kind::Pass(Pass {
        width,
        forward_moves,
        backward_moves,
        kept,
        kept_float32: 0,
        forward_kernels,
        backward_kernels,
        is_cut: false,
    })
}
