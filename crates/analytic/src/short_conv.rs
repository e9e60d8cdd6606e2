//! A layer of the backbone that has a gated short convolution in place of attention (LFM2).

use crate::architecture::{CONV_LAYER, Llm, ShortConv};
use crate::delta_rule::Convolution;
use crate::modules::{Module, cut_pass, each, matrix, pass};
use crate::operations::Kind;
use crate::product::Cut;

impl Llm {
    /// A layer with a short convolution; `None` where the backbone has none. A rank has columns, with their gates.
    ///
    /// ```text
    /// norm, product -> b, c, x -> convolution of b x -> times c, product
    /// ```
    pub(super) fn conv_layer(&self) -> Option<Module> {
        let ShortConv { num_layers, kernel } = self.conv?;
        let width = self.width;
        let mut operations = each(vec![
            Kind::Norm(self.norm, width),
            matrix(width, 3 * width, 0, true, Cut::Outputs),
            // The first gate's product with what it gates, whose factors are views of what the product made: all of it is kept, for
            // the other gate too. Back their three gradients are put side by side.
            cut_pass(pass(width, 3, 11, 3, 1, 3)),
            Kind::Convolution(Convolution { width, kernel, has_activation: false }),
            // The samples side by side, the other gate, tokens in front again.
            cut_pass(pass(width, 7, 9, 1, 3, 5)),
            matrix(width, width, 0, true, Cut::Inputs),
        ]);
        operations.extend(self.after_attention());
        Some(Module { operations, ..self.module(CONV_LAYER, num_layers, Vec::new()) })
    }
}
