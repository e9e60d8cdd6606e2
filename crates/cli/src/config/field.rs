//! Which field of `dflop.yaml` a word means.

use super::parse;
use super::section::OTHER_WORDS;
use serde_json::Value;
use std::path::Path;

/// The smallest file, whose sections have all fields.
const SMALLEST: &str = "model: {dir: model}\ndata: {mixture: data.yaml}\ncluster: {num_ranks: 1}\n\
train: {global_batch_size: 1, steps: 1}\n";

/// The field of this name, or of what people write in its place, with its section: `cluster.num_ranks` for `num_ranks` and
/// for `gpus`.
pub(crate) fn field_named(word: &str) -> Option<String> {
    let config = parse(Path::new("dflop.yaml"), SMALLEST).ok()?;
    let sections = serde_json::to_value(config).ok()?;
    let names = ["model", "data", "cluster", "train", "checkpoint", "evaluation", "plan"];
    let others = OTHER_WORDS.iter().filter(|(words, _)| words.contains(&word)).map(|(_, field)| *field);
    [word].into_iter().chain(others).find_map(|key| {
        let is_in = |name: &&str| {
            sections.get(name).and_then(Value::as_object).is_some_and(|of| of.contains_key(key))
        };
        names.iter().find(|name| is_in(name)).map(|name| format!("{name}.{key}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_names_and_by_other_words() {
        for (word, field) in [
            ("num_ranks", "cluster.num_ranks"),
            ("gpus", "cluster.num_ranks"),
            ("lr", "train.learning_rate"),
            ("batch_size", "train.global_batch_size"),
            ("dataset", "data.mixture"),
            ("keep", "checkpoint.keep"),
        ] {
            assert_eq!(field_named(word).as_deref(), Some(field), "{word}");
        }
        assert_eq!(field_named("directory"), None);
        assert_eq!(field_named("help"), None);
    }
}
