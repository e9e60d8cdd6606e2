//! What a template writes around an answer.

use super::engine::{Content, Message};
use super::{ChatTemplate, PROBE, content_of, fields, message};
use crate::text::conversation::{CALLS, Role, THOUGHTS};
use serde_json::{Map, json};

/// The header of a turn and what ends it; empty where it is not known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) header: String,
    pub(super) end: String,
}

impl ChatTemplate {
    /// What the template writes around an answer, whatever that holds.
    pub(super) fn frame(&self) -> &Frame {
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
        let calling = || answered(&call_of_a_tool(self.forms.assistant_is_list));
        let calling = fields::reads(&self.source, CALLS).then(calling).flatten();
        let others: Vec<String> =
            thoughts.filter_map(|name| answered(&thinking(name))).chain(calling).collect();
        let begins = asks.iter().chain(&earlier).chain(&others);
        let header = whole_tokens_at_start(begins.fold(before, |header, other| common_start(header, other)));
        let end = others.iter().fold(after, |end, other| common_end(end, other));
        let header = if header.trim().is_empty() { "" } else { header };
        Some(Frame { header: header.to_owned(), end: whole_tokens_at_end(end.trim()).to_owned() })
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

fn common_start<'t>(text: &'t str, other: &str) -> &'t str {
    let same = text.char_indices().zip(other.chars()).take_while(|((_, a), b)| a == b);
    &text[..same.last().map_or(0, |((at, c), _)| at + c.len_utf8())]
}

fn common_end<'t>(text: &'t str, other: &str) -> &'t str {
    let same = text.char_indices().rev().zip(other.chars().rev()).take_while(|((_, a), b)| a == b);
    &text[same.last().map_or(text.len(), |((at, _), _)| at)..]
}

/// Without a token that is cut at the end, as `<|sta`.
fn whole_tokens_at_start(text: &str) -> &str {
    match text.rfind(['<', '[']) {
        Some(at) if !text[at..].contains(['>', ']']) => &text[..at],
        _ => text,
    }
}

/// From the first whole token on: `|>` is the end of many, and ends nothing by itself.
fn whole_tokens_at_end(text: &str) -> &str {
    text.find(['<', '[']).map_or("", |at| &text[at..])
}

#[cfg(test)]
mod tests {
    use super::{common_end, common_start, whole_tokens_at_end, whole_tokens_at_start};

    #[test]
    fn tokens_are_not_cut() {
        assert_eq!(whole_tokens_at_end(common_end("<|return|>", "{}<|call|>")), "");
        assert_eq!(whole_tokens_at_end(common_end("x<|eot_id|>", "<|eom_id|>")), "");
        assert_eq!(whole_tokens_at_end(common_end("x</s>", "}]</s>")), "</s>");
        assert_eq!(
            whole_tokens_at_start(common_start("<|start|>assistant<|channel|>", "<|start|>assistant<|con")),
            "<|start|>assistant"
        );
        assert_eq!(whole_tokens_at_start("[INST] a[/INST]"), "[INST] a[/INST]");
    }
}
