//! Text-only GPT models as Megatron builds and runs them: a model without an encoder.
//!
//! Steps of a layer, with what each keeps for the backward (`s` tokens, `h` width, 16 bit): norm 2sh, product 2sh, attention
//! (queries, keys and values, result), product, dropout sh, norm 2sh, product 2sh, activation, product, dropout sh: with
//! fused attention and an inner width of 4h together 34sh, less where keys and values have fewer heads.
//!
//! *References*: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198,
//! section 4.

use crate::architecture::NormKind;
use crate::error::AnalyticError;
use crate::modules::{Module, gate, matrix, pass, residual};
use crate::operations::{Attention, Kind, Operation, Rows};
use crate::pass::Pass;
use crate::product::Cut;
use crate::work::Phase;

/// The program that runs a model, as far as it decides times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Software {
    /// Its name for people.
    pub name: &'static str,
    /// Time that the host takes to start one kernel, in nanoseconds.
    pub dispatch_ns: u64,
    /// What a collective inside a layer takes longer than in `nccl-tests`, in nanoseconds.
    pub collective_wait_ns: u64,
    /// Time of the host before the first layer in each microbatch: reading and sharing out the batch, in nanoseconds.
    pub batch_ns: u64,
    /// Time of the host behind the last layer in each microbatch: the loss is averaged over replicas and read, in
    /// nanoseconds.
    pub loss_ns: u64,
    /// Bytes of each gradient that are read and written between the backward and the optimizer: for the norm, and where
    /// they are scaled.
    pub gradient_bytes_moved: u64,
}

impl Software {
    /// Megatron-DeepSpeed of 2022 to 2023 under `PyTorch` 1, as in the runs that vTrain published: read off half of these
    /// runs (`results/2026-11_estimate_runs.md`).
    pub const MEGATRON_DEEPSPEED: Self = Self {
        name: "megatron-deepspeed",
        dispatch_ns: 39_000,
        collective_wait_ns: 65_000,
        batch_ns: 500_000,
        loss_ns: 1_600_000,
        gradient_bytes_moved: 4,
    };
    /// Megatron-Core of 2024 and later: assumed, as [`crate::estimate`] does.
    pub const MEGATRON_CORE: Self = Self {
        name: "megatron-core",
        dispatch_ns: 5_000,
        collective_wait_ns: 10_000,
        batch_ns: 100_000,
        loss_ns: 200_000,
        gradient_bytes_moved: 4,
    };
}

/// A text-only model and how it is run.
// Each is a fact of its own that a configuration states.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gpt {
    /// Layers.
    pub num_layers: u64,
    /// Width of a token.
    pub width: u64,
    /// Heads of the queries.
    pub num_heads: u64,
    /// Heads of keys and values.
    pub num_key_value_heads: u64,
    /// Width of a head.
    pub head_size: u64,
    /// Inner width of the MLP.
    pub mlp_width: u64,
    /// Whether the MLP has a gate: three matrices instead of two.
    pub has_gate: bool,
    /// Whether products have biases.
    pub has_bias: bool,
    /// Whether norms are RMS norms.
    pub has_rms_norm: bool,
    /// Rows of the embedding and of the head, as they are held.
    pub vocabulary: u64,
    /// Whether embedding and head are one matrix.
    pub is_tied: bool,
    /// Rows of the table of positions; 0: queries and keys are rotated.
    pub num_positions: u64,
    /// Tokens of every sequence.
    pub sequence_tokens: u64,
    /// Whether attention is one kernel; else its scores stand in memory.
    pub has_fused_attention: bool,
    /// Whether scores in memory are computed again in the backward instead of being kept.
    pub recomputes_attention: bool,
    /// Whether there is dropout.
    pub has_dropout: bool,
    /// Whether norms and dropout are cut over the ranks of a layer, too.
    pub has_sequence_parallel: bool,
    /// What runs it.
    pub software: Software,
}

impl Gpt {
    /// Its modules, of which one of `degree` ranks has a part: embedding, layer, head.
    ///
    /// # Errors
    /// [`AnalyticError::Degree`].
    pub fn modules(&self, degree: u32) -> Result<Vec<Module>, AnalyticError> {
        let degree = u64::from(degree);
        let part = |what, count: u64| {
            let is_whole = count.is_multiple_of(degree);
            if is_whole { Ok(count / degree) } else { Err(AnalyticError::Degree { what, count, degree }) }
        };
        let vocabulary = self.vocabulary.div_ceil(degree);
        let own = Part {
            heads: part("attention_heads", self.num_heads)?,
            // Where there are fewer key and value heads than ranks, several ranks hold the same head.
            key_value_heads: part("kv_heads", self.num_key_value_heads.max(degree))?,
            mlp_width: part("ffn_hidden_size", self.mlp_width)?,
            rows: Rows { ranks: if self.has_sequence_parallel { degree } else { 1 }, ..Rows::EACH },
            is_cut: degree > 1,
        };
        let dropout = self.has_dropout.then(|| dropout_of(self.width, 0));
        let reduce = |phase| (degree > 1).then(|| each(Kind::Reduce { width: self.width, phase }));
        let mut embedding = vec![each(Kind::Lookup { rows: vocabulary, width: self.width })];
        embedding.extend(reduce(Phase::Forward));
        embedding.extend(dropout.map(|kind| Operation { rows: own.rows, kind }));
        let mut head = vec![Operation { rows: own.rows, kind: self.norm() }];
        head.extend(reduce(Phase::Input));
        gathered_product(&mut head, own.rows, matrix(self.width, vocabulary, 0, true, Cut::Whole));
        head.push(each(Kind::LossInPlace(vocabulary)));
        let positions = self.num_positions * self.width;
        Ok(vec![
            Module { num_table_parameters: positions, ..self.module("llm_embedding", 1, embedding) },
            self.module("llm_layer", self.num_layers, self.layer(own)),
            self.module("llm_head", 1, head),
        ])
    }

    fn module(&self, name: &'static str, count: u64, operations: Vec<Operation>) -> Module {
        Module {
            name,
            count,
            operations,
            num_table_parameters: 0,
            has_input_gradient: true,
            ends_with_lookup: false,
            input_width: self.width,
            unit_tokens: self.sequence_tokens,
            segment_tokens: Some(self.sequence_tokens),
        }
    }

    fn layer(&self, own: Part) -> Vec<Operation> {
        let Part { heads, key_value_heads, mlp_width, rows, is_cut } = own;
        let reduce = |phase| is_cut.then(|| each(Kind::Reduce { width: self.width, phase }));
        let attention = Attention {
            num_heads: heads,
            num_key_value_heads: key_value_heads,
            head_size: self.head_size,
            is_causal: true,
            window: None,
        };
        let bias = |outputs: u64| if self.has_bias { outputs } else { 0 };
        let mut steps = vec![Operation { rows, kind: self.norm() }];
        let made = attention.qkv_width();
        steps.extend(reduce(Phase::Input));
        gathered_product(&mut steps, rows, matrix(self.width, made, bias(made), true, Cut::Whole));
        if self.num_positions == 0 {
            let rotated = (heads + key_value_heads) * self.head_size;
            steps.push(each(pass(rotated, 2, 2, 0, 2, 2)));
        }
        self.attention(&mut steps, attention);
        let result = heads * self.head_size;
        steps.push(each(matrix(result, self.width, bias(self.width), true, Cut::Whole)));
        steps.extend(reduce(Phase::Forward));
        steps.push(Operation { rows, kind: self.sum() });
        steps.push(Operation { rows, kind: self.norm() });
        steps.extend(reduce(Phase::Input));
        let inner = if self.has_gate { 2 * mlp_width } else { mlp_width };
        gathered_product(&mut steps, rows, matrix(self.width, inner, bias(inner), true, Cut::Whole));
        // Bias and activation are one kernel, which keeps its input.
        let activation = if self.has_gate { gate_of(mlp_width) } else { pass(mlp_width, 2, 3, 1, 1, 1) };
        steps.push(each(activation));
        steps.push(each(matrix(mlp_width, self.width, bias(self.width), true, Cut::Whole)));
        steps.extend(reduce(Phase::Forward));
        steps.push(Operation { rows, kind: self.sum() });
        steps
    }

    /// Attention in one kernel, or with its scores in memory: scale, mask and softmax in one pass (which keeps its result),
    /// dropout in another (which keeps its mask and its result).
    fn attention(&self, steps: &mut Vec<Operation>, attention: Attention) {
        if self.has_fused_attention {
            steps.push(each(Kind::Attention(attention)));
            return;
        }
        steps.push(each(Kind::Scores(attention)));
        let scores = attention.num_heads * self.sequence_tokens;
        let mut softmax = [pass(scores, 2, 3, 1, 1, 1), dropout_of(scores, 2)];
        if self.recomputes_attention {
            for kind in &mut softmax {
                if let Kind::Pass(pass) = kind {
                    *pass =
                        Pass { kept: 0, backward_moves: pass.backward_moves + pass.forward_moves, ..*pass };
                }
            }
        }
        let num_passes = if self.has_dropout { 2 } else { 1 };
        steps.extend(softmax.into_iter().take(num_passes).map(each));
    }

    const fn norm(&self) -> Kind {
        Kind::Norm(if self.has_rms_norm { NormKind::RmsFused } else { NormKind::Layer }, self.width)
    }

    /// Bias, dropout and sum with what came in, in one kernel; without dropout the sum.
    const fn sum(&self) -> Kind {
        if self.has_dropout { self.dropout_of_sum() } else { residual(self.width) }
    }

    /// Counted in half values, as a mask takes one byte: reads two values, writes one and the mask.
    const fn dropout_of_sum(&self) -> Kind {
        pass(self.width / 2, 7, 7, 1, 1, 2)
    }
}

/// What one rank has of a layer.
#[derive(Debug, Clone, Copy)]
struct Part {
    heads: u64,
    key_value_heads: u64,
    mlp_width: u64,
    /// Rows of norms and dropout.
    rows: Rows,
    /// Whether other ranks have the rest.
    is_cut: bool,
}

const fn each(kind: Kind) -> Operation {
    Operation { rows: Rows::EACH, kind }
}

/// A product whose input is, with sequence parallelism, kept in parts and gathered again in the backward.
fn gathered_product(steps: &mut Vec<Operation>, rows: Rows, kind: Kind) {
    let Kind::Product(product) = kind else { unreachable!("only products are asked for") };
    if rows == Rows::EACH {
        steps.push(each(kind));
        return;
    }
    let kept = pass(product.inputs, 0, 0, 1, 0, 0);
    steps.push(Operation { rows, kind: kept });
    steps.push(each(Kind::Product(crate::product::Product { keeps_input: false, ..product })));
}

/// In half values: reads and writes a value and the mask; keeps the mask and `kept_halves` more.
const fn dropout_of(width: u64, kept_halves: u64) -> Kind {
    pass(width / 2, 5, 5, 1 + kept_halves, 1, 1)
}

/// The gate in one kernel: reads both products, writes one value; both are kept.
const fn gate_of(width: u64) -> Kind {
    match gate(width) {
        Kind::Pass(gate) => Kind::Pass(Pass {
            forward_moves: 3,
            backward_moves: 5,
            kept: 2,
            forward_kernels: 1,
            backward_kernels: 1,
            ..gate
        }),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Megatron's 7-billion-parameter model of `memory_speed`: width 4,096, 8 of 32 heads of keys and values.
    fn seven_billion() -> Gpt {
        Gpt {
            num_layers: 32,
            width: 4_096,
            num_heads: 32,
            num_key_value_heads: 8,
            head_size: 128,
            mlp_width: 16_384,
            has_gate: false,
            has_bias: true,
            has_rms_norm: false,
            vocabulary: 131_200,
            is_tied: false,
            num_positions: 8_192,
            sequence_tokens: 8_192,
            has_fused_attention: true,
            recomputes_attention: false,
            has_dropout: true,
            has_sequence_parallel: false,
            software: Software::MEGATRON_CORE,
        }
    }

    fn layer(gpt: &Gpt, degree: u32) -> Module {
        gpt.modules(degree).unwrap().swap_remove(1)
    }

    fn kept(module: &Module, tokens: u64) -> u64 {
        module.operations.iter().map(|o| o.kept_bytes(&[tokens], 2)).sum()
    }

    #[test]
    fn a_layer_by_hand() {
        let (gpt, h) = (seven_billion(), 4_096);
        let whole = layer(&gpt, 1);
        // Queries, keys and values of 1.5 h, out, MLP of 4 h, biases, two norms.
        let parameters = h * 6_144 + 6_144 + h * h + h + 2 * h * 16_384 + 16_384 + h + 4 * h;
        assert_eq!(whole.num_parameters(), parameters);
        // 31 s h bytes: 34 with as many heads of keys and values as of queries; norms and attention keep numbers a row.
        assert_eq!(kept(&whole, 8_192), 8_192 * (31 * h + 2 * 8 + 4 * 32));
        let all_heads = layer(&Gpt { num_key_value_heads: 32, ..gpt }, 1);
        assert_eq!(kept(&all_heads, 8_192), 8_192 * (34 * h + 2 * 8 + 4 * 32));
        // Of four ranks each has a quarter of the products; norms, dropout and the inputs of two products are whole.
        let part = layer(&gpt, 4);
        assert_eq!(kept(&part, 8_192), 8_192 * (10 * h + 21 * h / 4 + 2 * 8 + 4 * 8));
        let cut = layer(&Gpt { has_sequence_parallel: true, ..gpt }, 4);
        assert_eq!(kept(&cut, 8_192), 8_192 / 4 * (31 * h + 2 * 8 + 4 * 32));
    }

    #[test]
    fn scores_in_memory_by_hand() {
        let (h, s, a) = (1_024, 1_024, 16);
        let gpt = Gpt {
            width: h,
            num_heads: a,
            num_key_value_heads: a,
            head_size: h / a,
            mlp_width: 4 * h,
            sequence_tokens: s,
            has_fused_attention: false,
            ..seven_billion()
        };
        // 34 s h and 5 a s^2: softmax, mask, what the second product reads.
        assert_eq!(kept(&layer(&gpt, 1), s), s * (34 * h + 2 * 8) + 5 * a * s * s);
        let again = Gpt { recomputes_attention: true, ..gpt };
        assert_eq!(kept(&layer(&again, 1), s), s * (34 * h + 2 * 8));
        // 24 s h^2 and 4 s^2 h operations forward, and twice that back.
        let flops = layer(&gpt, 1).flops(&[s]);
        let forward = u128::from(24 * s * h * h + 4 * s * s * h);
        assert_eq!((flops.forward, flops.input + flops.weight), (forward, 2 * forward));
        assert!(gpt.modules(3).is_err());
    }

    #[test]
    fn a_head_keeps_one_copy_of_the_logits() {
        let head = seven_billion().modules(1).unwrap().swap_remove(2);
        assert_eq!(head.num_parameters(), 131_200 * 4_096 + 2 * 4_096);
        assert_eq!(kept(&head, 8), 8 * (4 * 4_096 + 8 + 4 * 131_200));
        let reduces = |module: &Module, phase| -> u64 {
            module.operations.iter().map(|o| o.reduced_bytes(&[8], phase, 2)).sum()
        };
        // Megatron: two sums in the forward of a layer, two in its backward.
        let modules = seven_billion().modules(2).unwrap();
        let both = |at: usize| (reduces(&modules[at], Phase::Forward), reduces(&modules[at], Phase::Input));
        let one = 8 * 4_096 * 2;
        assert_eq!([both(0), both(1), both(2)], [(one, 0), (2 * one, 2 * one), (0, one)]);
    }
}
