//! A model's chat template: a conversation in, the text that the model was taught and where the answers stand in it.
//!
//! Templates are Jinja, rendered as transformers renders them: `trim_blocks` and `lstrip_blocks`, `messages`,
//! `add_generation_prompt`, `tools` (those of the record), `documents` (none) and the special tokens as variables, `raise_exception`,
//! `tojson` without HTML escapes, Python's methods of texts, lists and mappings. `strftime_now` is refused: a sample
//! must have the same tokens tomorrow.
//!
//! What a message's `content` is, a list of parts (`[{"type": "image"}, {"type": "text", "text": ..}]`) or a text
//! with the placeholders in it, is found by a probe when the template is opened: the list where the template writes
//! the probe's text from a list, and one placeholder for one medium; the text where it does so from a text. User,
//! assistant, system and tool turns are probed apart, for templates that take a list from the user alone. A turn's other
//! fields, calls of tools among them, go to the template as the record has them.
//!
//! Where the answers stand:
//!
//! ```text
//! the template has {% generation %}          what stands inside these tags
//! it has none                                the assistant's content, found
//!   1. by marks around the content, where the text without the marks is that of a rendering without marks
//!   2. else by marks around the content without the spaces at its ends, where these change nothing: a template that trims
//!   3. else between the rendering of what is before the answer, with `add_generation_prompt`, and the rendering up to it
//!   4. else not at all: an error
//! of one with thoughts or calls of tools         from the turn's header to its end (answers.rs)
//! ```

mod answers;
mod apart;
mod engine;
mod fields;
mod frame;
mod jinja;
mod marks;
mod spaces;

pub use apart::{render_templates_with, serve_templates};

use crate::media::MediaKind;
use crate::text::conversation::{CALLS, Conversation, Role, THOUGHTS, Turn, TurnPart};
use apart::Remote;
use engine::{Content, ContentPart, Engine, Message, Refusal};
use frame::{Frame, call_of_a_tool};
use jinja::generation_as_filter;
use marks::{is_mark, strip};
use serde_json::{Map, Value, json};
use std::ops::Range;
use std::sync::OnceLock;

/// A text that a template writes as it is, or does not understand: a list that is printed escapes its line break.
const PROBE: &str = "a 'probe' of\n\"two\" lines";

/// A text that is the same inside JSON.
const WORDS: &str = "what a tool gave";

/// The types that templates know a part with a medium by, by [`MediaKind::index`]: the kind's own name, which the processors of
/// transformers take, then those that others write.
const PART_TYPES: [&[&str]; 3] =
    [&["image", "image_url"], &["video", "video_url"], &["audio", "input_audio", "audio_url"]];

/// Where a template runs.
#[derive(Debug)]
enum Renderer {
    /// In this process.
    Here(Box<Engine>),
    /// In a child, which it may end.
    Apart(Remote),
}

/// A compiled chat template.
#[derive(Debug)]
pub(crate) struct ChatTemplate {
    /// As it was written.
    source: String,
    renderer: Renderer,
    has_generation: bool,
    forms: Forms,
    /// The placeholders of the family's media, by [`MediaKind::index`].
    placeholders: [Option<String>; 3],
    /// What it writes around an answer, once somebody asked.
    frame: OnceLock<Frame>,
}

/// What a message's content is, for each role; whether media of a kind are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Forms {
    user_is_list: bool,
    assistant_is_list: bool,
    system_is_list: bool,
    /// `None` where the template writes no turns of tools.
    tool_is_list: Option<bool>,
    /// By [`MediaKind::index`]: the type of a part of a list for which the template writes the kind's placeholder, the first of
    /// [`PART_TYPES`].
    part_types: [Option<&'static str>; 3],
}

/// A conversation as the template writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rendered {
    /// The text, a placeholder where each medium stands.
    pub(crate) text: String,
    /// Where the answers stand, in bytes, ascending.
    pub(crate) answers: Vec<Range<usize>>,
}

impl ChatTemplate {
    /// The template of this source, with the special tokens by name and the placeholders by kind ([`MediaKind::index`]).
    ///
    /// # Errors
    /// What is wrong with the template: it does not parse, or writes no conversation.
    pub(crate) fn new(
        source: &str,
        special_tokens: &[(String, String)],
        placeholders: [Option<String>; 3],
    ) -> Result<Self, String> {
        if source.contains(is_mark) {
            return Err("the chat template holds a character of U+FDD0 to U+FDE1, must not".to_owned());
        }
        // Jinja reads every line break as `\n`.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let written = source.clone();
        let (source, has_generation) = generation_as_filter(&source);
        let renderer = match Remote::new(&source, special_tokens) {
            Some(remote) => remote.map(Renderer::Apart),
            None => Engine::new(source, special_tokens).map(|engine| Renderer::Here(Box::new(engine))),
        };
        let renderer = renderer.map_err(|refusal| refusal.to_string())?;
        let mut template = Self {
            source: written,
            renderer,
            has_generation,
            forms: Forms::default(),
            placeholders,
            frame: OnceLock::new(),
        };
        template.forms = template.probe()?;
        Ok(template)
    }

    /// Whether the template says itself where answers stand.
    pub(crate) const fn has_generation(&self) -> bool {
        self.has_generation
    }

    /// The conversation as text.
    ///
    /// *Complexity*: one rendering where the template has `{% generation %}` or nobody answers, two where marks find
    /// the answers, and two more an answer where they do not.
    ///
    /// # Errors
    /// What the template says, or what it does not write.
    pub(crate) fn render(&self, conversation: &Conversation) -> Result<Rendered, String> {
        let mut rendered = self.whole(conversation)?;
        let is_learnt: Vec<bool> = conversation
            .turns
            .iter()
            .filter(|turn| turn.role == Role::Assistant)
            .map(|turn| turn.is_learnt)
            .collect();
        if is_learnt.contains(&false) {
            let (found, answers) = (rendered.answers.len(), is_learnt.len());
            if found != answers {
                return Err(format!(
                    "an answer carries no loss, and the chat template marks {found} places of {answers} answers: must be as many"
                ));
            }
            let mut is_learnt = is_learnt.into_iter();
            rendered.answers.retain(|_| is_learnt.next().unwrap_or(true));
        }
        Ok(rendered)
    }

    /// The conversation as text, and where all its answers stand.
    fn whole(&self, conversation: &Conversation) -> Result<Rendered, String> {
        for medium in &conversation.media {
            let kind = medium.kind.index();
            if self.placeholders[kind].is_none() {
                return Err(format!("the model's family reads no {}", MediaKind::ALL[kind].as_str()));
            }
            if self.forms.user_is_list && self.forms.part_types[kind].is_none() {
                let name = MediaKind::ALL[kind].as_str();
                return Err(format!("the chat template writes nothing for a part of type `{name}`"));
            }
        }
        if conversation.is_document {
            return self.document(conversation);
        }
        let turns = &conversation.turns;
        if self.forms.tool_is_list.is_none() && turns.iter().any(|turn| turn.role == Role::Tool) {
            return Err("the chat template writes no turns of tools".to_owned());
        }
        let shows = |turn: &Turn| {
            turn.role == Role::Tool && turn.parts.iter().any(|part| matches!(part, TurnPart::Media(_)))
        };
        if self.forms.user_is_list && self.forms.tool_is_list != Some(true) && turns.iter().any(shows) {
            return Err(
                "the chat template writes what a tool gave as text, and the record has a medium in it"
                    .to_owned(),
            );
        }
        if turns.iter().any(|turn| turn.fields.contains_key(CALLS)) && !fields::reads(&self.source, CALLS) {
            return Err(format!("the chat template writes no calls of tools: it does not read `{CALLS}`"));
        }
        let messages: Vec<Message> = turns.iter().map(|turn| self.message(conversation, turn)).collect();
        let tools = &conversation.tools;
        if json!([messages, tools]).to_string().contains(is_mark) {
            return Err("a turn holds a character of U+FDD0 to U+FDE1, must not".to_owned());
        }
        let text = self.expand(&messages, tools, false).map_err(|refusal| refusal.to_string())?;
        if !tools.is_empty() && self.expand(&messages, &[], false).as_ref() == Ok(&text) {
            return Err("the chat template writes no `tools`, and the record has some".to_owned());
        }
        if self.has_generation {
            let (text, spans) = strip(&text).ok_or_else(|| {
                "the chat template opens a `{% generation %}` inside another, must not".to_owned()
            })?;
            return Ok(Rendered { text, answers: spans.into_iter().map(|span| span.range).collect() });
        }
        let is_answered = turns.iter().any(|turn| turn.role == Role::Assistant);
        let answers = if is_answered { self.answers(conversation, &messages, &text)? } else { Vec::new() };
        Ok(Rendered { text, answers })
    }

    /// A document as text: its texts as they are, and each medium as the template writes it inside a question. The texts are
    /// the answers.
    fn document(&self, conversation: &Conversation) -> Result<Rendered, String> {
        let mut written: [Option<String>; 3] = [None, None, None];
        let (mut text, mut answers) = (String::new(), Vec::new());
        for part in conversation.turns.iter().flat_map(|turn| &turn.parts) {
            match part {
                TurnPart::Text(part) => {
                    answers.push(text.len()..text.len() + part.len());
                    text.push_str(part);
                }
                TurnPart::Media(index) => {
                    let kind = conversation.media[*index].kind.index();
                    let medium = match &mut written[kind] {
                        Some(medium) => medium,
                        unknown => unknown.insert(self.medium(kind)?),
                    };
                    text.push_str(medium);
                }
            }
        }
        Ok(Rendered { text, answers })
    }

    /// A medium as the template writes it between two texts of a question: the family's placeholder, with what stands around it.
    fn medium(&self, kind: usize) -> Result<String, String> {
        let placeholder = self.placeholders[kind].clone().unwrap_or_default();
        let Some(part_type) = self.forms.part_types[kind].filter(|_| self.forms.user_is_list) else {
            return Ok(placeholder);
        };
        let probe = || ContentPart::text(PROBE);
        let question = Content::List(vec![probe(), ContentPart::medium(part_type), probe()]);
        let text = self
            .expand(&[message(Role::User, question)], &[], false)
            .map_err(|refusal| refusal.to_string())?;
        let mut pieces = text.split(PROBE).skip(1);
        // Some templates write media before all texts of a question.
        Ok(match (pieces.next(), pieces.next()) {
            (Some(between), Some(_)) if between.contains(&placeholder) => between.to_owned(),
            _ => placeholder,
        })
    }

    /// What stands for the conversation in transformers, as JSON: of turns the list of `{"role", "content"}` that the template
    /// is rendered with, or `{"messages", "tools"}` where there are tools; of a document its text.
    pub(crate) fn messages(&self, conversation: &Conversation) -> String {
        if conversation.is_document {
            let text = self.document(conversation).map(|document| document.text).unwrap_or_default();
            return json!(text).to_string();
        }
        let turns = conversation.turns.iter();
        let messages: Vec<Message> = turns.map(|turn| self.message(conversation, turn)).collect();
        match conversation.tools.as_slice() {
            [] => json!(messages).to_string(),
            tools => json!({"messages": messages, "tools": tools}).to_string(),
        }
    }

    /// Whether the template reads this field of a turn.
    pub(crate) fn reads(&self, field: &str) -> bool {
        // Thoughts stand under each of the names.
        let names = if THOUGHTS.contains(&field) { &THOUGHTS[..] } else { &[field] };
        names.iter().any(|name| fields::reads(&self.source, name))
    }

    /// What the template writes of the messages, where these tools may be called.
    fn expand(
        &self,
        messages: &[Message],
        tools: &[Value],
        add_generation_prompt: bool,
    ) -> Result<String, Refusal> {
        match &self.renderer {
            Renderer::Here(engine) => engine.expand(messages, tools, add_generation_prompt),
            Renderer::Apart(remote) => remote.expand(messages, tools, add_generation_prompt),
        }
    }

    /// The turn as the template takes it.
    fn message(&self, conversation: &Conversation, turn: &Turn) -> Message {
        let is_list = match turn.role {
            Role::User => self.forms.user_is_list,
            Role::Assistant => self.forms.assistant_is_list,
            Role::System => self.forms.system_is_list,
            Role::Tool => self.forms.tool_is_list.unwrap_or_default(),
        };
        let placeholder = |index: usize| {
            let kind = conversation.media[index].kind.index();
            self.placeholders[kind].as_deref().unwrap_or_default()
        };
        let content = if !is_list || turn.role == Role::Assistant {
            let text = turn.parts.iter().map(|part| match part {
                TurnPart::Text(text) => text.as_str(),
                TurnPart::Media(index) => placeholder(*index),
            });
            let text: String = text.collect();
            // As an answer without content: templates ask whether there is any, and a list with an empty text is something.
            let is_silent = text.is_empty() && turn.fields.contains_key(CALLS) && is_list;
            if is_silent { Content::List(Vec::new()) } else { content_of(text, is_list) }
        } else {
            let parts = turn.parts.iter().map(|part| match part {
                TurnPart::Text(text) => ContentPart::text(text),
                TurnPart::Media(index) => {
                    let kind = conversation.media[*index].kind;
                    ContentPart::medium(self.forms.part_types[kind.index()].unwrap_or(kind.as_str()))
                }
            });
            Content::List(parts.collect())
        };
        Message { fields: turn.fields.clone(), ..message(turn.role, content) }
    }

    /// What the template takes, by what it writes of a probe.
    fn probe(&self) -> Result<Forms, String> {
        let content = |is_list: bool| content_of(PROBE.to_owned(), is_list);
        let num_probes =
            |messages: &[Message]| self.expand(messages, &[], false).map(|text| text.matches(PROBE).count());
        let mut refusal = String::new();
        for (user_is_list, assistant_is_list) in [(true, true), (true, false), (false, false)] {
            let user = message(Role::User, content(user_is_list));
            let assistant = message(Role::Assistant, content(assistant_is_list));
            match num_probes(&[user.clone(), assistant.clone()]) {
                Ok(2) => {}
                Ok(n) => {
                    refusal = format!("it writes {n} of 2 turns as they are");
                    continue;
                }
                Err(Refusal::Said(cause)) => {
                    refusal = cause;
                    continue;
                }
                Err(Refusal::Ended(cause)) => return Err(cause),
            }
            let answer = content(assistant_is_list);
            let part_types =
                [0, 1, 2].map(|kind| user_is_list.then(|| self.part_type(kind, &answer)).flatten());
            let reads_media = self.placeholders.iter().any(Option::is_some);
            if user_is_list && reads_media && part_types == [None; 3] {
                "it writes no medium of a list".clone_into(&mut refusal);
                continue;
            }
            let with_system = |is_list| {
                num_probes(&[message(Role::System, content(is_list)), user.clone(), assistant.clone()])
                    == Ok(3)
            };
            // Where neither is written the template says why when a record has such a turn.
            let system_is_list = user_is_list && (with_system(true) || !with_system(false));
            // Some write what a tool gave as JSON, a list as well: a list is taken where its text stands alone.
            let with_tool = |is_list: bool| {
                let given = if is_list { PROBE } else { WORDS };
                let mut turn = message(Role::Tool, content_of(given.to_owned(), is_list));
                let names = [("tool_call_id", "123456789"), ("name", "f")];
                turn.fields.extend(names.map(|(name, value)| (name.to_owned(), json!(value))));
                let messages = [user.clone(), call_of_a_tool(assistant_is_list), turn];
                let text = self.expand(&messages, &[], false).unwrap_or_default();
                // The question stands first.
                text.rfind(given) > text.find(PROBE)
            };
            let tool_is_list =
                [true, false].into_iter().find(|&is_list| (user_is_list || !is_list) && with_tool(is_list));
            return Ok(Forms { user_is_list, assistant_is_list, system_is_list, tool_is_list, part_types });
        }
        Err(format!(
            "the chat template does not write a question and an answer, neither as text nor as a list of parts: \
             {refusal}"
        ))
    }

    /// The type of a part with a medium of this kind, the first that the template writes as one placeholder.
    fn part_type(&self, kind: usize, answer: &Content) -> Option<&'static str> {
        let placeholder = self.placeholders[kind].as_ref()?;
        PART_TYPES[kind].iter().copied().find(|part_type| {
            let parts = vec![ContentPart::medium(part_type), ContentPart::text(PROBE)];
            let messages =
                [message(Role::User, Content::List(parts)), message(Role::Assistant, answer.clone())];
            self.expand(&messages, &[], false)
                .is_ok_and(|text| text.matches(placeholder).count() == 1 && text.matches(PROBE).count() == 2)
        })
    }
}

fn message(role: Role, content: Content) -> Message {
    Message { role: role.name().to_owned(), content, fields: Map::new() }
}

/// A text as a template takes it: as it is, or as the one part of a list.
fn content_of(text: String, is_list: bool) -> Content {
    if is_list { Content::List(vec![ContentPart::text(&text)]) } else { Content::Text(text) }
}

#[cfg(test)]
mod tests;
