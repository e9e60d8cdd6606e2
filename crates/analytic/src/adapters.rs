//! `LoRA` adapters: what they add to a layer, and what is left out of it where its own weights are frozen.
//!
//! ```text
//! y = W x + scale * B (A x)     W frozen; A [r, in], B [out, r]
//! ```
//!
//! As `python/dflop/models/adapters.py` puts them: on every linear map of the layers of the LLM backbone, without dropout.
//! Router and experts are no linear maps of PyTorch; they are frozen and have none.

use crate::architecture::{LLM_LAYERS, NormKind};
use crate::modules::{Module, matrix, pass};
use crate::operations::{Kind, Operation};
use crate::product::{Cut, Product};

impl Module {
    /// The module with adapters of this rank beside its frozen weights; `None` of a module that gets none, and at rank 0.
    ///
    /// Of the part of one of several ranks ([`Module::cut`]) it gives the part of the adapters: where outputs are cut B is cut,
    /// where inputs are cut A is cut, and the other of the two is whole on each rank.
    ///
    /// *Not modelled*: the sum over those ranks of the gradients of what is whole, once a step.
    pub fn with_adapters(&self, rank: u32) -> Option<Self> {
        if rank == 0 || !LLM_LAYERS.contains(&self.name) {
            return None;
        }
        let operations = self.operations.iter().flat_map(|one| adapted(*one, u64::from(rank))).collect();
        Some(Self { operations, ..self.clone() })
    }
}

/// A step with its weights frozen, and the steps of its adapters.
fn adapted(one: Operation, rank: u64) -> Vec<Operation> {
    let of = |kind| Operation { kind, ..one };
    match one.kind {
        Kind::Norm(NormKind::Rms, width) => vec![of(Kind::Norm(NormKind::RmsFrozen, width))],
        Kind::Norm(NormKind::RmsCentred, width) => vec![of(Kind::Norm(NormKind::RmsCentredFrozen, width))],
        Kind::Norm(NormKind::RmsWide, width) => vec![of(Kind::Norm(NormKind::RmsWideFrozen, width))],
        Kind::Product(product) => {
            let frozen = of(Kind::Product(Product { is_frozen: true, ..product }));
            if product.is_split { beside(frozen, product, rank) } else { vec![frozen] }
        }
        Kind::Routing { num_experts, num_chosen, copied_width, scaled_width, .. } => {
            vec![of(Kind::Routing { num_experts, num_chosen, copied_width, scaled_width, is_frozen: true })]
        }
        _ => vec![one],
    }
}

/// A frozen map with A, B, and the scaled sum. A keeps what the map would keep for its own gradient.
fn beside(frozen: Operation, product: Product, rank: u64) -> Vec<Operation> {
    let Product { inputs, outputs, keeps_input, keepers, .. } = product;
    let down = match matrix(inputs, rank, 0, keeps_input, Cut::Whole) {
        Kind::Product(down) => Kind::Product(Product { keepers, ..down }),
        other => other,
    };
    let kinds = [
        // The gradients that the map and A give to what both read, summed.
        pass(inputs, 0, 3, 0, 0, 1),
        frozen.kind,
        down,
        matrix(rank, outputs, 0, true, Cut::Whole),
        // The scale reads and writes, the sum reads two and writes one; the backward scales.
        pass(outputs, 5, 2, 0, 2, 1),
    ];
    kinds.into_iter().map(|kind| Operation { kind, ..frozen }).collect()
}
