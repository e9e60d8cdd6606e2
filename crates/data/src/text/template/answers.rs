//! Where the answers stand in what a template without `{% generation %}` writes.
//!
//! An answer that is text alone is found by marks around it, all answers in one rendering. An answer that also holds thoughts
//! or calls of tools is what stands between the header of its turn and the turn's end. Marks around its thoughts, its content
//! and the names of its calls, with the number of the turn, say where that is:
//!
//! ```text
//! <|im_start|>assistant\n<think>\nthoughts\n</think>\n\ncontent<tool_call>{"name": ..}</tool_call><|im_end|>\n
//! header                |  the answer                                                      | end
//! ```
//!
//! Templates leave out the thoughts of earlier answers. What is left of such an answer is its content.
//!
//! No answer holds words of a tool: Gemma 4 writes what a tool gave inside the turn that called it, and others name the
//! called function once more with it.

use super::engine::{Content, ContentPart, Message, Refusal};
use super::frame::Frame;
use super::marks::{Span, around, around_words, strip, with_spaces};
use super::spaces::strip_as_python;
use super::{ChatTemplate, content_of};
use crate::text::conversation::{CALLS, Conversation, Role, THOUGHTS};
use serde_json::{Value, json};
use std::ops::Range;

/// What stands around thoughts inside a content.
const THINK: [&str; 2] = ["<think>", "</think>"];

/// A conversation as it was written.
struct Written<'w> {
    messages: &'w [Message],
    tools: &'w [Value],
    text: &'w str,
    /// Where the words of tools stand.
    of_tools: Vec<Range<usize>>,
}

impl Written<'_> {
    fn is_answer(&self, index: usize) -> bool {
        self.messages[index].role == Role::Assistant.name()
    }

    /// Whether no tool speaks there.
    fn is_free(&self, part: &Range<usize>) -> bool {
        part.start <= part.end
            && self.of_tools.iter().all(|words| words.end <= part.start || part.end <= words.start)
    }
}

impl ChatTemplate {
    /// Where each answer stands in `text`, which the template writes of `messages`.
    ///
    /// *Complexity*: up to three renderings, and one for all answers with thoughts or calls; one or two more for each whose
    /// place is not clear from these.
    pub(super) fn answers(
        &self,
        conversation: &Conversation,
        messages: &[Message],
        text: &str,
    ) -> Result<Vec<Range<usize>>, String> {
        let mut written = Written { messages, tools: &conversation.tools, text, of_tools: Vec::new() };
        let indices: Vec<usize> = (0..messages.len()).filter(|&index| written.is_answer(index)).collect();
        let (more, plain): (Vec<usize>, Vec<usize>) =
            indices.iter().partition(|&&index| self.says_more(&messages[index]));
        let mut of_plain = self.plain(&written, &plain)?.map(Vec::into_iter);
        let found = self.found_by_numbers(&mut written, &more);
        let (mut answers, mut floor) = (Vec::new(), 0);
        for index in indices {
            let by_marks = match &mut of_plain {
                _ if more.contains(&index) => {
                    let spans =
                        found.iter().filter(|span| span.turn == Some(index)).map(|span| span.range.clone());
                    self.framed(&written, index, floor, &spans.collect::<Vec<_>>())
                }
                Some(spans) => spans.next(),
                None => None,
            };
            let answer = by_marks.or_else(|| self.between_prefixes(&written, index));
            let answer = answer.filter(|answer| written.is_free(answer)).ok_or_else(|| {
                format!(
                    "the answer of turn {index} is not found in what the chat template writes: mark answers in \
                     the template with `{{% generation %}}`"
                )
            })?;
            floor = answer.end;
            answers.push(answer);
        }
        Ok(answers)
    }

    /// Whether the template may write more of an answer than its content, or less.
    fn says_more(&self, message: &Message) -> bool {
        let may_read = |name: &&str| message.fields.contains_key(*name) && self.source.contains(*name);
        let thinks_aloud = || self.source.contains(THINK[1]) && text_of(&message.content).contains(THINK[1]);
        [CALLS].iter().chain(&THOUGHTS).any(may_read) || thinks_aloud()
    }

    /// The answers that are text alone, by marks around them; `None` where these change what is written.
    fn plain(&self, written: &Written<'_>, plain: &[usize]) -> Result<Option<Vec<Range<usize>>>, String> {
        if plain.is_empty() {
            return Ok(Some(Vec::new()));
        }
        let whole = |text: &str| around(text, None);
        let trimmed = |text: &str| around(strip_as_python(text, None, true, true), None);
        let words = |text: &str| around_words(text, None);
        let ways: [&dyn Fn(&str) -> String; 3] = [&whole, &trimmed, &words];
        for (way, put) in ways.into_iter().enumerate() {
            let mut marked = written.messages.to_vec();
            for &index in plain {
                marked[index] = with_marks(&marked[index], put);
            }
            let marked = match self.expand(&marked, written.tools, false) {
                Err(Refusal::Ended(cause)) => return Err(cause),
                marked => marked.ok().as_deref().and_then(strip),
            };
            let is_same =
                |(found, spans): &(String, Vec<Span>)| found == written.text && spans.len() == plain.len();
            let Some((_, spans)) = marked.filter(is_same) else { continue };
            let ranges = spans.into_iter().zip(plain).map(|(span, &index)| match way {
                // A template that takes off the spaces at one end alone.
                2 => behind(written.text, span.range, &text_of(&written.messages[index].content)),
                _ => span.range,
            });
            return Ok(Some(ranges.collect()));
        }
        Ok(None)
    }

    /// Where the parts of these answers stand, and the words of tools, by marks with the numbers of their turns: all in one
    /// rendering, or each turn in its own where all together change what is written.
    fn found_by_numbers(&self, written: &mut Written<'_>, more: &[usize]) -> Vec<Span> {
        let is_tool = |index: usize| written.messages[index].role == Role::Tool.name();
        let of_tools: Vec<usize> = (0..written.messages.len()).filter(|&index| is_tool(index)).collect();
        let with_all = [&of_tools, more].concat();
        if with_all.is_empty() {
            return Vec::new();
        }
        let together = self.spans(written, &with_all);
        let spans = together.unwrap_or_else(|| {
            let apart = std::iter::once(of_tools.clone()).chain(more.iter().map(|&index| vec![index]));
            apart.filter_map(|turns| self.spans(written, &turns)).flatten().collect()
        });
        let (tools, answers): (Vec<Span>, Vec<Span>) =
            spans.into_iter().partition(|span| span.turn.is_some_and(is_tool));
        written.of_tools = tools.into_iter().map(|span| span.range).collect();
        answers
    }

    /// Where marks in these turns stand, in a rendering of their own; `None` where they change what is written.
    fn spans(&self, written: &Written<'_>, turns: &[usize]) -> Option<Vec<Span>> {
        let mut marked = written.messages.to_vec();
        for &index in turns {
            marked[index] = numbered(&marked[index], index);
        }
        let (found, spans) = strip(&self.expand(&marked, written.tools, false).ok()?)?;
        (found == written.text).then_some(spans)
    }

    /// The answer at this index, whose parts stand at `spans`, not before `floor`; `None` where that does not say where it is.
    fn framed(
        &self,
        written: &Written<'_>,
        index: usize,
        floor: usize,
        spans: &[Range<usize>],
    ) -> Option<Range<usize>> {
        let Written { messages, tools, text, .. } = written;
        let message = &messages[index];
        let has_calls = message.fields.contains_key(CALLS);
        let content = text_of(&message.content);
        let behind_tag = |tag: &&str| Some(content.rfind(*tag)? + tag.len());
        let said = &content[THINK.iter().filter_map(behind_tag).max().unwrap_or(0)..];
        let has_content = !strip_as_python(said, None, true, true).is_empty();
        // A template that writes turns in another order.
        let (first, last) = (spans.first().filter(|first| first.start >= floor)?, spans.last()?);
        let Frame { header, end } = self.frame();
        // Spaces before the end of the turn belong to the answer, or the end would not follow it.
        let with_spaces_behind = |words: Range<usize>| {
            let rest = strip_as_python(&text[words.end..], None, true, false);
            let is_end = !end.is_empty() && rest.starts_with(end.as_str());
            let kept = behind(text, words, said);
            kept.start..if is_end { text.len() - rest.len() } else { kept.end }
        };
        if !has_calls && has_content && spans.len() == 1 {
            return Some(with_spaces_behind(first.clone()));
        }
        let before = |messages: &[Message], asks: bool| {
            let before = self.expand(messages, tools, asks).ok()?;
            text.starts_with(&before).then_some(before)
        };
        // What stands between the header and the answer belongs to its turn.
        let by_header = || {
            let start =
                floor + text[floor..first.start].rfind(header).filter(|_| !header.is_empty())? + header.len();
            let is_of_turn = end.is_empty() || !text[start..first.start].contains(end);
            Some(start).filter(|start| is_of_turn && written.is_free(&(*start..first.start)))
        };
        let start = by_header().or_else(|| Some(before(&messages[..index], true)?.len()))?;
        // Marks behind the end are of a name that the template writes once more, with what the tool gave.
        let by_end = || {
            let is_of_turn = !end.is_empty() && !json!(message).to_string().contains(end);
            let stop = first.end + text[first.end..].find(end).filter(|_| is_of_turn)?;
            Some(stop).filter(|stop| written.is_free(&(first.end..*stop)))
        };
        let by_prefix = || {
            let up_to = &messages[..=index];
            // The last question may be another one there, and thoughts be written that the whole is without.
            let without = || {
                let mut without = up_to.to_vec();
                for turn in &mut without {
                    turn.fields.retain(|name, _| !THOUGHTS.contains(&name.as_str()));
                }
                before(&without, false)
            };
            let up_to = before(up_to, false).or_else(without)?;
            let up_to = strip_as_python(&up_to, None, false, true);
            // Where the next turn begins at once, a special token at the end is the turn's, which follows the answer.
            let begins = header.split_inclusive('>').next().filter(|token| token.starts_with('<'));
            let is_next = begins.is_some_and(|token| text[up_to.len()..].starts_with(token));
            let last = up_to
                .rfind("<|")
                .filter(|&at| is_next && up_to[at..].find("|>") == Some(up_to.len() - at - 2));
            last.or(Some(up_to.len()))
        };
        let stop = if has_calls || !has_content {
            by_end().or_else(by_prefix)?
        } else {
            with_spaces_behind(last.clone()).end
        };
        (floor <= start && start <= first.start && first.end <= stop).then_some(start..stop)
    }

    /// The answer at this index, by what the template writes before it and up to it.
    fn between_prefixes(&self, written: &Written<'_>, index: usize) -> Option<Range<usize>> {
        let Written { messages, tools, text, .. } = written;
        let message = &messages[index];
        if message.fields.contains_key(CALLS) {
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

/// A turn with numbered marks: of an answer around its thoughts, its content and the names of its calls, else around its texts.
fn numbered(turn: &Message, index: usize) -> Message {
    let put = |text: &str| around_words(text, Some(index));
    if turn.role != Role::Assistant.name() {
        let content = match &turn.content {
            Content::Text(text) => Content::Text(put(text)),
            Content::List(parts) => {
                let marked = parts
                    .iter()
                    .map(|part| ContentPart { text: part.text.as_deref().map(put), ..part.clone() });
                Content::List(marked.collect())
            }
        };
        return Message { content, ..turn.clone() };
    }
    let mut answer = with_marks(turn, |content| {
        let mut text = String::new();
        let mut rest = content;
        loop {
            let tag = THINK.iter().filter_map(|tag| Some((rest.find(tag)?, *tag))).min();
            let piece = tag.map_or(rest, |(at, _)| &rest[..at]);
            text.push_str(&put(piece));
            let Some((at, tag)) = tag else { return text };
            text.push_str(tag);
            rest = &rest[at + tag.len()..];
        }
    });
    for name in THOUGHTS {
        if let Some(Value::String(thought)) = answer.fields.get_mut(name) {
            *thought = put(thought);
        }
    }
    for call in answer.fields.get_mut(CALLS).and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(Value::String(name)) = call.pointer_mut("/function/name") {
            *name = put(name);
        }
    }
    answer
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

/// The words with the spaces behind them. Those before them may be the header's, which often ends with a line break.
fn behind(text: &str, words: Range<usize>, said: &str) -> Range<usize> {
    let start = words.start;
    with_spaces(text, words, said, start)
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
    let is_there = written[start..].starts_with(core);
    is_there.then(|| with_spaces(written, start..start + core.len(), content, 0))
}
