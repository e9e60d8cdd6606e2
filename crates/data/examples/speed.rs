//! Speed of header reading and of tokenization on one thread, as one line of JSON; `benches/data.py` calls it.
//!
//! `speed probe SECONDS FILE_LIST`: media files a second, the same files again and again (page cache).
//! `speed shapes SECONDS FILE_LIST SETTINGS`: the same for images, and what each costs by the shape rule of the model whose
//! `config` and `preprocessor` stand in the JSON file SETTINGS.
//! `speed tokens MODEL_DIR JSONL`: seconds that the tokenizer alone takes for the texts of a file of records, that
//! conversations and templates take with it, and that the whole profile takes on one thread.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use dflop_data::conversation::Conversation;
use dflop_data::family::{self, FamilyFiles, Size};
use dflop_data::probe::probe;
use dflop_data::profile::{ProfileSettings, profile};
use dflop_data::tokens::ChatTokenizer;
use std::path::{Path, PathBuf};
use std::time::Instant;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["probe", seconds, list] => probes(seconds.parse().unwrap(), list),
        ["shapes", seconds, list, settings] => shapes(seconds.parse().unwrap(), list, settings),
        ["tokens", model_dir, records] => tokens(Path::new(model_dir), Path::new(records)),
        _ => panic!(
            "usage: speed probe SECONDS FILE_LIST | speed shapes SECONDS FILE_LIST SETTINGS | speed tokens MODEL_DIR JSONL"
        ),
    }
}

fn probes(seconds: f64, list: &str) {
    rate(seconds, list, |file| {
        std::hint::black_box(probe(file).unwrap());
    });
}

fn shapes(seconds: f64, list: &str, settings: &str) {
    let text = std::fs::read_to_string(settings).unwrap();
    let mut settings: serde_json::Value = serde_json::from_str(&text).unwrap();
    let files = FamilyFiles {
        config: settings["config"].take(),
        preprocessor: settings["preprocessor"].take(),
        ..FamilyFiles::default()
    };
    let rule = family::open(&files).unwrap().unwrap();
    rate(seconds, list, |file| {
        let found = probe(file).unwrap();
        let size = Size { height: found.height.unwrap(), width: found.width.unwrap() };
        std::hint::black_box(rule.image(size, 1).unwrap());
    });
}

/// Prints how many files of the list `act` takes a second, again and again, after a first round.
fn rate(seconds: f64, list: &str, act: impl Fn(&Path)) {
    let files: Vec<PathBuf> = std::fs::read_to_string(list).unwrap().lines().map(PathBuf::from).collect();
    for file in &files {
        act(file);
    }
    let (begin, mut num_files) = (Instant::now(), 0_u64);
    while begin.elapsed().as_secs_f64() < seconds {
        for file in &files {
            act(file);
        }
        num_files += files.len() as u64;
    }
    println!("{{\"files_per_s\": {:.1}}}", num_files as f64 / begin.elapsed().as_secs_f64());
}

/// Rounds, interleaved: the machine may be busy for a while.
const ROUNDS: usize = 5;

fn tokens(model_dir: &Path, records: &Path) {
    let tokenizer = ChatTokenizer::of_model(model_dir, [None, None, None]).unwrap();
    let conversations: Vec<Conversation> = std::fs::read_to_string(records)
        .unwrap()
        .lines()
        .map(|line| Conversation::parse(&serde_json::from_str(line).unwrap()).unwrap())
        .collect();
    let bare = tokenizers::Tokenizer::from_file(model_dir.join("tokenizer.json")).unwrap();
    let ids: Vec<Vec<u32>> = conversations
        .iter()
        .map(|conversation| tokenizer.tokenize(conversation, &[]).unwrap().expand().input_ids)
        .collect();
    // Byte-level tokens give back the very text that the template made.
    let texts: Vec<String> = ids.iter().map(|ids| bare.decode(ids, false).unwrap()).collect();
    for (text, ids) in texts.iter().zip(&ids) {
        assert_eq!(bare.encode(text.as_str(), false).unwrap().get_ids(), ids);
    }
    let settings = ProfileSettings::new(records, model_dir);
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let (mut alone_s, mut template_s, mut profile_s) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        for text in &texts {
            std::hint::black_box(bare.encode(text.as_str(), false).unwrap());
        }
        alone_s.push(begin.elapsed().as_secs_f64());
        let begin = Instant::now();
        for conversation in &conversations {
            std::hint::black_box(tokenizer.tokenize(conversation, &[]).unwrap().count());
        }
        template_s.push(begin.elapsed().as_secs_f64());
        let begin = Instant::now();
        one.install(|| profile(&settings, &|_, _| {})).unwrap();
        profile_s.push(begin.elapsed().as_secs_f64());
    }
    let median = |mut seconds: Vec<f64>| {
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    };
    println!(
        "{{\"num_records\": {}, \"num_tokens\": {}, \"tokenizer_s\": {:.4}, \"with_template_s\": {:.4}, \"profile_s\": {:.4}}}",
        texts.len(),
        ids.iter().map(Vec::len).sum::<usize>(),
        median(alone_s),
        median(template_s),
        median(profile_s)
    );
}
