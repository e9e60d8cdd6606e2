//! A conversation as tokens: runs of text and of features, counted or laid out in full.

/// The label of a position without loss, as PyTorch's cross entropy ignores it.
pub const NO_LABEL: i64 = -100;

/// Tokens that follow each other and are of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Run {
    Text { ids: Vec<u32>, is_label: bool },
    Features { count: u32, id: u32 },
}

/// Token ids of a conversation, with places for media of any number of features.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenizedConversation {
    pub(super) runs: Vec<Run>,
    pub(super) order: Vec<usize>,
}

/// A sample as the LLM backbone reads it. The three lists are equally long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tokens {
    /// Token ids; placeholder ids where features go.
    pub input_ids: Vec<u32>,
    /// True where a feature takes the place of the embedding.
    pub feature_mask: Vec<bool>,
    /// The id at each position that carries loss, [`NO_LABEL`] elsewhere; not shifted.
    pub labels: Vec<i64>,
}

impl Tokens {
    /// Positions whose token is predicted from the one before with loss: those with a label, the first aside.
    pub fn label_tokens(&self) -> u32 {
        self.labels.iter().skip(1).filter(|&&label| label != NO_LABEL).count() as u32
    }
}

impl TokenizedConversation {
    /// What belongs to the conversation's media, in the order in which the text shows them: a template may write
    /// images before videos, whatever their order in the record.
    pub(crate) fn in_text_order<T>(&self, of_media: Vec<T>) -> Vec<T> {
        let mut slots: Vec<Option<T>> = of_media.into_iter().map(Some).collect();
        self.order.iter().filter_map(|&index| slots[index].take()).collect()
    }

    pub(super) fn push(&mut self, ids: Vec<u32>, is_label: bool) {
        if !ids.is_empty() {
            self.runs.push(Run::Text { ids, is_label });
        }
    }

    /// LLM tokens.
    pub(super) fn num_tokens(&self) -> u64 {
        let of_run = |run: &Run| match run {
            Run::Text { ids, .. } => ids.len() as u64,
            Run::Features { count, .. } => u64::from(*count),
        };
        self.runs.iter().map(of_run).sum()
    }

    /// (LLM tokens, label tokens): what [`TokenizedConversation::expand`] would give, without giving it. `None` from
    /// 2^32 tokens.
    pub fn count(&self) -> Option<(u32, u32)> {
        let (mut llm, mut label) = (0_u64, 0_u64);
        for run in &self.runs {
            match run {
                Run::Text { ids, is_label } => {
                    if *is_label {
                        // The first position of a sample is predicted from nothing.
                        label += ids.len() as u64 - u64::from(llm == 0);
                    }
                    llm += ids.len() as u64;
                }
                Run::Features { count, .. } => llm += u64::from(*count),
            }
        }
        Some((u32::try_from(llm).ok()?, label as u32))
    }

    /// The tokens.
    pub fn expand(&self) -> Tokens {
        let mut tokens = Tokens { input_ids: vec![], feature_mask: vec![], labels: vec![] };
        for run in &self.runs {
            match run {
                Run::Text { ids, is_label } => {
                    tokens.input_ids.extend_from_slice(ids);
                    tokens
                        .labels
                        .extend(ids.iter().map(|&id| if *is_label { i64::from(id) } else { NO_LABEL }));
                }
                Run::Features { count, id } => {
                    let length = tokens.input_ids.len() + *count as usize;
                    tokens.feature_mask.resize(tokens.input_ids.len(), false);
                    tokens.input_ids.resize(length, *id);
                    tokens.feature_mask.resize(length, true);
                    tokens.labels.resize(length, NO_LABEL);
                }
            }
        }
        tokens.feature_mask.resize(tokens.input_ids.len(), false);
        tokens
    }
}
