//! What is held of a model, as numbers and bytes: by replicas, and by a rank of the experts that are dealt out.

/// What replicas hold of a component, or of a stage of it: numbers and bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) num_trained: u64,
    pub(crate) gradient_bytes: u64,
    pub(crate) parameter_bytes: u64,
}

impl Held {
    /// All but `part` of it.
    pub(crate) const fn without(&self, part: &Self) -> Self {
        Self {
            num_trained: self.num_trained.saturating_sub(part.num_trained),
            gradient_bytes: self.gradient_bytes.saturating_sub(part.gradient_bytes),
            parameter_bytes: self.parameter_bytes.saturating_sub(part.parameter_bytes),
        }
    }
}

/// What a rank holds of the experts of a layer that are dealt out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Dealt {
    pub(crate) parameter_bytes: u64,
    pub(crate) num_parameters: u64,
    pub(crate) num_trained: u64,
    pub(crate) gradient_bytes: u64,
}

impl Dealt {
    /// As what replicas hold.
    pub(crate) const fn held(&self) -> Held {
        Held {
            num_trained: self.num_trained,
            gradient_bytes: self.gradient_bytes,
            parameter_bytes: self.parameter_bytes,
        }
    }
}
