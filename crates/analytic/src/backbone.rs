//! The modules of the LLM backbone as steps.

use crate::architecture::{
    DENSE_LAYER, Experts, FullHeads, LINEAR_LAYER, Llm, MlpKind, NormKind, Router, SLIDING_LAYER,
};
use crate::delta_rule::{Convolution, DeltaRule};
use crate::modules::{Module, cut_pass, each, matrix, mlp, pass, residual, rotation};
use crate::operations::{Attention, Kind, Operation, Rows};
use crate::pass::Pass;
use crate::product::{Cut, Product};

impl Llm {
    pub(super) fn module(&self, name: &'static str, count: u64, kinds: Vec<Kind>) -> Module {
        Module {
            name,
            count,
            operations: each(kinds),
            num_table_parameters: 0,
            has_input_gradient: true,
            ends_with_lookup: false,
            input_width: self.width,
            unit_tokens: 1,
            segment_tokens: None,
        }
    }

    pub(super) fn embedding(&self) -> Module {
        let mut kinds = vec![Kind::Lookup { rows: self.vocabulary, width: self.width }];
        if self.has_scaled_embedding {
            // Times a constant, before features take the places of some rows.
            kinds.insert(0, pass(self.width, 2, 2, 0, 1, 1));
        }
        self.module("llm_embedding", 1, kinds)
    }

    /// A layer with full attention; the backbone may have others ([`Llm::linear_layer`], [`Llm::sliding_layer`],
    /// [`Llm::conv_layer`], [`Llm::dense_layer`]).
    pub(super) fn layer(&self) -> Module {
        let others = [
            self.linear.map(|linear| linear.num_layers),
            self.sliding.map(|sliding| sliding.num_layers),
            self.conv.map(|conv| conv.num_layers),
            self.experts.map(|experts| experts.num_dense_layers),
        ];
        let num_others: u64 = others.into_iter().flatten().sum();
        self.layer_with_attention("llm_layer", self.num_layers - num_others, None)
    }

    /// A layer whose attention stays within a window; `None` where the backbone has none.
    pub(super) fn sliding_layer(&self) -> Option<Module> {
        let sliding = self.sliding?;
        Some(self.layer_with_attention(SLIDING_LAYER, sliding.num_layers, Some(sliding.window)))
    }

    /// A layer without experts; `None` where none or all layers have no experts.
    pub(super) fn dense_layer(&self) -> Option<Module> {
        let count = self.experts?.num_dense_layers;
        let dense = Self { experts: None, ..*self };
        (count > 0).then(|| dense.layer_with_attention(DENSE_LAYER, count, None))
    }

    fn layer_with_attention(&self, name: &'static str, count: u64, window: Option<u64>) -> Module {
        let bias = |has: bool, outputs: u64| if has { outputs } else { 0 };
        let same = FullHeads {
            num_key_value_heads: self.num_key_value_heads,
            head_size: self.head_size,
            has_values: true,
        };
        let heads = self.full_heads.filter(|_| window.is_none()).unwrap_or(same);
        let attention = Attention {
            num_heads: self.num_heads,
            num_key_value_heads: heads.num_key_value_heads,
            head_size: heads.head_size,
            is_causal: true,
            window,
        };
        // Heads that differ are rotated whole.
        let rotated_size = if heads == same { self.rotated_size } else { heads.head_size };
        let (queries, keys) = (self.num_heads * heads.head_size, heads.num_key_value_heads * heads.head_size);
        let mut kinds = vec![Kind::Norm(self.norm, self.width)];
        // The gate of what attention gives comes of the product that gives the queries.
        let gates = if self.has_output_gate { queries } else { 0 };
        let outputs = [queries + gates, keys, keys];
        let num_products = if heads.has_values { 3 } else { 2 };
        for (index, outputs) in outputs.into_iter().take(num_products).enumerate() {
            let num_biases = bias(self.has_qkv_bias, outputs);
            kinds.push(matrix(self.width, outputs, num_biases, index == 0, Cut::Outputs));
        }
        let num_before = kinds.len();
        let num_rotated = (self.num_heads + heads.num_key_value_heads) * rotated_size;
        kinds.push(rotation(num_rotated));
        if rotated_size < heads.head_size {
            // What is rotated and what is not, side by side again.
            kinds.push(cut_pass(pass(queries + keys, 2, 2, 0, 2, 2)));
        }
        kinds.push(Kind::Attention(attention));
        if self.has_output_gate {
            // A copy of the gates, their sigmoid, and its product with what attention gives, which both are kept for.
            kinds.push(cut_pass(pass(queries, 7, 10, 2, 3, 4)));
        }
        kinds.push(matrix(queries, self.width, bias(self.has_out_bias, self.width), true, Cut::Inputs));
        let mut operations = each(kinds);
        operations.extend(self.after_attention());
        let mut module = self.module(name, count, Vec::new());
        module.operations = operations;
        let of_heads = |num_heads: u64, norm: NormKind| Operation {
            rows: Rows { factor: num_heads, ..Rows::EACH },
            kind: Kind::Norm(norm, heads.head_size),
        };
        let mut norms = Vec::new();
        if self.has_head_norm {
            norms.extend([self.num_heads, heads.num_key_value_heads].map(|count| of_heads(count, self.norm)));
        }
        if self.has_value_norm {
            norms.push(of_heads(heads.num_key_value_heads, NormKind::RmsUnscaled));
        }
        module.operations.splice(num_before..num_before, norms);
        if let Some(experts) = self.experts.filter(|experts| experts.router == Router::Scaled) {
            // The scale of what the router reads, and a number of each expert.
            module.num_table_parameters = self.width + experts.count;
        }
        module
    }

    /// A layer with linear attention; `None` where the backbone has none. A rank has heads of keys with the heads of values that
    /// read them, and works on all rows between the first product and the last.
    pub(super) fn linear_layer(&self) -> Option<Module> {
        let linear = self.linear?;
        let heads = linear.num_value_heads;
        let rule = DeltaRule {
            num_key_heads: linear.num_key_heads,
            num_value_heads: heads,
            key_size: linear.key_size,
            value_size: linear.value_size,
        };
        let (mixed, values) = (rule.qkv_width(), heads * linear.value_size);
        let product = |outputs: u64, keeps: bool| matrix(self.width, outputs, 0, keeps, Cut::Outputs);
        let mut operations = each(vec![
            Kind::Norm(self.norm, self.width),
            product(mixed, true),
            product(values, false),
            product(heads, false),
            product(heads, false),
            Kind::Convolution(Convolution { width: mixed, kernel: linear.kernel, has_activation: true }),
            // How much of a value is written (sigmoid), and how much of the state is left (softplus, times a learnt rate).
            cut_pass(wide_pass(pass(heads, 12, 16, 1, 7, 9), 2)),
            Kind::DeltaRule(rule),
        ]);
        operations.push(Operation {
            rows: Rows { factor: heads, ..Rows::EACH },
            kind: Kind::Norm(NormKind::Rms, linear.value_size),
        });
        operations.extend(each(vec![
            // The gate in float32, its activation, their product, back to the dtype.
            cut_pass(wide_pass(pass(values, 12, 18, 1, 4, 6), 2)),
            matrix(values, self.width, 0, true, Cut::Inputs),
        ]));
        operations.extend(self.after_attention());
        let mut module = self.module(LINEAR_LAYER, linear.num_layers, Vec::new());
        module.operations = operations;
        Some(module)
    }

    /// From the sum with what came in to the end of the layer.
    pub(super) fn after_attention(&self) -> Vec<Operation> {
        let after = || self.has_norm_after.then_some(Kind::Norm(self.norm, self.width));
        let between = [residual(self.width), Kind::Norm(self.norm, self.width)];
        let mut operations = each(after().into_iter().chain(between).collect());
        let dense = || each(mlp(MlpKind::Gated, self.width, self.mlp_width, self.has_mlp_bias, 1));
        match self.experts {
            Some(experts) if experts.router == Router::Scaled => {
                let norm = Kind::Norm(self.norm, self.width);
                operations.extend(dense());
                operations.extend(each(vec![norm, Kind::Norm(NormKind::RmsUnscaled, self.width)]));
                let (routing, own) = experts.routing_and_own(self.width);
                operations.extend(routing);
                operations.extend(each(vec![norm]));
                operations.extend(own);
                operations.extend(each(vec![norm, residual(self.width)]));
            }
            Some(experts) => operations.extend(experts.operations(self.width)),
            None if self.has_one_gate_product => operations.extend(each(self.mlp_of_one_product())),
            None => operations.extend(dense()),
        }
        operations.extend(each(after().into_iter().chain([residual(self.width)]).collect()));
        if self.has_layer_scalar {
            operations.extend(each(vec![pass(self.width, 2, 2, 0, 1, 1)]));
        }
        operations
    }

    /// A gated MLP whose two first products are one: their gradients are put side by side.
    fn mlp_of_one_product(&self) -> Vec<Kind> {
        let (width, inner) = (self.width, self.mlp_width);
        vec![
            matrix(width, 2 * inner, 0, true, Cut::Outputs),
            cut_pass(pass(inner, 5, 13, 3, 2, 4)),
            matrix(inner, width, 0, true, Cut::Inputs),
        ]
    }

    pub(super) fn head(&self) -> Module {
        let logits = matrix(self.width, self.vocabulary, 0, true, Cut::Whole);
        let loss = Kind::Loss { classes: self.vocabulary, is_capped: self.has_logit_cap };
        let kinds = vec![Kind::Norm(self.norm, self.width), logits, loss];
        self.module("llm_head", 1, kinds)
    }
}

impl Experts {
    /// From the norm to the sum with what came in, as transformers 5.23 runs it by default (`grouped_mm_experts_forward`):
    /// rows are copied once for each of their experts, sorted by expert, and put back.
    fn operations(self, width: u64) -> Vec<Operation> {
        // With a gate it is run before the others, without one after them: then its last product is not computed again.
        let shared = self.shared(width);
        let (routing, own) = self.routing_and_own(width);
        let (first, last) = if self.has_shared_gate { (shared, Vec::new()) } else { (Vec::new(), shared) };
        // Rows are gathered before the router, and results are summed behind all experts.
        within_cut([first, routing, own, last].concat())
    }

    /// Who goes where; and what the experts do.
    fn routing_and_own(self, width: u64) -> (Vec<Operation>, Vec<Operation>) {
        let copies = Rows { factor: self.per_token, ..Rows::EACH };
        let joint_of = |inputs, outputs, num_experts, keeps, cut| match matrix(inputs, outputs, 0, keeps, cut)
        {
            // Not linear maps of PyTorch, whose backward alone is split.
            Kind::Product(product) => Kind::Product(Product { num_experts, is_split: false, ..product }),
            other => other,
        };
        let joint = |inputs, outputs, cut| joint_of(inputs, outputs, self.count, true, cut);
        let of_copies = |kind| Operation { rows: copies, kind };
        let (is_sigmoid, is_scaled) = (self.router == Router::Sigmoid, self.router == Router::Scaled);
        // A float32 value is two moves, as those are counted from bfloat16.
        let one = u64::from(is_sigmoid || is_scaled);
        let routing = vec![
            // What it reads is kept once, here or by the expert that all rows read; a copy in float32 with the routing.
            Operation {
                rows: Rows::EACH,
                kind: joint_of(width, self.count, 1, self.shared_width == 0 && !is_sigmoid, Cut::Whole),
            },
            Operation {
                rows: Rows::EACH,
                kind: Kind::Routing {
                    num_experts: self.count,
                    num_chosen: self.per_token,
                    copied_width: if is_sigmoid { width } else { 0 },
                    scaled_width: if is_scaled { width } else { 0 },
                    is_frozen: false,
                },
            },
        ];
        let own = vec![
            // Rows to their experts.
            of_copies(pass(width, 2, 3, 0, 1, 5)),
            of_copies(joint(width, 2 * self.width, Cut::Outputs)),
            // As of a gated MLP, whose two first products are one here: their gradients are put side by side.
            of_copies(cut_pass(pass(self.width, 5, 13, 3, 2, 4))),
            of_copies(joint(self.width, width, Cut::Inputs)),
            // Times the expert's share, back to the order of tokens, their sum: in float32 where the share is.
            of_copies(pass(width, 2 + one, 6 + 2 * one, 1, 1, 3)),
            of_copies(pass(width, 2 + 2 * one, 3 + 3 * one, 0, 3, 5)),
            of_copies(pass(width, 1 + one, 0, 0, 1, 0)),
        ];
        (routing, within_cut(own))
    }

    /// The expert that every token reads, its gate where it has one, and the sum with what the others give.
    fn shared(self, width: u64) -> Vec<Operation> {
        if self.shared_width == 0 {
            return Vec::new();
        }
        let mut kinds = mlp(MlpKind::Gated, width, self.shared_width, false, 1);
        if !self.has_shared_gate {
            kinds.push(residual(width));
            return each(kinds);
        }
        // The router behind it and the gate read the same rows, and keep them whole.
        if let Some(Kind::Product(first)) = kinds.first_mut() {
            first.keeps_all_rows = true;
        }
        kinds.extend([
            matrix(width, 1, 0, false, Cut::Whole),
            pass(1, 2, 3, 1, 1, 1),
            // The gate times what the expert gives, which is kept for it; the sum.
            pass(width, 6, 6, 1, 2, 3),
        ]);
        each(kinds)
    }
}

/// The same steps, run where each rank has all rows.
fn within_cut(mut operations: Vec<Operation>) -> Vec<Operation> {
    for operation in &mut operations {
        operation.rows.is_within_cut = true;
    }
    operations
}

/// The same pass, whose forward also keeps this many float32 values for each of its own.
const fn wide_pass(kind: Kind, kept_float32: u64) -> Kind {
    match kind {
        Kind::Pass(pass) => Kind::Pass(Pass { kept_float32, ..pass }),
        other => other,
    }
}
