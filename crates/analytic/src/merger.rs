//! A merger between two layers of the encoder, and the layers behind it, which read a row for a window (MiniCPM-V 4.6).

use crate::architecture::{Encoder, MERGED_LAYER, NormKind};
use crate::modules::{Module, activation, matrix, pass, product, residual};
use crate::operations::{Attention, Kind, Operation, Rows};
use crate::product::Cut;

impl Encoder {
    /// A layer behind the merger; `None` where the encoder has none. Sizes are those of tokens before the merger.
    pub(super) fn merged_layer(&self) -> Option<Module> {
        let merger = self.merger?;
        let layer = self.layer(false);
        let of_windows = |operation: &Operation| {
            let rows = Rows { merged: operation.rows.merged * merger.window_tokens, ..operation.rows };
            Operation { rows, ..*operation }
        };
        Some(Module {
            name: MERGED_LAYER,
            count: merger.num_layers,
            operations: layer.operations.iter().map(of_windows).collect(),
            input_width: self.width.div_ceil(merger.window_tokens),
            ..layer
        })
    }

    /// The merger's steps; none where the encoder has none. They count with what makes the tokens, so that layers stay alone.
    ///
    /// ```text
    /// norm, attention within windows, sum -> the tokens of a window side by side: norm, product, activation, product; their mean
    /// ```
    pub(super) fn merger_operations(&self) -> Vec<Operation> {
        let Some(merger) = self.merger else { return Vec::new() };
        let (width, tokens, inner) = (self.width, merger.window_tokens, merger.inner_width);
        let attention = Attention {
            num_heads: self.num_heads,
            num_key_value_heads: self.num_heads,
            head_size: width / self.num_heads,
            is_causal: false,
            window: Some(tokens),
        };
        let of_tokens = [
            Kind::Norm(NormKind::Layer, width),
            matrix(width, width, width, true, Cut::Whole),
            matrix(width, width, width, false, Cut::Whole),
            matrix(width, width, width, false, Cut::Whole),
            Kind::Attention(attention),
            matrix(width, width, width, true, Cut::Whole),
            residual(width),
        ];
        let rows = Rows { merged: tokens, ..Rows::EACH };
        let of_windows = [
            Kind::Norm(NormKind::Layer, tokens * width),
            product(rows, tokens * width, inner, inner).kind,
            activation(inner, 1),
            product(rows, inner, width, width).kind,
            // The mean, and its sum with the branch; back its gradient is spread over the tokens.
            pass(width, tokens + 4, 2 * tokens + 2, 0, 2, 3),
        ];
        let each = of_tokens.into_iter().map(|kind| Operation { rows: Rows::EACH, kind });
        each.chain(of_windows.into_iter().map(|kind| Operation { rows, kind })).collect()
    }
}
