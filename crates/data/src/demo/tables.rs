//! Percentiles of real datasets, and draws from them (`fixtures/README.md` names the datasets).

use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

/// The tables of `crates/data/demo/tables.json`: values at evenly spaced quantiles, in ascending order.
#[derive(Debug, Deserialize)]
pub(super) struct Tables {
    coco_width_height: Vec<[u32; 2]>,
    textvqa_width_height: Vec<[u32; 2]>,
    llava_mix_turns_user_words_assistant_words: Vec<[u32; 3]>,
    activitynet_duration_ms: Vec<u32>,
    activitynet_caption_words: Vec<u32>,
    gaokao_mm_images: Vec<u32>,
}

impl Tables {
    pub(super) fn load() -> Self {
        serde_json::from_str(include_str!("../../demo/tables.json"))
            .expect("the fixture is checked by a test")
    }

    /// Width and height of a photo, in pixels: COCO, or `TextVQA` in three of ten.
    pub(super) fn image_size(&self, random: &mut ChaCha8Rng) -> (u32, u32) {
        let table =
            if random.random_range(0..10) < 3 { &self.textvqa_width_height } else { &self.coco_width_height };
        let [width, height] = draw(random, table);
        (width, height)
    }

    /// Images of a sample with several.
    pub(super) fn num_images(&self, random: &mut ChaCha8Rng) -> u32 {
        self.gaokao_mm_images[random.random_range(0..self.gaokao_mm_images.len())]
    }

    /// Length of a video, in milliseconds.
    pub(super) fn duration_ms(&self, random: &mut ChaCha8Rng) -> u32 {
        one(random, &self.activitynet_duration_ms)
    }

    /// Words said about a video.
    pub(super) fn caption_words(&self, random: &mut ChaCha8Rng) -> u32 {
        one(random, &self.activitynet_caption_words)
    }

    /// (turns, words of all questions, words of all answers) of a conversation: one of the table's, with a length
    /// between its own and the next one's. Turns and the share of the answers are kept together.
    pub(super) fn turns(&self, random: &mut ChaCha8Rng) -> (u32, u32, u32) {
        let table = &self.llava_mix_turns_user_words_assistant_words;
        let (below, part) = position(random, table.len());
        let [turns, question, answer] = table[below];
        let length = |row: [u32; 3]| f64::from(row[1] + row[2]);
        let scale = 1.0 + part * (length(table[below + 1]) / length(table[below]) - 1.0);
        let words = |count: u32| (f64::from(count) * scale).round() as u32;
        (turns, words(question), words(answer))
    }
}

/// A place between two neighbours of a table of `len` values: the lower one, and how far past it, from 0 to 1.
fn position(random: &mut ChaCha8Rng, len: usize) -> (usize, f64) {
    let place = random.random::<f64>() * (len - 1) as f64;
    let below = (place as usize).min(len - 2);
    (below, place - below as f64)
}

/// A draw by the inverse of the distribution, linear between the table's quantiles.
fn draw<const N: usize>(random: &mut ChaCha8Rng, table: &[[u32; N]]) -> [u32; N] {
    let (below, part) = position(random, table.len());
    std::array::from_fn(|axis| {
        let (low, high) = (f64::from(table[below][axis]), f64::from(table[below + 1][axis]));
        (low + part * (high - low)).round() as u32
    })
}

fn one(random: &mut ChaCha8Rng, table: &[u32]) -> u32 {
    let (below, part) = position(random, table.len());
    let (low, high) = (f64::from(table[below]), f64::from(table[below + 1]));
    (low + part * (high - low)).round() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::stream;

    #[test]
    fn draws_follow_the_tables() {
        let tables = Tables::load();
        let random = &mut stream(3, 0);
        let mut durations: Vec<_> = (0..4001).map(|_| tables.duration_ms(random)).collect();
        durations.sort_unstable();
        // ActivityNet: 114.8 s in the middle, 61.1 s and 173.5 s at the quarters.
        for (place, expected_ms) in [(1000, 61_090.0), (2000, 114_780.0), (3000, 173_520.0)] {
            let ratio = f64::from(durations[place]) / expected_ms;
            assert!((0.93..1.07).contains(&ratio), "quarter at {place}: {}", durations[place]);
        }
        for _ in 0..2000 {
            let (width, height) = tables.image_size(random);
            assert!((200..=1024).contains(&width) && (300..=1024).contains(&height), "{width}x{height}");
            assert!((2..=5).contains(&tables.num_images(random)));
            let (turns, question, answer) = tables.turns(random);
            assert!(turns >= 1 && question >= 4 && answer >= 1, "{turns} {question} {answer}");
        }
    }
}
