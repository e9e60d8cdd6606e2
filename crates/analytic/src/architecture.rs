//! What a model is made of, in integers.

use crate::AnalyticError;
use dflop_types::ModelProfile;

/// A layer with linear attention, where other layers have full attention. A model profile has the mean of both as its
/// `llm_layer`.
pub const LINEAR_LAYER: &str = "llm_linear_layer";
/// A layer whose attention stays within a window, where other layers have attention over all tokens before. A model profile
/// has the mean of both as its `llm_layer`.
pub const SLIDING_LAYER: &str = "llm_sliding_layer";
/// A layer with a short convolution, where other layers have attention. A model profile has the mean of both as its
/// `llm_layer`.
pub const CONV_LAYER: &str = "llm_conv_layer";
/// A layer without experts, one of the first, where the other layers have them. In a model profile each counts as one
/// `llm_layer` more: their mean would be too little for every stage but that of these layers.
pub const DENSE_LAYER: &str = "llm_dense_layer";
/// An encoder layer behind a merger, which reads a row for a window of tokens. A model profile has the mean of those before
/// and behind it as its `encoder_layer`.
pub const MERGED_LAYER: &str = "encoder_merged_layer";
/// All kinds of layers of one or two encoders.
pub(super) const ENCODER_LAYERS: [&str; 4] =
    ["encoder_layer", ModelProfile::WINDOW_LAYER, MERGED_LAYER, ModelProfile::SECOND_TOWER[1]];
/// What has a row for each word of the vocabulary.
pub(super) const VOCABULARY: [&str; 2] = ["llm_embedding", "llm_head"];
/// All kinds of layers of the backbone.
pub(super) const LLM_LAYERS: [&str; 5] = ["llm_layer", LINEAR_LAYER, SLIDING_LAYER, CONV_LAYER, DENSE_LAYER];

/// How a norm is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// Mean and variance; weight and bias. One kernel.
    Layer,
    /// Root mean square; weight only. Hugging Face writes it as eight steps, in float32.
    Rms,
    /// The same in one kernel.
    RmsFused,
    /// As `Rms`, with a weight that is frozen.
    RmsFrozen,
    /// As `Rms`, times one more than the weight, all of it in float32.
    RmsCentred,
    /// As `RmsCentred`, with a weight that is frozen.
    RmsCentredFrozen,
    /// As `Rms`, times the weight, all of it in float32; the inverse root is written as a power.
    RmsWide,
    /// As `RmsWide`, with a weight that is frozen.
    RmsWideFrozen,
    /// As `RmsWide`, without a weight.
    RmsUnscaled,
}

/// What stands between the two outer matrices of a layer's MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlpKind {
    /// Two matrices, an activation function between them.
    Plain,
    /// Three matrices: the activation of one product times another.
    Gated,
}

/// How pixels or sound become encoder tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patches {
    /// One product a patch: of so many values, with or without a bias.
    Pixels {
        /// Values of a patch: channels, frames and both sides.
        values: u64,
        /// Whether a bias is added.
        has_bias: bool,
    },
    /// Whisper's two convolutions of width 3, the second of which takes every other position.
    Sound {
        /// Mel bins of a position.
        mel_bins: u64,
    },
    /// Three convolutions of 3 x 3 over chunks of a spectrogram, each of which takes every other row and column, and one
    /// product without a bias of what is left (Qwen3-Omni). The last chunk of a sound is computed whole.
    Chunks {
        /// Mel bins of a frame.
        mel_bins: u64,
        /// Mel frames of a chunk.
        frames: u64,
        /// Channels of each convolution.
        channels: u64,
    },
}

/// What makes one row of a window of encoder tokens, between two layers (MiniCPM-V 4.6): attention within the window, then an
/// MLP over its tokens side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowMerger {
    /// Layers behind it.
    pub num_layers: u64,
    /// Tokens of a window.
    pub window_tokens: u64,
    /// Inner width of its MLP.
    pub inner_width: u64,
}

/// The encoder.
// Each is a fact of its own that a configuration states.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoder {
    /// Layers that are run.
    pub num_layers: u64,
    /// Of those, layers whose attention stays within windows.
    pub num_window_layers: u64,
    /// Layers that the model holds and no forward reads, since features are taken before the last.
    pub num_unread_layers: u64,
    /// Width of a token.
    pub width: u64,
    /// Heads of attention; each is `width / num_heads` wide.
    pub num_heads: u64,
    /// Inner width of the MLP.
    pub mlp_width: u64,
    /// Its kind.
    pub mlp: MlpKind,
    /// Values that the forward keeps for each that goes through its activation function: 2 for `quick_gelu`, which
    /// Hugging Face writes as a product with a sigmoid; else 1.
    pub num_kept_activations: u64,
    /// Norms of its layers.
    pub norm: NormKind,
    /// Biases of the products that make queries, keys and values.
    pub num_qkv_biases: u64,
    /// Whether the output projection of attention and the products of the MLP have biases.
    pub has_other_biases: bool,
    /// Whether queries, keys and values come of one product.
    pub has_one_qkv_product: bool,
    /// Widths of a token that attention keeps beside queries, keys and values: the whole product where they are views of
    /// it and two of them were changed after it (2); a copy of the result where heads are stored one by one (1).
    pub num_kept_copies: u64,
    /// Whether positions are looked up in a table as ids are, which recomputation does again last.
    pub has_position_lookup: bool,
    /// Whether queries and keys go through RMS norms over the whole width.
    pub has_qk_norm: bool,
    /// Whether each head of queries and keys goes through a norm (GLM-OCR).
    pub has_head_norm: bool,
    /// Whether each head of queries, keys and values goes through a norm, and so does what attention and MLP add (Gemma 4).
    pub has_more_norms: bool,
    /// Whether a learnt factor scales what attention and MLP add.
    pub has_layer_scale: bool,
    /// Whether queries and keys are rotated by their position.
    pub has_rotation: bool,
    /// From pixels or sound to tokens.
    pub patches: Patches,
    /// Tokens of every segment, where there is only one size.
    pub segment_tokens: Option<u64>,
    /// Class tokens of a segment: no patch stands behind them.
    pub num_class_tokens: u64,
    /// Tokens of a window, where layers have windows.
    pub window_tokens: Option<u64>,
    /// Sizes of segments are multiples of this.
    pub unit_tokens: u64,
    /// Parameters before the layers beside the patches' own: positions, class token.
    pub num_table_parameters: u64,
    /// Whether a norm, of the kind of the layers', is run before the layers.
    pub has_norm_before: bool,
    /// Parameters after the layers that no forward reads: a norm or a head for other uses.
    pub num_unread_parameters: u64,
    /// What merges tokens between two layers; `None`: all layers read all tokens.
    pub merger: Option<WindowMerger>,
}

/// From encoder tokens to features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Projector {
    /// Norm, and whether it is over merged tokens (else over single ones).
    pub norm: Option<(NormKind, bool)>,
    /// Whether another norm of this kind is run right behind it, over the same tokens.
    pub has_second_norm: bool,
    /// Whether a layer norm over merged tokens follows.
    pub has_merged_norm: bool,
    /// Encoder tokens that become one feature by standing side by side.
    pub merged_tokens: u64,
    /// Encoder tokens that become one feature by their mean, before the norm; with `pooled_norm` after it.
    pub pooled_tokens: u64,
    /// Norm of the means, where the other norm is run before they are taken; one product without a bias follows, of a matrix
    /// that is no linear map of PyTorch.
    pub pooled_norm: Option<NormKind>,
    /// Tokens of a segment that it does not read (class tokens).
    pub num_dropped_tokens: u64,
    /// Output width of the first product, if the projector has one that reads merged tokens, without a bias.
    pub reduced_width: Option<u64>,
    /// Inner width, where it is two products with an activation between them.
    pub inner_width: Option<u64>,
    /// Inner width of a gated MLP, where merged tokens go through a product with a bias, one without, a layer norm and an
    /// activation before it, all of them as wide as the backbone.
    pub gated_width: Option<u64>,
    /// Whether its products have biases.
    pub has_bias: bool,
    /// Parameters beside: a newline.
    pub num_table_parameters: u64,
    /// Layers of the encoder whose tokens become features too, each by products of its own after a norm over merged
    /// tokens (`DeepStack`).
    pub num_deep_layers: u64,
}

/// Experts of a layer, of which each token reads a few: they stand in the place of its MLP, or beside it ([`Router::Scaled`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    /// How many there are.
    pub count: u64,
    /// How many of them each token reads.
    pub per_token: u64,
    /// Inner width of one, a gated MLP.
    pub width: u64,
    /// Inner width of the shared expert, which every token reads; 0: there is none.
    pub shared_width: u64,
    /// Whether what the shared expert gives is multiplied by a gate.
    pub has_shared_gate: bool,
    /// How experts are chosen.
    pub router: Router,
    /// The first layers of the backbone, which have the MLP and no experts.
    pub num_dense_layers: u64,
}

/// How a layer chooses the experts of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Router {
    /// By a softmax over all of them.
    Softmax,
    /// By a sigmoid of each, with a bias that no gradient reaches; from a copy of the token in float32.
    Sigmoid,
    /// By a softmax over all of them, of a normed copy of the token with a learnt scale; each share is times a number of its
    /// expert, and stays in float32. Such experts stand beside the MLP: either result has a norm, and their sum is read.
    Scaled,
}

/// Layers of the backbone whose attention is linear: a recurrence along the tokens (gated delta rule) behind a short
/// convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearAttention {
    /// How many of the backbone's layers are such.
    pub num_layers: u64,
    /// Heads of queries, and as many of keys.
    pub num_key_heads: u64,
    /// Heads of values: each goes with one of the keys', several with the same one.
    pub num_value_heads: u64,
    /// Width of a head of queries or keys.
    pub key_size: u64,
    /// Width of a head of values.
    pub value_size: u64,
    /// Tokens that the convolution reads for each.
    pub kernel: u64,
}

/// Layers of the backbone that have a gated short convolution in place of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShortConv {
    /// How many of the backbone's layers are such.
    pub num_layers: u64,
    /// Tokens that the convolution reads for each.
    pub kernel: u64,
}

/// Layers of the backbone whose attention stays within a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlidingAttention {
    /// How many of the backbone's layers are such.
    pub num_layers: u64,
    /// Tokens that one sees, itself included.
    pub window: u64,
}

/// Heads of the layers with full attention, where those of layers that see a window differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FullHeads {
    /// Heads of keys and values.
    pub num_key_value_heads: u64,
    /// Width of a head.
    pub head_size: u64,
    /// Whether values come of a product of their own; otherwise keys are values too.
    pub has_values: bool,
}

impl Llm {
    /// Whether a layer has an MLP: in place of experts, or beside them.
    pub fn has_mlp(&self) -> bool {
        self.experts.is_none_or(|experts| experts.num_dense_layers > 0 || experts.router == Router::Scaled)
    }

    /// Parameters of the layers that a token does not read: those of the experts beside its own.
    pub const fn num_unread_parameters(&self) -> u64 {
        match self.experts {
            None => 0,
            Some(experts) => {
                (self.num_layers - experts.num_dense_layers)
                    * (experts.count - experts.per_token)
                    * 3
                    * self.width
                    * experts.width
            }
        }
    }
}

/// The LLM backbone.
// Each is a fact of its own that a configuration states.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Llm {
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
    /// What its layers have in place of the MLP, or beside it, all but the first `Experts::num_dense_layers`; `None`: the MLP.
    pub experts: Option<Experts>,
    /// Rows of the embedding and of the head.
    pub vocabulary: u64,
    /// Whether embedding and head are one matrix.
    pub is_tied: bool,
    /// Whether queries, keys and values have biases.
    pub has_qkv_bias: bool,
    /// Whether the product after attention has one.
    pub has_out_bias: bool,
    /// Whether the MLP has them.
    pub has_mlp_bias: bool,
    /// Whether each head of queries and keys goes through an RMS norm.
    pub has_head_norm: bool,
    /// Norms of its layers, over heads too, and the last one.
    pub norm: NormKind,
    /// Values of a head of queries or keys that are rotated by their position.
    pub rotated_size: u64,
    /// Whether what attention gives is multiplied by a gate, made with the queries.
    pub has_output_gate: bool,
    /// Those of its layers that have linear attention; `None`: no layer has.
    pub linear: Option<LinearAttention>,
    /// Those of its layers that have a short convolution; `None`: no layer has.
    pub conv: Option<ShortConv>,
    /// Those of its layers whose attention stays within a window; `None`: no layer's does.
    pub sliding: Option<SlidingAttention>,
    /// Heads of the layers that see all tokens, where they are others; `None`: all layers have the same.
    pub full_heads: Option<FullHeads>,
    /// Whether each head of values goes through an RMS norm without a weight.
    pub has_value_norm: bool,
    /// Whether what a layer gives is multiplied by a number of its own that does not train.
    pub has_layer_scalar: bool,
    /// Whether logits are capped by a hyperbolic tangent.
    pub has_logit_cap: bool,
    /// Whether rows of the embedding are multiplied by a constant.
    pub has_scaled_embedding: bool,
    /// Whether the first two products of the MLP are one.
    pub has_one_gate_product: bool,
    /// Whether what attention and MLP add goes through an RMS norm of its own.
    pub has_norm_after: bool,
}

/// A model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Architecture {
    /// Its family, for example `llava_onevision`.
    pub family: String,
    /// The encoder.
    pub encoder: Encoder,
    /// Between the two.
    pub projector: Projector,
    /// A second encoder, which reads sounds beside one that reads pictures, and what stands between it and the backbone.
    pub sound: Option<(Encoder, Projector)>,
    /// The LLM backbone.
    pub llm: Llm,
}

impl Architecture {
    /// Whether heads and MLPs can be dealt out to the ranks of a layer. Heads of keys and values are repeated where there
    /// are fewer of them than ranks, so theirs is no limit.
    ///
    /// # Arguments
    /// `degrees`: tensor parallel degrees of encoder and LLM; `None`: none is asked for.
    ///
    /// # Errors
    /// [`AnalyticError::Undivided`] names the first number that is not divided.
    pub fn check_degrees(&self, degrees: [Option<u32>; 2]) -> Result<(), AnalyticError> {
        let sound = self.sound.as_ref().map(|(encoder, _)| encoder);
        let encoders = std::iter::once(&self.encoder).chain(sound);
        let encoders = encoders.map(|one| ("encoder", degrees[0], one.num_heads, one.mlp_width));
        let llm =
            ("LLM", degrees[1], self.llm.num_heads, if self.llm.has_mlp() { self.llm.mlp_width } else { 0 });
        let [expert_width, shared_width] =
            self.llm.experts.map_or([0; 2], |experts| [experts.width, experts.shared_width]);
        let columns = self.llm.conv.map_or(0, |_| self.llm.width);
        let key_heads = self.llm.linear.map_or(0, |linear| linear.num_key_heads);
        for (component, degree, num_heads, mlp_width) in encoders.chain([llm]) {
            let degree = u64::from(degree.unwrap_or(1)).max(1);
            let of_llm = |count: u64| if component == "LLM" { count } else { 0 };
            let counts = [
                ("attention heads", num_heads),
                ("heads of keys in its linear attention", of_llm(key_heads)),
                ("columns in its convolutions", of_llm(columns)),
                ("columns in its MLP", mlp_width),
                ("columns in each of its experts", of_llm(expert_width)),
                ("columns in the expert that all tokens read", of_llm(shared_width)),
            ];
            for (what, count) in counts {
                if !count.is_multiple_of(degree) {
                    let divides = |one: &u64| counts.iter().all(|(_, count)| count.is_multiple_of(*one));
                    let near = (1..degree.min(num_heads + 1)).rev().find(divides).unwrap_or(1);
                    return Err(AnalyticError::Undivided { component, what, count, degree, near });
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::catalogue_model;

    #[test]
    fn degrees_that_divide_nothing_are_named_with_their_numbers() {
        let model = catalogue_model("qwen2.5-vl-7b").unwrap().architecture().unwrap();
        let error = |encoder, llm| model.check_degrees([encoder, llm]).err().map(|error| error.to_string());
        assert_eq!(error(None, None), None);
        assert_eq!(error(Some(4), Some(4)), None);
        let of_mlp = "the LLM has 18944 columns in its MLP, which tensor parallel degree 7 does not divide";
        assert_eq!(error(Some(4), Some(7)).unwrap(), of_mlp);
        let of_llm = "the LLM has 28 attention heads, which tensor parallel degree 8 does not divide";
        assert_eq!(error(None, Some(8)).unwrap(), of_llm);
        let of_encoder = "the encoder has 16 attention heads, which tensor parallel degree 3 does not divide";
        assert_eq!(error(Some(3), Some(8)).unwrap(), of_encoder);
        let of_mlp =
            "the encoder has 3420 columns in its MLP, which tensor parallel degree 8 does not divide";
        assert_eq!(error(Some(8), None).unwrap(), of_mlp);
    }
}
