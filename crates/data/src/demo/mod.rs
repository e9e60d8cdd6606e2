//! The demo: a small multimodal dataset, a tiny model and a `dflop.yaml`, made from a seed.
//!
//! Sizes, durations and text lengths are drawn from percentiles of real datasets (`tables`), the media are drawn and
//! encoded here (`picture`), and the words come from a small vocabulary (`text`). A sample combines a size from one dataset
//! with a text length from another, so the mix is synthetic.

mod model;
mod picture;
mod tables;
mod text;

use crate::error::DataError;
use dflop_types::SampleKind;
#[cfg(test)]
pub(crate) use model::write as write_model;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use rayon::prelude::*;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use tables::Tables;
use text::Vocabulary;

/// What one of 100 samples is: text alone 15, one image 50, several images 15, a video 20.
const SHARES: [(SampleKind, u64); 4] =
    [(SampleKind::Text, 15), (SampleKind::Image, 50), (SampleKind::MultiImage, 15), (SampleKind::Video, 20)];
/// Seconds between the frames of a clip. One a second would put nearly every `ActivityNet` clip at the largest
/// number of frames; one in six seconds keeps their spread.
const FRAME_MS: u32 = 6_000;
/// Fewest and most frames of a clip.
const CLIP_FRAMES: (u32, u32) = (4, 32);
/// Frame sizes of the clips: no dataset stands behind them.
const CLIP_SIZES: [(u32, u32); 4] = [(160, 90), (128, 96), (96, 128), (160, 120)];

/// What [`write()`] made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DemoReport {
    /// The directory.
    pub dir: PathBuf,
    /// The configuration to start from.
    pub config: PathBuf,
    /// Samples by kind, kinds without a sample left out.
    pub samples: Vec<(SampleKind, u64)>,
    /// Media files.
    pub num_media: u64,
    /// Bytes of all media files.
    pub media_bytes: u64,
}

/// Files of a demo beside its media.
const FILES: [&str; 9] = [
    "dflop.yaml",
    "data/images.jsonl",
    "data/videos.json",
    "data/mixture.yaml",
    "model/config.json",
    "model/preprocessor_config.json",
    "model/processor_config.json",
    "model/tokenizer.json",
    "model/tokenizer_config.json",
];

/// `Ok` if [`write()`] would overwrite no file in `dir`.
///
/// # Errors
/// [`DataError::Exists`] with the first file that it would.
pub fn check_free(dir: &Path) -> Result<(), DataError> {
    let files = FILES.into_iter().map(|name| dir.join(name)).filter(|path| path.exists());
    files.chain(media_of(dir)?).next().map_or(Ok(()), |path| Err(DataError::Exists { path }))
}

/// Removes the media of an earlier demo in `dir`: a smaller one would leave some that nothing refers to.
///
/// # Errors
/// [`DataError::Io`].
pub fn remove_media(dir: &Path) -> Result<(), DataError> {
    for path in media_of(dir)? {
        std::fs::remove_file(&path).map_err(|source| DataError::Io { act: "remove", path, source })?;
    }
    Ok(())
}

/// The files in the directory of media whose names are as [`write()`] makes them, in order.
fn media_of(dir: &Path) -> Result<Vec<PathBuf>, DataError> {
    let media = dir.join("data").join("media");
    let entries = match std::fs::read_dir(&media) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.and_then(Iterator::collect::<std::io::Result<Vec<_>>>),
    };
    let entries = entries.map_err(|source| DataError::Io { act: "read", path: media, source })?;
    let mut paths: Vec<_> = entries.into_iter().map(|entry| entry.path()).collect();
    paths.retain(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(is_medium));
    paths.sort();
    Ok(paths)
}

/// Whether a file is named as the demo names its media: `demo_0000.jpg`, of several `demo_0000_1.jpg`.
fn is_medium(name: &str) -> bool {
    let Some((numbers, ending)) = name.strip_prefix("demo_").and_then(|rest| rest.split_once('.')) else {
        return false;
    };
    let (sample, image) = numbers.split_once('_').unwrap_or((numbers, "0"));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    sample.len() >= 4
        && is_number(sample)
        && is_number(image)
        && ["jpg", "png", "webp", "gif"].contains(&ending)
}

/// Writes demo data, a model directory and `dflop.yaml` to `dir`; the same seed gives the same bytes.
///
/// `progress` is called with the samples done and all samples, from several threads. Files that are
/// there are overwritten, see [`check_free`]. *Complexity*: O(pixels of all media).
///
/// # Errors
/// [`DataError::Io`] where a file cannot be written.
pub fn write(
    dir: &Path,
    seed: u64,
    num_samples: u32,
    progress: impl Fn(u64, u64) + Sync,
) -> Result<DemoReport, DataError> {
    let media = dir.join("data").join("media");
    for directory in [&media, &dir.join("model")] {
        std::fs::create_dir_all(directory).map_err(|source| DataError::Io {
            act: "write",
            path: directory.clone(),
            source,
        })?;
    }
    let maker = Maker { seed, media: &media, tables: &Tables::load(), vocabulary: &Vocabulary::load() };
    let kinds = kinds(seed, num_samples);
    let done = AtomicU64::new(0);
    let made: Vec<Made> = kinds
        .par_iter()
        .enumerate()
        .map(|(index, &kind)| {
            let made = maker.sample(index as u32, kind)?;
            progress(done.fetch_add(1, Ordering::Relaxed) + 1, u64::from(num_samples));
            Ok(made)
        })
        .collect::<Result<_, DataError>>()?;

    let of = |video: bool| {
        let kinds = kinds.iter().map(move |&kind| (kind == SampleKind::Video) == video);
        made.iter().zip(kinds).filter(|(_, wanted)| *wanted).map(|(made, _)| made.record.to_string())
    };
    let put = |name: &str, text: &[u8]| put(&dir.join(name), text);
    put("data/images.jsonl", (of(false).collect::<Vec<_>>().join("\n") + "\n").as_bytes())?;
    put("data/videos.json", format!("[\n{}\n]\n", of(true).collect::<Vec<_>>().join(",\n")).as_bytes())?;
    put("data/mixture.yaml", MIXTURE.as_bytes())?;
    model::write(&dir.join("model"))?;
    put("dflop.yaml", CONFIG.as_bytes())?;

    let count = |kind| kinds.iter().filter(|&&k| k == kind).count() as u64;
    Ok(DemoReport {
        dir: dir.to_owned(),
        config: dir.join("dflop.yaml"),
        samples: SampleKind::ALL
            .map(|kind| (kind, count(kind)))
            .into_iter()
            .filter(|(_, n)| *n > 0)
            .collect(),
        num_media: made.iter().map(|made| made.num_media).sum(),
        media_bytes: made.iter().map(|made| made.media_bytes).sum(),
    })
}

const MIXTURE: &str = "\
# A LLaVA mixture: which files, and how much of each (all, first:N, end:N, random:N; N or N%).
datasets:
  - json_path: images.jsonl  # text, one image, several images
    sampling_strategy: all
    media_root: media
  - json_path: videos.json  # one clip each
    sampling_strategy: all
    media_root: media
";

const CONFIG: &str = "\
model:
  dir: model  # config.json, preprocessor_config.json and tokenizer.json in Hugging Face form
  dtype: float32  # float32 or bfloat16
data:
  mixture: data/mixture.yaml  # LLaVA mixture, or one source: file, directory, shards, URL
  video_max_frames: 32  # frames taken of a video, at most
  on_bad_sample: fail  # fail: stop and list them; skip: leave them out and list them
cluster:
  num_ranks: 2  # processes in all, one device each; not more than cores where time is compared
  device: cpu  # cpu or cuda
train:
  global_batch_size: 64  # samples of one optimizer step, over all replicas
  num_microbatches: 16  # microbatches a step on each LLM replica
  steps: 24  # optimizer steps
  learning_rate: 1.0e-3  # of AdamW
  weight_decay: 0.01  # of AdamW
  max_grad_norm: 1.0  # the global norm of the gradient is clipped to this
  init: random  # random: parameters drawn from the seed; pretrained: read from safetensors files in model.dir
  seed: 0  # of parameters, order of samples and schedules
  schedule: aware  # aware: balanced by cost; blind: arrival order, equal counts
";

/// Writes a file whose directory exists.
fn put(path: &Path, bytes: &[u8]) -> Result<(), DataError> {
    std::fs::write(path, bytes).map_err(|source| DataError::Io {
        act: "write",
        path: path.to_owned(),
        source,
    })
}

/// The random numbers of one sample: its own stream, so that the order of threads is without effect.
fn stream(seed: u64, index: u64) -> ChaCha8Rng {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(index);
    random
}

/// The kind of each sample: the shares of [`SHARES`] rounded by largest remainder, in random order.
fn kinds(seed: u64, num_samples: u32) -> Vec<SampleKind> {
    let total = u64::from(num_samples);
    let mut counts = SHARES.map(|(kind, share)| (kind, total * share / 100, total * share % 100));
    let missing = total - counts.iter().map(|c| c.1).sum::<u64>();
    counts.sort_by_key(|c| std::cmp::Reverse(c.2));
    for count in counts.iter_mut().take(missing as usize) {
        count.1 += 1;
    }
    counts.sort_by_key(|c| c.0);
    let mut kinds: Vec<_> =
        counts.iter().flat_map(|&(kind, n, _)| std::iter::repeat_n(kind, n as usize)).collect();
    let mut random = stream(seed, u64::MAX);
    for last in (1..kinds.len()).rev() {
        kinds.swap(last, random.random_range(0..=last));
    }
    kinds
}

/// One sample as it was written.
struct Made {
    record: Value,
    num_media: u64,
    media_bytes: u64,
}

struct Maker<'a> {
    seed: u64,
    media: &'a Path,
    tables: &'a Tables,
    vocabulary: &'a Vocabulary,
}

impl Maker<'_> {
    fn sample(&self, index: u32, kind: SampleKind) -> Result<Made, DataError> {
        let random = &mut stream(self.seed, u64::from(index));
        let id = format!("demo_{index:04}");
        let mut names = Vec::new();
        let mut media_bytes = 0;
        let mut keep = |name: String, bytes: &[u8]| {
            media_bytes += bytes.len() as u64;
            put(&self.media.join(&name), bytes)?;
            names.push(name);
            Ok::<_, DataError>(())
        };
        let mut placeholder = "<image>\n";
        match kind {
            SampleKind::Image => {
                let (name, bytes) = self.image(random, &id);
                keep(name, &bytes)?;
            }
            SampleKind::MultiImage => {
                for number in 0..self.tables.num_images(random) {
                    let (name, bytes) = self.image(random, &format!("{id}_{number}"));
                    keep(name, &bytes)?;
                }
            }
            SampleKind::Video => {
                placeholder = "<video>\n";
                let frames = (self.tables.duration_ms(random) / FRAME_MS).clamp(CLIP_FRAMES.0, CLIP_FRAMES.1);
                let size = CLIP_SIZES[random.random_range(0..CLIP_SIZES.len())];
                keep(format!("{id}.gif"), &picture::clip(random, size, frames, FRAME_MS))?;
            }
            SampleKind::Text | SampleKind::Audio => {}
        }
        let conversations = self.conversation(random, kind, &placeholder.repeat(names.len()));
        let num_media = names.len() as u64;
        let mut record = json!({ "id": id });
        match kind {
            SampleKind::Image => record["image"] = json!(names[0]),
            SampleKind::MultiImage => record["image"] = json!(names),
            SampleKind::Video => record["video"] = json!(names[0]),
            SampleKind::Text | SampleKind::Audio => {}
        }
        record["conversations"] = conversations;
        Ok(Made { record, num_media, media_bytes })
    }

    /// Name and bytes of an image: photo sizes of COCO, or of `TextVQA` in three of ten; half of them JPEG.
    fn image(&self, random: &mut ChaCha8Rng, name: &str) -> (String, Vec<u8>) {
        let (width, height) = self.tables.image_size(random);
        let format = match random.random_range(0..4) {
            0 | 1 => picture::Format::Jpeg,
            2 => picture::Format::Png,
            _ => picture::Format::WebP,
        };
        (format!("{name}.{}", format.extension()), picture::image(random, (width, height), format))
    }

    fn conversation(&self, random: &mut ChaCha8Rng, kind: SampleKind, placeholders: &str) -> Value {
        let (turns, question_words, answer_words) = if kind == SampleKind::Video {
            (1, 8, self.tables.caption_words(random))
        } else {
            self.tables.turns(random)
        };
        let mut messages = Vec::new();
        for turn in 0..turns {
            // Words are shared out evenly; the first turns take what is left over.
            let share = |words: u32| (words / turns + u32::from(turn < words % turns)).max(1);
            let question = self.vocabulary.question(random, share(question_words));
            let lead = if turn == 0 { placeholders } else { "" };
            messages.push(json!({ "from": "human", "value": format!("{lead}{question}") }));
            let answer = self.vocabulary.answer(random, share(answer_words));
            messages.push(json!({ "from": "gpt", "value": answer }));
        }
        Value::Array(messages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up_and_keep_their_sizes() {
        let kinds = kinds(0, 512);
        let count = |kind| kinds.iter().filter(|&&k| k == kind).count();
        assert_eq!(SampleKind::ALL.map(count), [77, 256, 77, 102, 0]);
        for num_samples in [0, 1, 2, 3, 7, 19, 101] {
            assert_eq!(super::kinds(1, num_samples).len(), num_samples as usize);
        }
    }

    /// The files of these directories of `dir`, sorted.
    fn files_in(dir: &Path, names: [&str; 3]) -> Vec<std::path::PathBuf> {
        let entries = names.into_iter().flat_map(|name| std::fs::read_dir(dir.join(name)).unwrap());
        let mut files: Vec<_> =
            entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_file()).collect();
        files.sort();
        files
    }

    /// Each file that a demo writes stands in the way of the next, and `remove_media` takes its media and nothing else.
    #[test]
    fn a_demo_is_in_the_way_of_another_and_its_media_can_be_removed() {
        let dir = tempfile::tempdir().unwrap();
        check_free(&dir.path().join("new")).unwrap();
        write(dir.path(), 7, 24, |_, _| {}).unwrap();
        let files = files_in(dir.path(), ["", "data", "model"]);
        let mut named = FILES.map(|name| dir.path().join(name));
        named.sort();
        assert_eq!(files, named);
        let media = dir.path().join("data/media");
        let others =
            ["demo_1.jpg", "demo_0000.jpeg", "demo_0000_.png", "demo_0000_x.png", "cat.jpg", "demo_0001"];
        for name in others {
            std::fs::write(media.join(name), "").unwrap();
        }
        for path in &files {
            let text = check_free(dir.path()).unwrap_err().to_string();
            assert!(text.contains("exists, the demo would overwrite it"), "{text}");
            std::fs::remove_file(path).unwrap();
        }
        let error = check_free(dir.path()).unwrap_err();
        assert!(error.to_string().contains("data/media/demo_00"), "{error}");
        remove_media(dir.path()).unwrap();
        check_free(dir.path()).unwrap();
        assert_eq!(std::fs::read_dir(&media).unwrap().count(), others.len());
    }

    #[test]
    fn the_same_seed_gives_the_same_bytes() {
        let made = |seed| {
            let dir = tempfile::tempdir().unwrap();
            let report = write(dir.path(), seed, 12, |_, _| {}).unwrap();
            let files = files_in(dir.path(), ["data", "data/media", "model"]);
            assert!(report.num_media >= 10, "{report:?}");
            files.into_iter().map(|path| std::fs::read(path).unwrap()).collect::<Vec<_>>()
        };
        let one = made(7);
        assert_eq!(one, made(7));
        assert_ne!(one, made(8));
    }
}
