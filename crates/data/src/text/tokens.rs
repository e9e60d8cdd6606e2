//! Conversations as token ids: counted by the profiler, laid out for training, by one and the same walk.
//!
//! ```text
//! conversation -> chat template -> text with a placeholder a medium     (template.rs)
//!              -> the k-th placeholder of a kind becomes the pieces of its k-th medium, one feature token a run
//!              -> tokens of the whole text at once
//!              -> each feature token repeated as often as the medium has features
//! ```
//!
//! That equals `processor.apply_chat_template(tokenize=True)` of transformers 5.23: the tokenizer adds its special
//! tokens unless the text begins with `bos_token` already. The text is tokenised whole, so a merge may join the
//! header of an assistant's turn with its answer, as it does there; the model sees them apart when it answers.
//!
//! Loss is carried by tokens that overlap an answer. Where the template marks answers by `{% generation %}` those
//! are the tokens of `return_assistant_tokens_mask`. Where it does not, an answer is the assistant's content, and the
//! special token that follows it at once (the end of the turn) carries loss too.
//!
//! A document has no turns. Its texts carry loss, and the `eos_token` that is put at its end.

use crate::error::DataError;
use crate::family::model_files::ModelFiles;
use crate::family::{Family, Marks, MediaShape, Piece};
use crate::foreign::guarded;
use crate::media::MediaKind;
use crate::source::unread::UnreadField;
use crate::text::conversation::{Conversation, TurnPart, field_of_turns};
pub use crate::text::fault::TextFault;
use crate::text::template::{ChatTemplate, Rendered};
use crate::text::tokenized::Run;
pub use crate::text::tokenized::{NO_LABEL, TokenizedConversation, Tokens};
use crate::text::tokenizer::ModelTokenizer;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;
use tokenizers::{Encoding, Tokenizer};

/// Bytes of a text that is tokenised, at most. Tokenizers take some 240 bytes of memory for each: 1 GB for this one. It is
/// about a million tokens, more than any LLM backbone has positions.
pub const TEXT_BYTES_MAX: usize = 4 << 20;

/// A Hugging Face tokenizer with the chat template and the placeholders of a model.
#[derive(Debug)]
pub struct ChatTokenizer {
    opened: ModelTokenizer,
    template: ChatTemplate,
    /// Whether the model has another one for records with tools, which is not read.
    has_template_of_tools: bool,
    /// In place of it where a conversation has a video, as some processors have it.
    template_of_videos: Option<ChatTemplate>,
    /// A text that begins with it gets no special tokens.
    bos_token: Option<String>,
    /// What ends a document; `None` where the tokenizer has none.
    eos_id: Option<u32>,
    /// Ids of special tokens, ascending.
    special_ids: Vec<u32>,
    /// By [`MediaKind::index`]; `None` where the family reads no such media.
    marks: [Option<Mark>; 3],
}

/// How the media of one kind are written.
#[derive(Debug)]
struct Mark {
    placeholder: String,
    feature_token: String,
    /// `None` where the tokenizer lacks it.
    feature_id: Option<u32>,
    /// As in [`Marks`].
    number: Option<[&'static str; 2]>,
}

impl ChatTokenizer {
    /// The tokenizer of a model directory, whose `config.json` is `config`, with the marks of its family.
    ///
    /// # Errors
    /// [`DataError::Model`] and [`DataError::NoTemplate`].
    pub(crate) fn open(files: &ModelFiles, config: &Value, family: &dyn Family) -> Result<Self, DataError> {
        Self::with_marks(files, config, MediaKind::ALL.map(|kind| family.marks(kind)))
    }

    /// The tokenizer of a model directory, with media written as `marks` says: images, videos, sounds.
    ///
    /// # Errors
    /// [`DataError::Io`], [`DataError::Model`] and [`DataError::NoTemplate`].
    pub fn of_model(model_dir: &Path, marks: [Option<Marks>; 3]) -> Result<Self, DataError> {
        let files = ModelFiles::read(model_dir)?;
        let config = files.family_files()?.config;
        Self::with_marks(&files, &config, marks)
    }

    fn with_marks(
        files: &ModelFiles,
        config: &Value,
        of_family: [Option<Marks>; 3],
    ) -> Result<Self, DataError> {
        let (template_path, source) = files.template()?;
        let special_tokens = files.special_tokens()?;
        let vocabulary = vocabulary(config);
        let opened = ModelTokenizer::open(files, &special_tokens, vocabulary)?;
        let tokenizer = &opened.tokenizer;
        let model = |cause| files.tokenizer.unsound(cause);
        let mut marks = [None, None, None];
        for (mark, of_kind) in marks.iter_mut().zip(of_family) {
            *mark = of_kind
                .map(|of_kind| checked_mark(tokenizer, config, vocabulary, of_kind))
                .transpose()
                .map_err(model)?;
        }
        let placeholders = marks.each_ref().map(|mark| mark.as_ref().map(|mark| mark.placeholder.clone()));
        let compiled = |source: &str| ChatTemplate::new(source, &special_tokens, placeholders.clone());
        let of_videos = files.template_of_videos(config);
        let unsound = |cause| DataError::Model { path: template_path.clone(), cause };
        let template_of_videos = of_videos.map(compiled).transpose().map_err(unsound)?;
        let template = compiled(&source).map_err(unsound)?;
        let mut special_ids: Vec<u32> = tokenizer
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| token.special)
            .map(|(id, _)| id)
            .collect();
        special_ids.sort_unstable();
        let named =
            |name: &str| special_tokens.iter().find(|(n, _)| n == name).map(|(_, token)| token.clone());
        let (bos_token, eos_token) = (named("bos_token"), named("eos_token"));
        let eos_id = eos_token.and_then(|token| tokenizer.token_to_id(&token));
        let has_template_of_tools = files.has_template_of_tools()?;
        Ok(Self {
            opened,
            template,
            has_template_of_tools,
            template_of_videos,
            bos_token,
            eos_id,
            special_ids,
            marks,
        })
    }

    /// The conversation's tokens, each run of features a number still.
    ///
    /// *Complexity*: O(characters), the cost of the tokenizer.
    ///
    /// # Errors
    /// What the template, or the tokenizer, does not take.
    pub fn tokenize(
        &self,
        conversation: &Conversation,
        shapes: &[&MediaShape],
    ) -> Result<TokenizedConversation, TextFault> {
        check_length(conversation.turns.iter().flat_map(|turn| &turn.parts).map(|part| match part {
            TurnPart::Text(text) => text.len(),
            TurnPart::Media(_) => 0,
        }))?;
        check_length(more_of(conversation).map(|more| more.len()))?;
        self.refuse_marks(conversation)?;
        if self.has_template_of_tools && !conversation.tools.is_empty() {
            return Err(TextFault::of_settings(
                "the record has tools, and the model a chat template of its own for these (`tool_use`), which is not read: \
                 give that one as `data.chat_template`"
                    .to_owned(),
            ));
        }
        let rendered =
            self.template_for(conversation).render(conversation).map_err(TextFault::of_template)?;
        // As `startswith` of Python: an empty token begins every text.
        let has_bos = self.bos_token.as_ref().is_some_and(|bos| rendered.text.starts_with(bos.as_str()));
        let filled = self.fill(conversation, rendered, shapes)?;
        let text = filled.text.as_str();
        check_length([text.len()])?;
        self.opened.check_text(text)?;
        let tokenizer = &self.opened.tokenizer;
        let encoding = guarded(|| match filled.answers.as_slice() {
            [] => tokenizer.encode_fast(text, !has_bos),
            _ => tokenizer.encode(text, !has_bos),
        })
        .map_err(|error| format!("the tokenizer refuses a text: {error}"))?;
        let mut is_label = self.labels(&encoding, &filled.answers, conversation.is_document);
        if let Some(first) = is_label.first_mut().filter(|_| conversation.is_document) {
            // It is predicted from nothing.
            *first = false;
        }
        let mut tokens = Self::runs(&encoding, &is_label, filled).map_err(TextFault::of_settings)?;
        if let Some(id) =
            self.eos_id.filter(|id| conversation.is_document && encoding.get_ids().last() != Some(id))
        {
            tokens.push(vec![id], true);
        }
        self.opened.check_length(tokens.num_tokens())?;
        Ok(tokens)
    }

    /// Refuses a turn that writes what stands for a medium: the processor would take it for one.
    fn refuse_marks(&self, conversation: &Conversation) -> Result<(), String> {
        let texts = conversation.turns.iter().enumerate().flat_map(|(index, turn)| {
            let texts = turn.parts.iter().filter_map(|part| match part {
                TurnPart::Text(text) => Some(Cow::Borrowed(text.as_str())),
                TurnPart::Media(_) => None,
            });
            texts.map(move |text| (Some(index), text))
        });
        let more = more_of(conversation).map(|more| (None, Cow::Owned(more)));
        for (index, text) in texts.chain(more) {
            let marks = self.marks.iter().flatten();
            let mut held = marks.flat_map(|mark| [&mark.placeholder, &mark.feature_token]);
            if let Some(token) = held.find(|token| text.contains(token.as_str())) {
                let place = index.map_or("tools, or a field of a turn,".to_owned(), |index| {
                    format!("the text of turn {index}")
                });
                return Err(format!("{place} holds `{token}`, which stands for a medium: must not"));
            }
        }
        Ok(())
    }

    /// The messages that the chat template is rendered with, as JSON.
    pub(crate) fn messages(&self, conversation: &Conversation) -> String {
        self.template_for(conversation).messages(conversation)
    }

    /// Whether it is a field of turns that the chat template reads.
    pub(crate) fn reads(&self, field: &UnreadField) -> bool {
        field_of_turns(field).is_some_and(|name| self.template.reads(name))
    }

    fn template_for(&self, conversation: &Conversation) -> &ChatTemplate {
        let has_video = conversation.media.iter().any(|medium| medium.kind == MediaKind::Video);
        self.template_of_videos.as_ref().filter(|_| has_video).unwrap_or(&self.template)
    }

    /// The text with the pieces of the media where the placeholders stood.
    fn fill(
        &self,
        conversation: &Conversation,
        rendered: Rendered,
        shapes: &[&MediaShape],
    ) -> Result<Filled, TextFault> {
        if conversation.media.is_empty() {
            return Ok(Filled { text: rendered.text, answers: rendered.answers, ..Filled::default() });
        }
        let of_kind = |kind: usize| {
            let all = conversation.media.iter().enumerate();
            all.filter(move |(_, medium)| medium.kind.index() == kind).map(|(index, _)| index)
        };
        let used: Vec<(usize, &Mark)> = (0..3)
            .filter(|&kind| of_kind(kind).next().is_some())
            .filter_map(|kind| Some((kind, self.marks[kind].as_ref()?)))
            .collect();
        for (nth, (kind, mark)) in used.iter().enumerate() {
            if let Some((other, _)) =
                used[..nth].iter().find(|(_, other)| other.placeholder == mark.placeholder)
            {
                return Err(TextFault::from(format!(
                    "`{}` stands for {} and {} alike, a sample must have one of them",
                    mark.placeholder,
                    MediaKind::ALL[*other].as_str(),
                    MediaKind::ALL[*kind].as_str()
                )));
            }
        }
        let mut queues = [0, 1, 2].map(of_kind);
        let mut filled = Filled::default();
        let (mut done, mut counts) = (0, [0_usize; 3]);
        // Ends of placeholders before, and the shift of what follows them.
        let mut shifts = vec![(0, 0)];
        while let Some((at, kind, mark)) = next_placeholder(&rendered.text, done, &used) {
            filled.text.push_str(&rendered.text[done..at]);
            done = at + mark.placeholder.len();
            counts[kind] += 1;
            if let Some(index) = queues[kind].next() {
                filled.order.push(index);
                let id = mark.feature_id.ok_or_else(|| {
                    TextFault::of_settings(format!(
                        "the tokenizer lacks the token `{}` of {}",
                        mark.feature_token,
                        MediaKind::ALL[kind].as_str()
                    ))
                })?;
                if let Some([before, after]) = mark.number {
                    let number = (counts[kind] - 1).to_string();
                    filled.text.extend([before, &number, after]);
                }
                for piece in &shapes[index].pieces {
                    match piece {
                        Piece::Text(text) => filled.text.push_str(text),
                        Piece::Features(count) => {
                            filled.text.push_str(&mark.feature_token);
                            filled.features.push((id, *count));
                        }
                    }
                }
            }
            shifts.push((done, filled.text.len()));
        }
        for (kind, mark) in &used {
            let media = of_kind(*kind).count();
            if counts[*kind] != media {
                let cause = format!(
                    "the chat template writes {} `{}`, but the sample has {media} under {}: must be as many",
                    counts[*kind],
                    mark.placeholder,
                    MediaKind::ALL[*kind].as_str()
                );
                // One that writes none for any medium is no template for such samples.
                return Err(TextFault { cause, is_of_settings: counts[*kind] == 0 });
            }
        }
        filled.text.push_str(&rendered.text[done..]);
        let shifted = |at: usize| {
            let (end, new_end) = shifts[shifts.partition_point(|(end, _)| *end <= at) - 1];
            at - end + new_end
        };
        filled.answers = rendered.answers.iter().map(|span| shifted(span.start)..shifted(span.end)).collect();
        Ok(filled)
    }

    /// Which tokens carry loss.
    fn labels(&self, encoding: &Encoding, answers: &[Range<usize>], is_document: bool) -> Vec<bool> {
        let (ids, offsets) = (encoding.get_ids(), encoding.get_offsets());
        let mut is_label = vec![false; ids.len()];
        let mut first = 0;
        for answer in answers {
            let overlaps = |&(start, end): &(usize, usize)| start < answer.end && end > answer.start;
            while first < offsets.len() && offsets[first].1 <= answer.start {
                first += 1;
            }
            let mut token = first;
            while token < offsets.len() && offsets[token].0 < answer.end {
                // One of no width was put there by the tokenizer, or is a space that it leaves out of the text.
                is_label[token] |= overlaps(&offsets[token]);
                token += 1;
            }
            if self.template.has_generation() && !is_document {
                continue;
            }
            // A space inside an answer belongs to it.
            if let Some(last) = is_label[first..token].iter().rposition(|label| *label) {
                let begin = is_label[first..token].iter().position(|label| *label).unwrap_or(last);
                is_label[first + begin..=first + last].fill(true);
            }
            // What stands behind a text of a document belongs to a medium.
            if let (Some(&id), Some(&(start, end))) = (ids.get(token), offsets.get(token))
                && !is_document
                && start == answer.end
                && end > start
                && self.special_ids.binary_search(&id).is_ok()
            {
                is_label[token] = true;
            }
        }
        is_label
    }

    /// The tokens in runs of text and features.
    fn runs(encoding: &Encoding, is_label: &[bool], filled: Filled) -> Result<TokenizedConversation, String> {
        let mut tokens = TokenizedConversation { runs: Vec::new(), order: filled.order };
        let mut features = filled.features.iter().copied().peekable();
        let is_feature = |id: u32| filled.features.iter().any(|(feature, _)| *feature == id);
        let ids = encoding.get_ids();
        let (mut from, mut found) = (0, 0_usize);
        for at in 0..=ids.len() {
            let is_medium = at < ids.len() && !filled.features.is_empty() && is_feature(ids[at]);
            let is_break = at == ids.len() || is_medium || is_label[at] != is_label[from];
            if is_break && from < at {
                tokens.push(ids[from..at].to_vec(), is_label[from]);
                from = at;
            }
            if is_medium {
                found += 1;
                if let Some((id, count)) = features.next_if(|(id, _)| *id == ids[at]) {
                    tokens.runs.push(Run::Features { count, id });
                }
                from = at + 1;
            }
        }
        if found != filled.features.len() || features.peek().is_some() {
            return Err(format!(
                "the tokenizer makes {found} feature tokens of a text with {}: must be as many",
                filled.features.len()
            ));
        }
        Ok(tokens)
    }
}

/// What a conversation has beside its texts and media, as JSON: tools, and further fields of turns.
fn more_of(conversation: &Conversation) -> impl Iterator<Item = String> {
    let fields = conversation.turns.iter().map(|turn| &turn.fields).filter(|fields| !fields.is_empty());
    fields.map(|fields| json!(fields)).chain(conversation.tools.iter().cloned()).map(|more| more.to_string())
}

/// `Ok` if texts of these lengths are together short enough to be tokenised.
fn check_length(lengths: impl IntoIterator<Item = usize>) -> Result<(), String> {
    let num_bytes = lengths.into_iter().fold(0, usize::saturating_add);
    if num_bytes <= TEXT_BYTES_MAX {
        return Ok(());
    }
    Err(format!("its text has {num_bytes} bytes, must have at most {TEXT_BYTES_MAX}"))
}

/// A text with the pieces of its media.
#[derive(Debug, Default)]
struct Filled {
    text: String,
    answers: Vec<Range<usize>>,
    /// Id and length of each run of features, in the order of the text.
    features: Vec<(u32, u32)>,
    /// Positions of the conversation's media, in the order of the text.
    order: Vec<usize>,
}

/// The next placeholder from `done` on: the first, and of several there the longest.
fn next_placeholder<'m>(
    text: &str,
    done: usize,
    used: &[(usize, &'m Mark)],
) -> Option<(usize, usize, &'m Mark)> {
    used.iter()
        .filter_map(|(kind, mark)| Some((done + text[done..].find(mark.placeholder.as_str())?, *kind, *mark)))
        .min_by_key(|(at, _, mark)| (*at, usize::MAX - mark.placeholder.len()))
}

/// Size of the LLM backbone's vocabulary, where the configuration says.
fn vocabulary(config: &Value) -> Option<u64> {
    match config.get("text_config") {
        Some(text) => text.get("vocab_size"),
        None => config.get("vocab_size"),
    }
    .and_then(Value::as_u64)
}

/// How media of this kind are written, the ids checked against each other and the vocabulary.
fn checked_mark(
    tokenizer: &Tokenizer,
    config: &Value,
    vocabulary: Option<u64>,
    marks: Marks,
) -> Result<Mark, String> {
    let token = &marks.feature_token;
    // Only an added token is read as one whatever stands beside it.
    let is_added = |id: &u32| tokenizer.get_added_tokens_decoder().contains_key(id);
    let feature_id = tokenizer.token_to_id(token).filter(is_added);
    let field = marks.id_fields.iter().find_map(|field| Some((*field, config.get(*field)?.as_u64()?)));
    if let Some((field, id)) = field {
        if let Some(size) = vocabulary.filter(|size| id >= *size) {
            return Err(format!(
                "`{field}` of config.json is {id}, must be below the model's `vocab_size` {size}"
            ));
        }
        if let Some(found) = feature_id.filter(|found| u64::from(*found) != id) {
            return Err(format!("`{token}` has the id {found}, must be `{field}` of config.json, {id}"));
        }
    }
    let Marks { placeholder, feature_token, number, .. } = marks;
    Ok(Mark { placeholder, feature_token, feature_id, number })
}

#[cfg(test)]
mod tests;
