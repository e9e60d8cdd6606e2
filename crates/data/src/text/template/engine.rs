//! A compiled chat template, run in this process, and what it is given.

use super::jinja::{environment, words};
use crate::foreign::guarded;
use minijinja::{Environment, Value, context};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The one template of the environment.
const NAME: &str = "chat_template";

/// A turn as a template takes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Message {
    pub(super) role: String,
    pub(super) content: Content,
}

impl Message {
    fn value(&self) -> Value {
        let content = match &self.content {
            Content::Text(text) => Value::from(text.as_str()),
            Content::List(parts) => parts.iter().map(ContentPart::value).collect(),
        };
        context! { role => self.role.as_str(), content }
    }
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

    fn value(&self) -> Value {
        let kind = self.kind.as_str();
        if let Some(text) = &self.text {
            context! { type => kind, text => text.as_str() }
        } else {
            context! { type => kind }
        }
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

    /// What the template writes of the messages.
    ///
    /// # Errors
    /// What the template says.
    pub(super) fn expand(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, Refusal> {
        let template = self.environment.get_template(NAME).expect("`new` adds it");
        let variables = context! {
            messages => messages.iter().map(Message::value).collect::<Value>(),
            add_generation_prompt,
            tools => Value::from(()),
            documents => Value::from(()),
        };
        guarded(|| template.render(variables).map_err(|error| words(&error)))
            .map_err(|cause| Refusal::Said(format!("the chat template: {cause}")))
    }
}
