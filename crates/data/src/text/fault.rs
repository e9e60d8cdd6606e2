//! Faults of text: what keeps a conversation from becoming tokens.

/// Why a conversation has no tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextFault {
    /// What is wrong: value, rule.
    pub cause: String,
    /// Whether tokenizer or chat template are at fault, which every sample of the kind would meet, not this one.
    pub is_of_settings: bool,
}

impl From<String> for TextFault {
    /// A fault of the sample.
    fn from(cause: String) -> Self {
        Self { cause, is_of_settings: false }
    }
}

impl TextFault {
    pub(super) const fn of_settings(cause: String) -> Self {
        Self { cause, is_of_settings: true }
    }

    /// A fault that the chat template meets: what no template could call is its own, not the conversation's.
    pub(super) fn of_template(cause: String) -> Self {
        let is_of_settings = ["unknown filter", "unknown function", "unknown method", "unknown test"]
            .into_iter()
            .chain(["writes nothing for a part"])
            .any(|mark| cause.contains(mark));
        Self { cause, is_of_settings }
    }
}
