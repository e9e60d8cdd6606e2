//! Sentences of a small vocabulary, with the frequent words first.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;

/// Words by kind, from `crates/data/demo/words.txt`.
pub(super) struct Vocabulary {
    nouns: Vec<&'static str>,
    adjectives: Vec<&'static str>,
    verbs: Vec<&'static str>,
    prepositions: Vec<&'static str>,
    openings: Vec<&'static str>,
}

impl Vocabulary {
    pub(super) fn load() -> Self {
        let words = |kind: &str| {
            include_str!("../../demo/words.txt")
                .lines()
                .find_map(|line| line.strip_prefix(kind)?.strip_prefix(": "))
                .expect("the fixture is checked by a test")
                .split(' ')
                .collect()
        };
        Self {
            nouns: words("noun"),
            adjectives: words("adjective"),
            verbs: words("verb"),
            prepositions: words("preposition"),
            openings: words("opening"),
        }
    }

    /// A question of exactly `num_words` words.
    pub(super) fn question(&self, random: &mut ChaCha8Rng, num_words: u32) -> String {
        let opening = pick(random, &self.openings);
        let mut words = vec![opening];
        self.extend(random, &mut words, num_words as usize, 0);
        capital(&(words.join(" ") + "?"))
    }

    /// Sentences of exactly `num_words` words together.
    pub(super) fn answer(&self, random: &mut ChaCha8Rng, num_words: u32) -> String {
        let mut left = num_words as usize;
        let mut sentences = Vec::new();
        while left > 0 {
            // A rest of a few words joins the last sentence.
            let length = if left < 20 { left } else { random.random_range(7..=15) };
            let mut words = Vec::new();
            self.extend(random, &mut words, length, if length == 1 { 2 } else { 0 });
            sentences.push(capital(&(words.join(" ") + ".")));
            left -= length;
        }
        sentences.join(" ")
    }

    /// Adds words until there are `length`, beginning at a place of the pattern.
    fn extend<'a>(&'a self, random: &mut ChaCha8Rng, words: &mut Vec<&'a str>, length: usize, begin: usize) {
        for place in begin.. {
            if words.len() >= length {
                break;
            }
            words.push(match place % 7 {
                0 | 5 => "the",
                1 => pick(random, &self.adjectives),
                2 | 6 => pick(random, &self.nouns),
                3 => pick(random, &self.verbs),
                _ => pick(random, &self.prepositions),
            });
        }
    }
}

/// One of the words, the first ones more often.
fn pick<'a>(random: &mut ChaCha8Rng, words: &[&'a str]) -> &'a str {
    let part = random.random::<f64>();
    words[(words.len() as f64 * part * part) as usize]
}

fn capital(sentence: &str) -> String {
    let (first, rest) = sentence.split_at(1);
    first.to_uppercase() + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::stream;

    #[test]
    fn texts_have_the_words_asked_for() {
        let vocabulary = Vocabulary::load();
        let random = &mut stream(1, 0);
        for num_words in [1, 2, 7, 19, 20, 21, 250] {
            for text in [vocabulary.question(random, num_words), vocabulary.answer(random, num_words)] {
                assert_eq!(text.split_whitespace().count(), num_words as usize, "{text}");
            }
        }
    }
}
