//! What is meant by an argument that a verb does not have.

use crate::config::field::field_named;
use clap::Command;
use clap::error::{ContextKind, ContextValue, Error, ErrorKind};
use std::path::Path;

/// Where a verb that reads a `dflop.yaml` is given what stands in that file, or the file without its flag: how to give it.
///
/// `words` are the arguments as typed, the program's name first.
pub(crate) fn hint(root: &Command, words: &[String], error: &Error) -> Option<String> {
    if error.kind() != ErrorKind::UnknownArgument || error.get(ContextKind::SuggestedArg).is_some() {
        return None;
    }
    let Some(ContextValue::String(given)) = error.get(ContextKind::InvalidArg) else { return None };
    let mut verb = root;
    for word in words.iter().skip(1) {
        verb = verb.find_subcommand(word).unwrap_or(verb);
    }
    if !verb.get_arguments().any(|argument| argument.get_long() == Some("config")) {
        return None;
    }
    if let Some(flag) = given.strip_prefix("--") {
        let field = field_named(&flag.replace('-', "_"))?;
        return Some(format!("`{field}` is a field of `dflop.yaml`: set it there"));
    }
    let path = Path::new(given);
    let in_it = path.join("dflop.yaml");
    let config = if in_it.is_file() { in_it.as_path() } else { path };
    let is_config = config.extension().is_some_and(|ending| ending == "yaml" || ending == "yml");
    is_config.then(|| format!("name the configuration by its flag: `--config {}`", config.display()))
}
