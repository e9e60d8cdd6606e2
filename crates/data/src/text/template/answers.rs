//! Where the answers stand in what a template without `{% generation %}` writes.
//!
//! An answer that is text alone is found by marks around it, all answers in one rendering. An answer that also holds thoughts
//! or calls of tools is what stands between the header of its turn and the turn's end. Marks around its thoughts, its content
//! and the names of its calls, in a rendering of its own, say which turn that is:
//!
//! ```text
//! <|im_start|>assistant\n<think>\nthoughts\n</think>\n\ncontent<tool_call>{"name": ..}</tool_call><|im_end|>\n
//! header                |  the answer                                                      | end
//! ```
//!
//! Templates leave out the thoughts of earlier answers. What is left of such an answer is its content.

use super::engine::{Content, ContentPart, Message, Refusal};
use super::jinja::strip_as_python;
use super::{BEGIN, ChatTemplate, END, PROBE, content_of, fields, message};
use crate::text::conversation::{CALLS, Conversation, Role, THOUGHTS, Turn};
use serde_json::{Map, Value, json};
use std::ops::Range;

/// What stands around thoughts inside a content.
const THINK: [&str; 2] = ["<think>", "</think>"];

/// Where the marks of an answer stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Marks {
    /// Around the whole answer.
    Around,
    /// Around the answer, whose spaces at its ends are left out.
    Within,
}

impl Marks {
    /// The answer with its marks.
    fn put(self, text: &str) -> String {
        match self {
            Self::Around => format!("{BEGIN}{text}{END}"),
            Self::Within => format!("{BEGIN}{}{END}", strip_as_python(text, None, true, true)),
        }
    }
}

/// What a template writes around an answer; empty where it is not known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Frame {
    header: String,
    end: String,
}

/// An answer with marks inside it.
struct Marked {
    message: Message,
    has_calls: bool,
    /// Whether what it says last, its content, is marked.
    has_content: bool,
}

impl ChatTemplate {
    /// Where each answer stands in `text`, which the template writes of `messages`.
    ///
    /// *Complexity*: two renderings, and one more for each answer with thoughts or calls; two for each that marks do not find.
    pub(super) fn answers(
        &self,
        conversation: &Conversation,
        messages: &[Message],
        text: &str,
    ) -> Result<Vec<Range<usize>>, String> {
        let tools = &conversation.tools;
        let turns = || conversation.turns.iter().zip(messages).enumerate();
        let is_answer = |turn: &Turn| turn.role == Role::Assistant;
        let is_plain = |turn: &Turn, message: &Message| is_answer(turn) && !self.says_more(message);
        let num_plain = turns().filter(|(_, (turn, message))| is_plain(turn, message)).count();
        let mut plain = None;
        for marks in [Marks::Around, Marks::Within] {
            let marked: Vec<Message> = turns()
                .map(|(_, (turn, message))| {
                    if is_plain(turn, message) {
                        with_marks(message, |text| marks.put(text))
                    } else {
                        message.clone()
                    }
                })
                .collect();
            let marked = match self.expand(&marked, tools, false) {
                Err(Refusal::Ended(cause)) => return Err(cause),
                marked => marked.ok().as_deref().and_then(strip),
            };
            plain = marked.filter(|(found, spans)| found == text && spans.len() == num_plain);
            if plain.is_some() {
                break;
            }
        }
        let mut plain = plain.map(|(_, spans)| spans.into_iter());
        let of_tools = self.words_of_tools(messages, tools, text);
        let mut answers = Vec::new();
        for (index, (turn, message)) in turns().filter(|(_, (turn, _))| is_answer(turn)) {
            let of_marks = match &mut plain {
                Some(spans) if is_plain(turn, message) => spans.next(),
                _ if is_plain(turn, message) => None,
                _ => self.framed(messages, tools, (text, &of_tools), index),
            };
            let found = of_marks.or_else(|| self.between_prefixes(messages, tools, text, index));
            // Gemma 4 writes what a tool gave inside the answer that called it.
            let found = found.filter(|answer| {
                of_tools.iter().all(|words| words.end <= answer.start || answer.end <= words.start)
            });
            answers.push(found.ok_or_else(|| {
                format!(
                    "the answer of turn {index} is not found in what the chat template writes: mark answers in \
                     the template with `{{% generation %}}`"
                )
            })?);
        }
        Ok(answers)
    }

    /// Where the words of tools stand, as far as marks find them.
    fn words_of_tools(&self, messages: &[Message], tools: &[Value], text: &str) -> Vec<Range<usize>> {
        let is_tool = |message: &Message| message.role == Role::Tool.name();
        if !messages.iter().any(is_tool) {
            return Vec::new();
        }
        let mark = |message: &Message| {
            let content =
                if is_tool(message) { around_words_of(&message.content) } else { message.content.clone() };
            Message { content, ..message.clone() }
        };
        let marked: Vec<Message> = messages.iter().map(mark).collect();
        let found = self.expand(&marked, tools, false).ok().as_deref().and_then(strip);
        found.filter(|(found, _)| found == text).map(|(_, spans)| spans).unwrap_or_default()
    }

    /// Whether the template writes more of an answer than its content, or less.
    fn says_more(&self, message: &Message) -> bool {
        let may_read = |name: &&str| message.fields.contains_key(*name) && self.source.contains(*name);
        let thinks_aloud = || self.source.contains(THINK[1]) && text_of(&message.content).contains(THINK[1]);
        [CALLS].iter().chain(&THOUGHTS).any(may_read) || thinks_aloud()
    }

    /// The answer at this index, by marks in a rendering of its own; `None` where they do not say where it is. `of_tools` is where
    /// the words of tools stand: Gemma 4 writes what a tool gave inside the turn that called it.
    fn framed(
        &self,
        messages: &[Message],
        tools: &[Value],
        (text, of_tools): (&str, &[Range<usize>]),
        index: usize,
    ) -> Option<Range<usize>> {
        let Marked { message, has_calls, has_content } = marked(&messages[index]);
        let mut all = messages.to_vec();
        all[index] = message;
        let (found, spans) = strip(&self.expand(&all, tools, false).ok()?)?;
        let inner = spans.first()?.start..spans.last()?.end;
        if found != text {
            return None;
        }
        if !has_calls && has_content && spans.len() == 1 {
            return Some(inner);
        }
        let Frame { header, end } = self.frame();
        let before = |messages: &[Message], asks: bool| {
            let before = self.expand(messages, tools, asks).ok()?;
            text.starts_with(&before).then_some(before)
        };
        let is_free = |part: &Range<usize>| {
            part.start <= part.end
                && of_tools.iter().all(|words| words.end <= part.start || part.end <= words.start)
        };
        // What stands between the header and the answer belongs to its turn.
        let by_header = || {
            let start = text[..inner.start].rfind(header).filter(|_| !header.is_empty())? + header.len();
            let is_of_turn = end.is_empty() || !text[start..inner.start].contains(end);
            Some(start).filter(|start| is_of_turn && is_free(&(*start..inner.start)))
        };
        let start = by_header().or_else(|| Some(before(&messages[..index], true)?.len()))?;
        let by_end = || {
            let is_of_turn = !end.is_empty() && !json!(messages[index]).to_string().contains(end);
            let stop = inner.end + text[inner.end..].find(end).filter(|_| is_of_turn)?;
            Some(stop).filter(|stop| is_free(&(inner.end..*stop)))
        };
        let by_prefix = || {
            let up_to = before(&messages[..=index], false)?;
            Some(strip_as_python(&up_to, None, false, true).len())
        };
        let stop = if has_calls { by_end().or_else(by_prefix)? } else { inner.end };
        // Marks behind it are a name that the template writes once more, with what the tool gave.
        let is_around = start <= inner.start && spans.first()?.end <= stop;
        (is_around && is_free(&(start..stop))).then_some(start..stop)
    }

    /// What the template writes around an answer.
    fn frame(&self) -> &Frame {
        self.frame.get_or_init(|| self.probe_frame().unwrap_or_default())
    }

    /// What all probes of an answer begin and end with.
    fn probe_frame(&self) -> Option<Frame> {
        let say = |role, is_list| message(role, content_of(PROBE.to_owned(), is_list));
        let question = say(Role::User, self.forms.user_is_list);
        let plain = say(Role::Assistant, self.forms.assistant_is_list);
        let thinking = |name: &str| {
            let fields = Map::from_iter([(name.to_owned(), json!(PROBE))]);
            Message { fields, ..plain.clone() }
        };
        let asked = self.expand(std::slice::from_ref(&question), &[], false).ok()?;
        let behind = |messages: &[Message], asks: bool| {
            let text = self.expand(messages, &[], asks).ok()?;
            text.strip_prefix(&asked).map(ToOwned::to_owned)
        };
        let answered = |answer: &Message| behind(&[question.clone(), answer.clone()], false);
        let whole = answered(&plain)?;
        let (before, after) = whole.split_once(PROBE)?;
        let asks = behind(std::slice::from_ref(&question), true).filter(|asks| !asks.is_empty());
        let earlier = behind(&[question.clone(), plain.clone(), question.clone(), plain.clone()], false);
        let thoughts = THOUGHTS.into_iter().filter(|name| fields::reads(&self.source, name));
        let calling = fields::reads(&self.source, CALLS)
            .then(|| answered(&call_of_a_tool(self.forms.assistant_is_list)));
        let calling = calling.flatten();
        let others: Vec<String> =
            thoughts.filter_map(|name| answered(&thinking(name))).chain(calling).collect();
        let begins = asks.iter().chain(&earlier).chain(&others);
        let header = begins.fold(before, |header, other| common_start(header, other));
        let end = others.iter().fold(after, |end, other| common_end(end, other));
        let is_there = |text: &str| !text.trim().is_empty();
        Some(Frame {
            header: if is_there(header) { header.to_owned() } else { String::new() },
            end: end.trim().to_owned(),
        })
    }

    /// The answer at this index, by what the template writes before it and up to it.
    fn between_prefixes(
        &self,
        messages: &[Message],
        tools: &[Value],
        text: &str,
        index: usize,
    ) -> Option<Range<usize>> {
        let message = &messages[index];
        if message.fields.contains_key(CALLS) && fields::reads(&self.source, CALLS) {
            return None;
        }
        let before = self.expand(&messages[..index], tools, true).ok()?;
        let up_to = self.expand(&messages[..=index], tools, false).ok()?;
        if !text.starts_with(&before) || !text.starts_with(&up_to) {
            return None;
        }
        let inside = locate(text.get(before.len()..up_to.len())?, &text_of(&message.content))?;
        Some(before.len() + inside.start..before.len() + inside.end)
    }
}

/// A turn of the assistant that calls a tool and says nothing.
pub(super) fn call_of_a_tool(is_list: bool) -> Message {
    // Mistral's templates want ids of nine letters.
    let call = json!({"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {}}});
    let content = if is_list { Content::List(Vec::new()) } else { Content::Text(String::new()) };
    let mut calling = message(Role::Assistant, content);
    calling.fields.insert(CALLS.to_owned(), json!([call]));
    calling
}

/// An answer with marks around its thoughts, its content and the names of its calls.
fn marked(answer: &Message) -> Marked {
    let mut has_content = false;
    let mut message = with_marks(answer, |content| {
        let mut text = String::new();
        let mut rest = content;
        loop {
            let tag = THINK.iter().filter_map(|tag| Some((rest.find(tag)?, *tag))).min();
            let piece = tag.map_or(rest, |(at, _)| &rest[..at]);
            has_content = !strip_as_python(piece, None, true, true).is_empty();
            text.push_str(&around_words(piece));
            let Some((at, tag)) = tag else { return text };
            text.push_str(tag);
            rest = &rest[at + tag.len()..];
        }
    });
    for name in THOUGHTS {
        if let Some(Value::String(thought)) = message.fields.get_mut(name) {
            *thought = around_words(thought);
        }
    }
    let calls = message.fields.get_mut(CALLS).and_then(Value::as_array_mut);
    let mut has_calls = false;
    for call in calls.into_iter().flatten() {
        has_calls = true;
        if let Some(Value::String(name)) = call.pointer_mut("/function/name") {
            *name = Marks::Around.put(name);
        }
    }
    Marked { message, has_calls, has_content }
}

/// What a tool gave, with marks around each text.
fn around_words_of(content: &Content) -> Content {
    match content {
        Content::Text(text) => Content::Text(around_words(text)),
        Content::List(parts) => {
            let marked = parts
                .iter()
                .map(|part| ContentPart { text: part.text.as_deref().map(around_words), ..part.clone() });
            Content::List(marked.collect())
        }
    }
}

/// A text with marks around it, the spaces at its ends outside; without marks where it is spaces alone.
fn around_words(text: &str) -> String {
    let words = strip_as_python(text, None, true, true);
    if words.is_empty() {
        return text.to_owned();
    }
    let start = text.len() - strip_as_python(text, None, true, false).len();
    let end = start + words.len();
    format!("{}{}{}", &text[..start], Marks::Around.put(words), &text[end..])
}

/// The answer, its content with marks in it.
fn with_marks(answer: &Message, put: impl FnOnce(&str) -> String) -> Message {
    let is_list = matches!(answer.content, Content::List(_));
    let said = text_of(&answer.content);
    let marked = put(&said);
    if marked == said {
        return answer.clone();
    }
    Message { content: content_of(marked, is_list), ..answer.clone() }
}

/// What an answer says; it shows no media.
fn text_of(content: &Content) -> String {
    match content {
        Content::Text(text) => text.clone(),
        Content::List(parts) => parts.iter().filter_map(|part| part.text.as_deref()).collect(),
    }
}

fn common_start<'t>(text: &'t str, other: &str) -> &'t str {
    let same = text.char_indices().zip(other.chars()).take_while(|((_, a), b)| a == b);
    &text[..same.last().map_or(0, |((at, c), _)| at + c.len_utf8())]
}

fn common_end<'t>(text: &'t str, other: &str) -> &'t str {
    let same = text.char_indices().rev().zip(other.chars().rev()).take_while(|((_, a), b)| a == b);
    &text[same.last().map_or(text.len(), |((at, _), _)| at)..]
}

/// The text without its marks, and where they were, ascending; `None` if they do not pair.
pub(super) fn strip(marked: &str) -> Option<(String, Vec<Range<usize>>)> {
    let mut text = String::with_capacity(marked.len());
    let mut answers = Vec::new();
    let mut begin = None;
    let mut rest = marked;
    while let Some(at) = rest.find([BEGIN, END]) {
        text.push_str(&rest[..at]);
        let after = &rest[at..];
        match (after.starts_with(BEGIN), begin) {
            (true, None) => begin = Some(text.len()),
            (false, Some(start)) => {
                answers.push(start..text.len());
                begin = None;
            }
            _ => return None,
        }
        rest = &after[BEGIN.len_utf8()..];
    }
    text.push_str(rest);
    begin.is_none().then_some((text, answers))
}

/// Where `content` stands at the start of `written`, whatever spaces the template took off it or put before it.
fn locate(written: &str, content: &str) -> Option<Range<usize>> {
    if written.starts_with(content) {
        return Some(0..content.len());
    }
    let core = strip_as_python(content, None, true, true);
    let start = written.len() - strip_as_python(written, None, true, false).len();
    if core.is_empty() {
        return Some(0..0);
    }
    if !written[start..].starts_with(core) {
        return None;
    }
    let end = start + core.len();
    // Spaces of the content that the template left.
    let lead = content.len() - strip_as_python(content, None, true, false).len();
    let left: usize = content[..lead]
        .chars()
        .rev()
        .zip(written[..start].chars().rev())
        .take_while(|(a, b)| a == b)
        .map(|(c, _)| c.len_utf8())
        .sum();
    let right: usize = content[lead + core.len()..]
        .chars()
        .zip(written[end..].chars())
        .take_while(|(a, b)| a == b)
        .map(|(c, _)| c.len_utf8())
        .sum();
    Some(start - left..end + right)
}
