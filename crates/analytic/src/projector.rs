//! The module between the encoder's layers and the LLM.

use crate::architecture::{Architecture, NormKind};
use crate::modules::{Module, activation, gate, matrix, pass, product};
use crate::operations::{Kind, Operation, Rows};
use crate::pass::Pass;
use crate::product::{Cut, Product};

impl Architecture {
    /// What stands after the encoder's layers: its last norm, pooling or merging, products.
    pub(super) fn projector(&self) -> Module {
        let (encoder, projector) = (&self.encoder, &self.projector);
        let single =
            Rows { dropped: projector.num_dropped_tokens, merged: projector.pooled_tokens, ..Rows::EACH };
        let rows = Rows { merged: projector.merged_tokens * projector.pooled_tokens, ..single };
        let width = encoder.width * projector.merged_tokens;
        let bias = |outputs: u64| if projector.has_bias { outputs } else { 0 };
        let hidden = self.llm.width;
        let mut operations = Vec::new();
        if let Some(pooled) = projector.pooled_norm {
            let each = Rows { merged: 1, ..single };
            let last = joint(product(rows, width, hidden, 0).kind);
            operations.extend(
                projector.norm.map(|(kind, _)| Operation { rows: each, kind: Kind::Norm(kind, width) }),
            );
            // A copy with the columns in front, which is kept for the means of its squares.
            operations.push(Operation { rows: each, kind: pass(width, 3, 3, 1, 2, 2) });
            operations.extend([Kind::Norm(pooled, width), last].map(|kind| Operation { rows, kind }));
            return self.projector_of(operations);
        }
        if let Some((kind, is_merged)) = projector.norm {
            let (norm_rows, norm_width) = if is_merged { (rows, width) } else { (single, encoder.width) };
            let norm = Operation { rows: norm_rows, kind: Kind::Norm(kind, norm_width) };
            operations.extend(std::iter::repeat_n(norm, 1 + usize::from(projector.has_second_norm)));
        }
        if projector.has_merged_norm {
            operations.push(Operation { rows, kind: Kind::Norm(NormKind::Layer, width) });
        }
        if let Some(inner) = projector.gated_width {
            // A convolution first, which is no linear map of PyTorch.
            let kinds = [
                joint(product(rows, width, hidden, hidden).kind),
                matrix(hidden, hidden, 0, true, Cut::Whole),
                Kind::Norm(NormKind::Layer, hidden),
                activation(hidden, 1),
                matrix(hidden, inner, 0, true, Cut::Whole),
                matrix(hidden, inner, 0, false, Cut::Whole),
                whole(gate(inner)),
                matrix(inner, hidden, 0, true, Cut::Whole),
            ];
            operations.extend(kinds.map(|kind| Operation { rows, kind }));
            return self.projector_of(operations);
        }
        if let Some(reduced) = projector.reduced_width {
            operations.push(product(rows, width, reduced, 0));
        }
        let width = projector.reduced_width.unwrap_or(width);
        match projector.inner_width {
            None => operations.push(product(rows, width, hidden, bias(hidden))),
            Some(inner) => operations.extend([
                product(rows, width, inner, bias(inner)),
                Operation { rows, kind: activation(inner, 1) },
                product(rows, inner, hidden, bias(hidden)),
            ]),
        }
        for _ in 0..projector.num_deep_layers {
            let inner = projector.inner_width.unwrap_or(width);
            operations.extend([
                Operation { rows, kind: Kind::Norm(NormKind::Layer, width) },
                product(rows, width, inner, bias(inner)),
                Operation { rows, kind: activation(inner, 1) },
                product(rows, inner, hidden, bias(hidden)),
            ]);
        }
        self.projector_of(operations)
    }

    fn projector_of(&self, operations: Vec<Operation>) -> Module {
        let (encoder, projector) = (&self.encoder, &self.projector);
        let unread_layers = encoder.num_unread_layers * encoder.layer(false).num_parameters();
        Module {
            name: "projector",
            count: 1,
            operations,
            num_table_parameters: projector.num_table_parameters
                + encoder.num_unread_parameters
                + unread_layers,
            has_input_gradient: true,
            ends_with_lookup: false,
            input_width: encoder.width,
            unit_tokens: encoder.segment_tokens.unwrap_or(encoder.unit_tokens),
            segment_tokens: encoder.segment_tokens,
        }
    }
}

/// A product that is no linear map of PyTorch.
const fn joint(kind: Kind) -> Kind {
    match kind {
        Kind::Product(product) => Kind::Product(Product { is_split: false, ..product }),
        other => other,
    }
}

/// A pass that no rank has a part of.
const fn whole(kind: Kind) -> Kind {
    match kind {
        Kind::Pass(pass) => Kind::Pass(Pass { is_cut: false, ..pass }),
        other => other,
    }
}
