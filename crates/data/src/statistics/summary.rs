//! A data profile as numbers for the report and as text for people.

use crate::listing::line;
use crate::statistics::estimate::{Bounds, Intervals, ValueCounts};
use crate::width;
use dflop_types::number::{file_bytes, playing_time};
use dflop_types::{DataProfile, SampleKind, counted, printable, thousands};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

/// Bins of a histogram, at most.
const BINS_MAX: u64 = 12;
/// Problems shown.
const NAMED: usize = 5;
/// Columns of the longest bar; the text stays within 100 columns.
const BAR: u64 = 40;
/// Columns of a name; longer ones are cut in the middle.
const NAME: usize = 34;

/// What a data profile says of its samples, in numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    /// Samples that were profiled.
    pub num_samples: u64,
    /// Samples that could not be read: left out, or another in their place.
    pub num_problems: u64,
    /// Samples of the dataset, where only a random sample of them was profiled; shares, totals and histograms are
    /// then of the sample, means and percentiles estimates for the dataset.
    #[serde(default)]
    pub num_population: Option<u64>,
    /// Bytes of all media.
    pub media_bytes: u64,
    /// Time of all videos and sounds, in milliseconds.
    pub media_ms: u64,
    /// Of these, time of samples with sounds and without videos, in milliseconds. A sound beside a video counts as time
    /// of the video's sample.
    #[serde(default)]
    pub sound_ms: u64,
    /// By kind, kinds without a sample left out.
    pub kinds: Vec<SampleGroup>,
    /// By file, in the order of the mixture.
    pub sources: Vec<SampleGroup>,
    /// Of encoder tokens, LLM tokens and label tokens.
    pub distributions: Vec<Distribution>,
    /// The samples with most tokens (encoder and LLM together), the heaviest first.
    pub heaviest: Vec<HeavySample>,
}

/// What the samples of one kind, or of one source, hold.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleGroup {
    /// Kind or file.
    pub name: String,
    /// Its samples.
    pub samples: u64,
    /// Their encoder tokens.
    pub encoder_tokens: u64,
    /// Their LLM tokens.
    pub llm_tokens: u64,
    /// Their label tokens.
    pub label_tokens: u64,
}

/// How one size is spread over the samples. A percentile is the size of a sample: the smallest size that this share
/// of the samples does not exceed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    /// `encoder_tokens`, `llm_tokens` or `label_tokens`.
    pub name: String,
    /// Over all samples.
    pub total: u64,
    /// Of a sample.
    pub mean: f64,
    /// 5 in 100 samples are not larger.
    pub p5: u64,
    /// Half of the samples are not larger.
    pub p50: u64,
    /// 95 in 100 samples are not larger.
    pub p95: u64,
    /// 99 in 100 samples are not larger.
    pub p99: u64,
    /// The largest.
    pub max: u64,
    /// Size of a bin of the histogram: bin i holds sizes from i x this.
    pub bin_tokens: u64,
    /// Samples in each bin, from size 0 to the largest.
    pub bins: Vec<u64>,
    /// How certain mean and percentiles are, where the profile is of a random sample.
    #[serde(default)]
    pub intervals: Option<Intervals>,
}

/// One of the heaviest samples.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeavySample {
    /// The sample's id.
    pub id: String,
    /// Its file.
    pub source: String,
    /// What it holds.
    pub kind: SampleKind,
    /// Its encoder tokens.
    pub encoder_tokens: u64,
    /// Its LLM tokens.
    pub llm_tokens: u64,
}

impl Distribution {
    /// The distribution of sizes that occur so often; all zero where there are none.
    pub fn of_counts(name: &str, counts: &ValueCounts) -> Self {
        let num_samples: u64 = counts.values().sum();
        // Nearest rank: the element at ceil(n x percent / 100), counted from 1.
        let percentile = |percent: u64| {
            let rank = (num_samples * percent).div_ceil(100).max(1);
            let mut seen = 0;
            let found = counts.iter().find(|(_, count)| {
                seen += **count;
                seen >= rank
            });
            found.map_or(0, |(&size, _)| size)
        };
        let max = counts.last_key_value().map_or(0, |(&size, _)| size);
        let total =
            counts.iter().fold(0_u64, |sum, (size, count)| sum.saturating_add(size.saturating_mul(*count)));
        let bin_tokens = bin_size(max);
        let mut bins = vec![0; (max / bin_tokens + 1) as usize];
        for (size, count) in counts {
            bins[(size / bin_tokens) as usize] += count;
        }
        Self {
            name: name.to_owned(),
            total,
            mean: if num_samples == 0 { 0.0 } else { total as f64 / num_samples as f64 },
            p5: percentile(5),
            p50: percentile(50),
            p95: percentile(95),
            p99: percentile(99),
            max,
            bin_tokens,
            bins,
            intervals: None,
        }
    }
}

/// The smallest of 1, 2, 5, 10, 20, 50, ... with at most [`BINS_MAX`] bins from 0 to `max`.
fn bin_size(max: u64) -> u64 {
    let mut decade = 1;
    loop {
        for step in [1, 2, 5] {
            if max / (step * decade) < BINS_MAX {
                return step * decade;
            }
        }
        decade *= 10;
    }
}

/// The profile as text for people: at most 100 columns, ASCII, ending with a line break.
pub fn text(profile: &DataProfile, notices: &[String]) -> String {
    text_of(profile, &Statistics::new(profile), notices)
}

/// The same of a profile whose samples are elsewhere: `header` is it without them, `statistics` what they come to.
pub fn text_of(header: &DataProfile, statistics: &Statistics, notices: &[String]) -> String {
    let mut text = String::new();
    let out = &mut text;
    // Writing to a string cannot fail.
    let _ = write_totals(out, statistics);
    if let Some(part) = header.part {
        let _ = writeln!(out, "part {} of {}, counted from 0: to be merged", part.index, part.num_parts);
    }
    let _ = write_groups(out, "kind", &statistics.kinds, statistics);
    if statistics.sources.len() > 1 {
        let _ = write_groups(out, "file", &statistics.sources, statistics);
    }
    let _ = write_percentiles(out, &statistics.distributions);
    if let Some(population) = statistics.num_population {
        let _ = write_intervals(out, &statistics.distributions, statistics.num_samples, population);
    }
    for distribution in &statistics.distributions {
        if distribution.max > 0 {
            let _ = write_histogram(out, distribution);
        }
    }
    let _ = write_heaviest(out, &statistics.heaviest);
    for notice in notices {
        let _ = write!(out, "\nnotice: {}\n", printable(notice));
    }
    let _ = write_problems(out, header);
    text
}

fn write_problems(out: &mut String, header: &DataProfile) -> std::fmt::Result {
    let (replaced, others): (Vec<_>, Vec<_>) = header.problems.iter().partition(|p| p.substitute.is_some());
    let act = if header.part.is_some() { "not readable" } else { "left out" };
    for (act, problems) in [("replaced by a neighbour", replaced), (act, others)] {
        if problems.is_empty() {
            continue;
        }
        write!(out, "\n{act}: {}\n", counted(problems.len() as u64, "sample"))?;
        for problem in problems.iter().take(NAMED) {
            writeln!(out, "  {}", line(problem))?;
        }
        if problems.len() > NAMED {
            writeln!(
                out,
                "  and {} more: all are in the table of problems beside the profile",
                problems.len() - NAMED
            )?;
        }
    }
    Ok(())
}

/// How sure the numbers of a random sample are.
fn write_intervals(
    out: &mut String,
    distributions: &[Distribution],
    num_samples: u64,
    population: u64,
) -> std::fmt::Result {
    writeln!(
        out,
        "\na random sample of {} of {}: means and percentiles are estimates;",
        thousands(num_samples),
        counted(population, "sample")
    )?;
    writeln!(out, "their 95 % confidence intervals (?: the sample is too small to bound it)\n")?;
    write!(out, "{:<16}", "95 % interval")?;
    for head in ["mean", "p5", "p50", "p95", "p99"] {
        write!(out, "{head:>16}")?;
    }
    writeln!(out)?;
    let number = |end: Option<u64>| end.map_or_else(|| "?".to_owned(), thousands);
    for (d, intervals) in distributions.iter().filter_map(|d| Some((d, d.intervals.as_ref()?))) {
        let ends = |half: f64| Bounds {
            low: Some((d.mean - half).max(0.0).round() as u64),
            high: Some((d.mean + half).round() as u64),
        };
        let mean = intervals.mean_half_width.map_or_else(Bounds::default, ends);
        write!(out, "{:<16}", words(&d.name))?;
        for bounds in [mean, intervals.p5, intervals.p50, intervals.p95, intervals.p99] {
            write!(out, "{:>16}", format!("{} - {}", number(bounds.low), number(bounds.high)))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn write_totals(out: &mut String, statistics: &Statistics) -> std::fmt::Result {
    write!(out, "{}", counted(statistics.num_samples, "sample"))?;
    if statistics.media_bytes > 0 {
        write!(out, ", {} of media", file_bytes(statistics.media_bytes))?;
    }
    let video_ms = statistics.media_ms.saturating_sub(statistics.sound_ms);
    for (ms, what) in [(video_ms, "video"), (statistics.sound_ms, "sound")] {
        if ms > 0 {
            write!(out, ", {} of {what}", playing_time(ms))?;
        }
    }
    writeln!(out)
}

fn write_groups(out: &mut String, head: &str, groups: &[SampleGroup], all: &Statistics) -> std::fmt::Result {
    let totals: Vec<u64> = all.distributions.iter().map(|d| d.total).collect();
    writeln!(
        out,
        "\n{head:<NAME$}{:>9} {:>6}{:>16} {:>6}{:>16} {:>6}",
        "samples", "%", "encoder tokens", "%", "LLM tokens", "%"
    )?;
    for group in groups {
        writeln!(
            out,
            "{}{:>9} {:>6}{:>16} {:>6}{:>16} {:>6}",
            short(&group.name),
            thousands(group.samples),
            percent(group.samples, all.num_samples),
            thousands(group.encoder_tokens),
            percent(group.encoder_tokens, totals[0]),
            thousands(group.llm_tokens),
            percent(group.llm_tokens, totals[1]),
        )?;
    }
    Ok(())
}

fn write_percentiles(out: &mut String, distributions: &[Distribution]) -> std::fmt::Result {
    write!(out, "\n{:<16}", "a sample has")?;
    for head in ["mean", "p5", "p50", "p95", "p99", "max"] {
        write!(out, "{head:>12}")?;
    }
    writeln!(out)?;
    for d in distributions {
        write!(out, "{:<16}{:>12}", words(&d.name), thousands(d.mean.round() as u64))?;
        for value in [d.p5, d.p50, d.p95, d.p99, d.max] {
            write!(out, "{:>12}", thousands(value))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn write_histogram(out: &mut String, distribution: &Distribution) -> std::fmt::Result {
    let tallest = distribution.bins.iter().copied().max().unwrap_or(0).max(1);
    writeln!(out, "\n{}", words(&distribution.name))?;
    for (index, &samples) in distribution.bins.iter().enumerate() {
        let from = index as u64 * distribution.bin_tokens;
        let range = if distribution.bin_tokens == 1 {
            thousands(from)
        } else {
            format!("{} to {}", thousands(from), thousands(from + distribution.bin_tokens - 1))
        };
        // A bin with a sample has a bar.
        let bar = "#".repeat((samples * BAR).div_ceil(tallest) as usize);
        writeln!(out, "{}", format!("  {range:>22} {:>10}  {bar}", thousands(samples)).trim_end())?;
    }
    Ok(())
}

fn write_heaviest(out: &mut String, heaviest: &[HeavySample]) -> std::fmt::Result {
    writeln!(
        out,
        "\n{:<NAME$}  {:<12}{:>16}{:>16}",
        "heaviest samples", "kind", "encoder tokens", "LLM tokens"
    )?;
    for sample in heaviest {
        writeln!(
            out,
            "{}  {:<12}{:>16}{:>16}",
            short(&sample.id),
            sample.kind,
            thousands(sample.encoder_tokens),
            thousands(sample.llm_tokens)
        )?;
    }
    Ok(())
}

fn words(name: &str) -> &'static str {
    match name {
        "encoder_tokens" => "encoder tokens",
        "llm_tokens" => "LLM tokens",
        _ => "label tokens",
    }
}

/// Part of a whole as `12.3`; `-` of nothing.
fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "-".to_owned() } else { format!("{:.1}", part as f64 * 100.0 / whole as f64) }
}

/// A name in [`NAME`] columns, two of them a gap.
fn short(name: &str) -> String {
    width::pad(&width::cut(name, NAME - 2, ".."), NAME)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_types::{EncoderSegments, MadeFrom, Problem, ProfiledSample, SampleShape, Stratum};

    fn profile() -> DataProfile {
        let sample = |n: u32| {
            let segments = n % 4 * (1 + n / 50);
            let shape = SampleShape {
                encoder_segments: (segments > 0)
                    .then_some(EncoderSegments::of(segments, 81))
                    .into_iter()
                    .collect(),
                feature_tokens: segments * 25,
                llm_tokens: 40 + n + segments * 25,
                label_tokens: 5 + n % 20,
                ..SampleShape::default()
            };
            ProfiledSample {
                id: format!("a_long_directory_name/and_another/{n:04}"),
                source: n % 2,
                position: u64::from(n / 2),
                kind: SampleKind::ALL[(n % 4) as usize],
                shape,
                media_bytes: u64::from(segments) * 10_000,
                media_ms: if n % 4 == 3 { 30_000 } else { 0 },
                ..Default::default()
            }
        };
        DataProfile {
            made_from: MadeFrom::new(),
            family: "llava_onevision".to_owned(),
            sources: vec!["images.jsonl".to_owned(), "videos.json".to_owned()],
            problems: (0..7)
                .map(|n| Problem {
                    file: "videos.json".to_owned(),
                    position: Some(n),
                    id: (n == 1).then(|| "one".to_owned()),
                    cause: "`videos.json` is odd".to_owned(),
                    ..Default::default()
                })
                .collect(),
            samples: (0..200).map(sample).collect(),
            ..Default::default()
        }
    }

    #[test]
    fn the_text_for_people() {
        let text = text(&profile(), &["3 samples are odd: they are kept".to_owned()]);
        assert!(text.lines().all(|line| line.chars().count() <= 100 && !line.ends_with(' ')), "{text}");
        assert!(text.is_ascii());
        insta::assert_snapshot!(text);
    }

    #[test]
    fn hours_of_sound_are_no_hours_of_video() {
        let hours = |kinds: &[SampleKind]| {
            let mut profile = profile();
            profile.samples.truncate(kinds.len());
            for (sample, kind) in profile.samples.iter_mut().zip(kinds) {
                (sample.kind, sample.media_ms, sample.media_bytes) = (*kind, 5_400_000, 0);
            }
            text(&profile, &[]).lines().next().unwrap().to_owned()
        };
        let (video, sound) = (SampleKind::Video, SampleKind::Audio);
        assert_eq!(hours(&[sound]), "1 sample, 1.5 hours of sound");
        assert_eq!(hours(&[sound, video, sound]), "3 samples, 1.5 hours of video, 3.0 hours of sound");
    }

    #[test]
    fn names_of_the_data_do_not_reach_the_terminal_raw() {
        let mut profile = profile();
        profile.samples.truncate(1);
        profile.samples[0].id = "\u{1b}[2J\nid".to_owned();
        profile.problems.truncate(1);
        profile.problems[0].id = Some("\u{7}\n".to_owned());
        profile.sources[0] = "\u{732b}.json".to_owned();
        let text = text(&profile, &["`a\rb` is odd".to_owned()]);
        assert!(!text.chars().any(|letter| letter.is_control() && letter != '\n'), "{text:?}");
        for line in [
            "1 sample\n",
            &format!("\n{:<36}text ", r"\u{1b}[2J\nid"),
            // One letter, two columns.
            &format!("\n{:<33}{:>9}  100.0 ", "\u{732b}.json", 1),
            "\nleft out: 1 sample\n  videos.json: sample 0 (`\\u{7}\\n`): `videos.json` is odd\n",
            "\nnotice: `a\\rb` is odd\n",
        ] {
            assert!(text.contains(line), "{line:?} in {text}");
        }
    }

    #[test]
    fn numbers_of_a_small_distribution() {
        let of = |sizes: Vec<u64>| {
            let mut counts = ValueCounts::new();
            for size in sizes {
                *counts.entry(size).or_default() += 1;
            }
            Distribution::of_counts("llm_tokens", &counts)
        };
        let d = of((1..=100).collect());
        assert_eq!((d.p5, d.p50, d.p95, d.p99, d.max, d.total), (5, 50, 95, 99, 100, 5050));
        assert_eq!((d.bin_tokens, d.bins.len()), (10, 11));
        assert_eq!(d.bins.iter().sum::<u64>(), 100);
        let one = of(vec![7]);
        assert_eq!((one.p5, one.p99, one.bin_tokens, one.bins.len()), (7, 7, 1, 8));
        let none = of(vec![]);
        assert_eq!((none.p50, none.max, none.bins), (0, 0, vec![0]));
    }

    #[test]
    fn a_sample_says_so() {
        let mut profile = profile();
        profile.strata =
            vec![Stratum { population: 4000, drawn: 100 }, Stratum { population: 4000, drawn: 107 }];
        let text = text(&profile, &[]);
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        assert!(text.contains("a random sample of 200 of 8,000 samples"), "{text}");
        let statistics = Statistics::new(&profile);
        for d in &statistics.distributions {
            let intervals = d.intervals.as_ref().unwrap();
            for (value, bounds) in [(d.p50, intervals.p50), (d.p95, intervals.p95)] {
                assert!(bounds.low.unwrap() <= value && value <= bounds.high.unwrap(), "{d:?}");
            }
            assert!(intervals.mean_half_width.unwrap() > 0.0);
        }
    }

    #[test]
    fn parts_add_up_to_the_whole() {
        let statistics = Statistics::new(&profile());
        for parts in [&statistics.kinds, &statistics.sources] {
            assert_eq!(parts.iter().map(|p| p.samples).sum::<u64>(), statistics.num_samples);
            let tokens: u64 = parts.iter().map(|p| p.encoder_tokens).sum();
            assert_eq!(tokens, statistics.distributions[0].total);
        }
        let json = serde_json::to_string(&statistics).unwrap();
        assert_eq!(serde_json::from_str::<Statistics>(&json).unwrap(), statistics);
    }
}
