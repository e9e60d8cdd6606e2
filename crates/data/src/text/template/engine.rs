//! A compiled chat template, run in this process, and what it is given.

use super::jinja::{environment, words};
use crate::foreign::guarded;
use minijinja::value::Serde;
use minijinja::{Environment, Value, context};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use std::fmt;

/// The one template of the environment.
const NAME: &str = "chat_template";

/// A turn as a template takes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Message {
    pub(super) role: String,
    pub(super) content: Content,
    /// What else it has: calls of tools, thoughts, names.
    #[serde(flatten)]
    pub(super) fields: Map<String, Json>,
}

/// What a turn says, in either of the two forms that templates take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Content {
    Text(String),
    List(Vec<ContentPart>),
}

/// An element of a list: a text, or a medium by its kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ContentPart {
    #[serde(rename = "type")]
    pub(super) kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) text: Option<String>,
}

impl ContentPart {
    pub(super) fn text(text: &str) -> Self {
        Self { kind: "text".to_owned(), text: Some(text.to_owned()) }
    }

    pub(super) fn medium(kind: &str) -> Self {
        Self { kind: kind.to_owned(), text: None }
    }
}

/// Why a template writes nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Refusal {
    /// What it says, or what is wrong with it.
    Said(String),
    /// It ended the process that renders it, or did not end: asked once more it would do so again.
    Ended(String),
}

impl Refusal {
    pub(super) fn words(&self) -> &str {
        match self {
            Self::Said(cause) | Self::Ended(cause) => cause,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words())
    }
}

/// A compiled template.
#[derive(Debug)]
pub(super) struct Engine {
    environment: Environment<'static>,
}

impl Engine {
    /// The template of this source, with the special tokens as variables.
    ///
    /// # Errors
    /// Where it does not parse.
    pub(super) fn new(source: String, special_tokens: &[(String, String)]) -> Result<Self, Refusal> {
        let mut environment = environment();
        for (name, token) in special_tokens {
            environment.add_global(name.clone(), Value::from(token.as_str()));
        }
        guarded(|| environment.add_template_owned(NAME, source).map_err(|error| words(&error)))
            .map_err(|cause| Refusal::Said(format!("the chat template does not parse: {cause}")))?;
        Ok(Self { environment })
    }

    /// What the template writes of the messages, where these tools may be called.
    ///
    /// # Errors
    /// What the template says.
    pub(super) fn expand(
        &self,
        messages: &[Message],
        tools: &[Json],
        add_generation_prompt: bool,
    ) -> Result<String, Refusal> {
        let template = self.environment.get_template(NAME).expect("`new` adds it");
        let variables = context! {
            messages => Value::from(Serde(messages)),
            add_generation_prompt,
            tools => if tools.is_empty() { Value::from(()) } else { Value::from(Serde(tools)) },
            documents => Value::from(()),
        };
        guarded(|| template.render(variables).map_err(|error| words(&error)))
            .map_err(|cause| Refusal::Said(format!("the chat template: {cause}")))
    }
}
