//! The steps of a module's forward, and what each costs: products as `torch.utils.flop_counter` counts them.

use crate::architecture::NormKind;
use crate::delta_rule::{Convolution, DeltaRule};
use crate::pass::{Pass, norm_pass};
use crate::product::{Cut, Product, summed_bytes};
use crate::work::{Phase, Work};
use std::borrow::Cow;

/// Rows that a step works on: `factor * (tokens - dropped) / merged` of each segment, and a rank's part of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Tokens of a segment that it leaves out.
    pub dropped: u64,
    /// Rows of one merged token.
    pub factor: u64,
    /// Tokens that become one.
    pub merged: u64,
    /// Ranks that share the rows of all segments, the last of them with less; 1: each rank works on all.
    pub ranks: u64,
    /// Whether it runs where each rank has all rows, though it is whole: a router, and copies of rows for experts, between
    /// where rows are gathered and where results are summed.
    pub is_within_cut: bool,
}

impl Rows {
    /// One row a token.
    pub const EACH: Self = Self { dropped: 0, factor: 1, merged: 1, ranks: 1, is_within_cut: false };

    /// Rows of segments of these tokens.
    pub fn of(self, segments: &[u64]) -> u64 {
        let of_segment = |tokens: &u64| tokens.saturating_sub(self.dropped) * self.factor / self.merged;
        segments.iter().map(of_segment).sum::<u64>().div_ceil(self.ranks)
    }
}

/// Attention within segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attention {
    /// Heads of the queries.
    pub num_heads: u64,
    /// Heads of keys and values.
    pub num_key_value_heads: u64,
    /// Width of a head.
    pub head_size: u64,
    /// Whether a token sees only those before it. The counter takes no notice, kernels do half the work.
    pub is_causal: bool,
    /// How many tokens one sees at most, itself included, where only the last so many are seen, or those of its block where it is
    /// not causal; `None`: all.
    pub window: Option<u64>,
}

/// What a step does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A product.
    Product(Product),
    /// A norm of this kind over so many values.
    Norm(NormKind, u64),
    /// Attention.
    Attention(Attention),
    /// The two products of attention whose scores stand in memory between them, as Megatron runs them without a fused
    /// kernel; scale, mask, softmax and dropout are passes over the scores. The whole square is computed.
    Scores(Attention),
    /// An all-reduce of this many values a row over the ranks that a layer is cut over: of results in the forward, or of the
    /// gradients of what came in, in the backward.
    Reduce {
        /// Values of a row.
        width: u64,
        /// Its phase: F or I.
        phase: Phase,
    },
    /// The convolution of linear attention, or that in place of attention.
    Convolution(Convolution),
    /// The recurrence of linear attention.
    DeltaRule(DeltaRule),
    /// Work on each value alone.
    Pass(Pass),
    /// Which experts a row goes to, by its logits over all of them: a softmax or sigmoids, the largest, their shares, and the order
    /// of all (row, expert) by expert.
    Routing {
        /// Experts there are.
        num_experts: u64,
        /// Experts of a row.
        num_chosen: u64,
        /// Values of a row that are copied to float32 for the router; 0: it reads the row as it is, and takes a softmax.
        copied_width: u64,
        /// Values of a row that are scaled for the router, in the dtype; 0: none. Then shares are scaled too.
        scaled_width: u64,
        /// Whether the router is frozen: then the copies are not kept.
        is_frozen: bool,
    },
    /// Reads rows of a table with these numbers of rows and columns, and puts features in the place of some.
    Lookup {
        /// Rows of the table.
        rows: u64,
        /// Columns.
        width: u64,
    },
    /// Cross entropy in float32.
    Loss {
        /// Over so many classes.
        classes: u64,
        /// Whether their logits are capped by a hyperbolic tangent first.
        is_capped: bool,
    },
    /// The same over a rank's part of the classes, as Megatron has it: in place on one float32 copy of the logits.
    LossInPlace(u64),
}

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    /// What it works on.
    pub rows: Rows,
    /// What it does.
    pub kind: Kind,
}

impl Attention {
    /// How many tokens of a segment one sees at most.
    pub(super) fn seen(&self, tokens: u64) -> u64 {
        self.window.map_or(tokens, |window| tokens.min(window))
    }

    /// Floating point operations over segments, each `2 h s^2 d` for the scores and as much for the values; the backward
    /// makes the scores anew and four gradients: 5 products for 2. With a window of `w` tokens it is `s min(s, w)` for `s^2`.
    pub(super) fn flops(&self, segments: &[u64], phase: Phase) -> u128 {
        let squares: u128 = segments.iter().map(|&s| u128::from(s) * u128::from(self.seen(s))).sum();
        let one = 2 * squares * u128::from(self.num_heads * self.head_size);
        match phase {
            Phase::Forward => 2 * one,
            Phase::Input => 5 * one,
            Phase::Weight => 0,
        }
    }

    /// Whether tokens see each other within blocks of one size, whatever the segments.
    pub(super) const fn is_of_blocks(&self) -> bool {
        self.window.is_some() && !self.is_causal
    }

    /// Values of queries, keys and values of a row.
    pub(super) const fn qkv_width(&self) -> u64 {
        (self.num_heads + 2 * self.num_key_value_heads) * self.head_size
    }
}

impl Attention {
    /// Work of the two products with the scores in memory: each of them reads or writes the scores once; the backward has
    /// two products for each.
    fn scores_work(&self, segments: &[u64], rows: u64, phase: Phase, size: u64) -> Work {
        let squares: u128 = segments.iter().map(|&s| u128::from(s) * u128::from(s)).sum();
        let one = squares * u128::from(self.num_heads);
        let width = u128::from(self.qkv_width() + self.num_heads * self.head_size);
        let (products, kernels) = match phase {
            // Beside each product what stands around it: heads to the front, and back.
            Phase::Forward => (2, 6),
            Phase::Input => (4, 10),
            Phase::Weight => return Work::default(),
        };
        let bytes = (products * one + products / 2 * u128::from(rows) * width) * u128::from(size);
        Work { flops: products * 2 * one * u128::from(self.head_size), bytes, kernels }
    }
}

impl Operation {
    /// Parameters.
    pub fn num_parameters(&self) -> u64 {
        match self.kind {
            Kind::Product(product) => {
                product.num_experts * product.inputs * product.outputs + product.num_biases
            }
            Kind::Norm(NormKind::RmsUnscaled, _)
            | Kind::Attention(_)
            | Kind::Scores(_)
            | Kind::Reduce { .. }
            | Kind::Routing { .. }
            | Kind::Pass(_)
            | Kind::Loss { .. }
            | Kind::LossInPlace(_) => 0,
            Kind::Norm(NormKind::Layer, width) => 2 * width,
            Kind::Norm(_, width) => width,
            Kind::Lookup { rows, width } => rows * width,
            Kind::Convolution(convolution) => convolution.width * convolution.kernel,
            // Rates and biases of the decay.
            Kind::DeltaRule(rule) => 2 * rule.num_value_heads,
        }
    }

    /// Rows of each segment: fewer than tokens where they were merged.
    pub(super) fn segments<'a>(&self, tokens: &'a [u64]) -> Cow<'a, [u64]> {
        match self.rows.merged {
            1 => Cow::Borrowed(tokens),
            merged => tokens.iter().map(|tokens| tokens / merged).collect(),
        }
    }

    /// Work of one phase over segments, with values of `size` bytes.
    pub fn work(&self, segments: &[u64], phase: Phase, size: u64) -> Work {
        let rows = self.rows.of(segments);
        if rows == 0 {
            return Work::default();
        }
        match self.kind {
            Kind::Product(product) => product.work(rows, phase, size),
            Kind::Attention(attention) => {
                let width = attention.qkv_width() + attention.num_heads * attention.head_size;
                let (passes, kernels) = match phase {
                    Phase::Forward => (1, 1),
                    Phase::Input => (2, 2),
                    Phase::Weight => (0, 0),
                };
                let bytes = u128::from(passes * rows) * u128::from(width * size);
                Work { flops: attention.flops(&self.segments(segments), phase), bytes, kernels }
            }
            Kind::Scores(attention) => attention.scores_work(segments, rows, phase, size),
            Kind::Convolution(convolution) => convolution.work(segments, phase, size),
            Kind::DeltaRule(rule) => rule.work(segments, phase, size),
            // Its data goes over links ([`Operation::reduced_bytes`]), and a thread of its own starts it.
            Kind::Reduce { .. } => Work::default(),
            Kind::Norm(kind, width) => norm_pass(kind, width).work(rows, phase, size),
            Kind::Pass(pass) => pass.work(rows, phase, size),
            Kind::Routing { num_experts, num_chosen, copied_width, scaled_width, .. } => {
                // Float32 values of all experts, ids of 8 bytes of the chosen: as transformers 5.23 writes it
                // (`grouped_mm_experts_forward`), kernel by kernel.
                let (of_each, of_chosen, kernels) = match phase {
                    Phase::Forward => (size + 8, 150, 17),
                    Phase::Input => (16 + size, 100, 15),
                    Phase::Weight => (0, 0, 0),
                };
                let copied = if phase == Phase::Weight { 0 } else { copied_width * (size + 4) };
                // Two products with numbers, of which the first has a gradient for its own; and one of the shares.
                let (moves, share_bytes, more) = match phase {
                    _ if scaled_width == 0 => (0, 0, 0),
                    Phase::Forward => (4, 8 + 3 * size, 4),
                    Phase::Input => (7, 16 + 4 * size, 6),
                    Phase::Weight => (0, 0, 0),
                };
                let scaled = scaled_width * moves * size + num_chosen * share_bytes;
                let bytes = num_experts * of_each + num_chosen * of_chosen + copied + scaled;
                Work { flops: 0, bytes: u128::from(rows * bytes), kernels: kernels + more }
            }
            Kind::Lookup { rows: table, width } => {
                let moved = match phase {
                    // Rows out of the table, then features into their places.
                    Phase::Forward => 5 * rows,
                    Phase::Input => 3 * rows,
                    // The gradient is a whole table of zeros first, added to that of the microbatches before.
                    Phase::Weight => table + 2 * rows,
                };
                let moved = u128::from(moved) * u128::from(width * size);
                let summed =
                    if phase == Phase::Weight { u128::from(table * width) * summed_bytes(size) } else { 0 };
                Work { flops: 0, bytes: moved + summed, kernels: 3 }
            }
            Kind::Loss { classes, is_capped } => {
                // Logits to float32, their logarithmic softmax, its sum; back through both. A cap divides, takes the tangent
                // and multiplies; back it reads the tangent again.
                let capped = u64::from(is_capped);
                let moved = match phase {
                    Phase::Forward => size + 4 + 8 + capped * 24,
                    Phase::Input => 12 + 4 + size + capped * 28,
                    Phase::Weight => 0,
                };
                let kernels = 3 + 3 * capped;
                Work { flops: 0, bytes: u128::from(rows * moved) * u128::from(classes), kernels }
            }
            Kind::LossInPlace(classes) => {
                // Logits to float32 (read, written), the largest (read), exponents of the differences with their sum, their
                // quotient (each read and written); back: the softmax less one, times what comes in, to the dtype.
                let (moved, kernels) = match phase {
                    Phase::Forward => (size + 4 + 4 + 2 * 8, 8),
                    Phase::Input => (4 + 4 + size, 4),
                    Phase::Weight => (0, 0),
                };
                Work { flops: 0, bytes: u128::from(rows * moved) * u128::from(classes), kernels }
            }
        }
    }

    /// Bytes that ranks sum up together in a phase; 0 where they sum up nothing.
    pub fn reduced_bytes(&self, segments: &[u64], phase: Phase, size: u64) -> u64 {
        match self.kind {
            Kind::Reduce { width, phase: own } if own == phase => self.rows.of(segments) * width * size,
            _ => 0,
        }
    }

    /// Bytes that the forward keeps for the backward, with values of `size` bytes.
    pub fn kept_bytes(&self, segments: &[u64], size: u64) -> u64 {
        let rows = self.rows.of(segments);
        rows * match self.kind {
            Kind::Product(product) if product.keeps_input && !product.is_frozen => {
                return rows * product.inputs * size / product.keepers;
            }
            Kind::Product(_) | Kind::Lookup { .. } | Kind::Reduce { .. } => 0,
            // Its input, with mean and scale of each row in float32.
            Kind::Norm(NormKind::Layer, width) => width * size + 8,
            Kind::Norm(NormKind::RmsFused, width) => width * size + 4,
            // The input in float32, the scale of each row, and the result before the weight.
            Kind::Norm(NormKind::Rms, width) => width * (4 + size) + 4,
            // The result before the weight is kept for the gradient of the weight alone.
            Kind::Norm(NormKind::RmsFrozen | NormKind::RmsCentredFrozen, width) => width * 4 + 4,
            // The result before the weight is in float32 too.
            Kind::Norm(NormKind::RmsCentred, width) => width * 8 + 4,
            // Of each row its mean square too, whose power is taken.
            Kind::Norm(NormKind::RmsWide, width) => width * 8 + 8,
            Kind::Norm(NormKind::RmsWideFrozen | NormKind::RmsUnscaled, width) => width * 4 + 8,
            // Queries, keys, values, the logarithm of each row's sum; the result is kept by the product that reads it.
            Kind::Attention(attention) => attention.qkv_width() * size + 4 * attention.num_heads,
            // In float32 what the softmax gave, its largest and their sum; their shares in the dtype, sorted by expert.
            Kind::Routing { num_experts, num_chosen, copied_width: 0, scaled_width, is_frozen } => {
                let plain = 4 * (num_experts + num_chosen + 1) + num_chosen * size;
                // Sorted shares are in float32, beside the experts' numbers. For the gradients of the scale and of these numbers:
                // what is scaled.
                let scaled = if is_frozen { 0 } else { scaled_width * size + 4 * num_chosen };
                plain + if scaled_width > 0 { 4 * num_chosen + scaled } else { 0 }
            }
            // Of sigmoids all is in float32; a row that is in float32 is not copied.
            Kind::Routing { num_experts, num_chosen, copied_width, is_frozen, .. } => {
                4 * (num_experts + 2 * num_chosen + 1 + if size < 4 && !is_frozen { copied_width } else { 0 })
            }
            // Queries, keys and values; the scores that the second product reads are a pass's.
            Kind::Scores(attention) => attention.qkv_width() * size,
            Kind::Convolution(convolution) => {
                (1 + u64::from(convolution.has_activation)) * convolution.width * size
            }
            Kind::DeltaRule(rule) => rule.kept_bytes(size),
            Kind::Pass(pass) => pass.width * (pass.kept * size + pass.kept_float32 * 4),
            Kind::Loss { classes, is_capped } => 4 * classes * (1 + u64::from(is_capped)),
            Kind::LossInPlace(classes) => 4 * classes,
        }
    }

    /// Bytes of what a product or attention makes: what selective recomputation keeps.
    pub fn made_bytes(&self, segments: &[u64], size: u64) -> u64 {
        let rows = self.rows.of(segments);
        match self.kind {
            Kind::Product(product) => rows * product.outputs * size,
            Kind::Attention(attention) => rows * attention.num_heads * (attention.head_size * size + 4),
            Kind::Scores(attention) => rows * attention.num_heads * attention.head_size * size,
            _ => 0,
        }
    }

    /// Bytes of inputs that wait from I to W: those of a table are its ids.
    pub fn queued_input_bytes(&self, segments: &[u64], size: u64) -> u64 {
        let rows = self.rows.of(segments);
        match self.kind {
            Kind::Product(p) if p.keeps_input && p.waits() => rows * p.inputs * size,
            Kind::Lookup { .. } => 8 * rows,
            _ => 0,
        }
    }

    /// Bytes of gradients of outputs that wait from I to W; what is no product or table gives its gradients in I.
    pub fn queued_gradient_bytes(&self, segments: &[u64], size: u64) -> u64 {
        let rows = self.rows.of(segments);
        match self.kind {
            Kind::Product(product) if product.waits() => rows * product.outputs * size,
            Kind::Lookup { width, .. } => rows * width * size,
            _ => 0,
        }
    }

    /// Bytes held for a while: what the backward holds of a step's inputs and outputs, and a weight's new gradient.
    pub fn workspace_bytes(&self, segments: &[u64], size: u64) -> u64 {
        let rows = self.rows.of(segments);
        match self.kind {
            Kind::Reduce { width, .. } => rows * width * size,
            Kind::Product(p) => {
                let gradient = if p.is_frozen { 0 } else { p.num_experts * p.inputs * p.outputs };
                (rows * (p.inputs + p.outputs) + gradient) * size
            }
            Kind::Routing { num_experts, num_chosen, copied_width, .. } => {
                rows * (4 * (num_experts + copied_width) + 32 * num_chosen)
            }
            Kind::Norm(_, width) => 3 * rows * width * 4,
            Kind::Attention(attention) | Kind::Scores(attention) => rows * attention.qkv_width() * size,
            Kind::Convolution(convolution) => 2 * rows * convolution.width * size,
            Kind::DeltaRule(rule) => rows * rule.state_width() * size,
            Kind::Pass(pass) => rows * pass.width * ((pass.kept + 1) * size + pass.kept_float32 * 4),
            Kind::Lookup { rows: table, width } => (table + 2 * rows) * width * size,
            Kind::Loss { classes, .. } => rows * classes * (size + 8),
            // The logits themselves; on the way back their gradient.
            Kind::LossInPlace(classes) => rows * classes * size,
        }
    }

    /// As [`Operation::cut`], in a layer whose ranks share the rows between its cut products.
    pub(super) fn cut_rows(&self, degree: u64) -> Option<Self> {
        let own = self.cut(degree)?;
        let shared = Rows { ranks: degree, ..own.rows };
        let is_between = !own.rows.is_within_cut;
        Some(match own.kind {
            // A norm over single heads works on all rows of its own heads.
            Kind::Norm(..) if own.rows.factor == self.rows.factor => Self { rows: shared, ..own },
            Kind::Pass(pass) if !pass.is_cut && is_between => Self { rows: shared, ..own },
            // The router of experts that stand beside an MLP.
            Kind::Routing { .. } if is_between => Self { rows: shared, ..own },
            Kind::Product(product) if product.cut == Cut::Whole && is_between => Self { rows: shared, ..own },
            Kind::Product(product) => {
                let keepers = product.keepers_of(degree);
                Self { kind: Kind::Product(Product { keepers, ..product }), ..own }
            }
            _ => own,
        })
    }

    /// The part of one of `degree` ranks; `None` where the degree does not divide it.
    pub fn cut(&self, degree: u64) -> Option<Self> {
        let part = |whole: u64| whole.is_multiple_of(degree).then(|| whole / degree);
        if let (Kind::Norm(..), 2..) = (self.kind, self.rows.factor) {
            // Over single heads, which are dealt out.
            return Some(Self { rows: Rows { factor: part(self.rows.factor)?, ..self.rows }, ..*self });
        }
        let kind = match self.kind {
            Kind::Product(product) => Kind::Product(product.cut(degree)?),
            Kind::Convolution(convolution) => Kind::Convolution(convolution.cut(degree)?),
            Kind::DeltaRule(rule) => Kind::DeltaRule(rule.cut(degree)?),
            // What merges tokens is whole on every rank.
            Kind::Attention(attention) if attention.is_of_blocks() => self.kind,
            Kind::Attention(attention) => Kind::Attention(Attention {
                num_heads: part(attention.num_heads)?,
                num_key_value_heads: part(attention.num_key_value_heads)?,
                ..attention
            }),
            Kind::Pass(pass) if pass.is_cut => Kind::Pass(Pass { width: part(pass.width)?, ..pass }),
            other => other,
        };
        Some(Self { kind, ..*self })
    }
}
