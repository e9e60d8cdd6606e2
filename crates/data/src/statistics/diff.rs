//! What changed between two data profiles, and whether a plan made from one still suits the other.
//!
//! Sizes are compared by the Kolmogorov-Smirnov distance: the largest difference between the shares of samples up to a
//! size. A size drifts if that distance is above [`DISTANCE_MAX`], or its mean moved by more than [`MEAN_MAX`], and if chance
//! alone would not cause the change in 19 of 20 draws of as many samples. The mean of a whole dataset drifts in any case if
//! it moved by more than [`MEAN_SURE`]: three videos among 120 samples may be a third of the encoder's work. A kind drifts if
//! its share moved by more than [`SHARE_MAX`] and by more than chance explains, or if it is gone or new and chance does not
//! explain that.

use crate::error::DataError;
use crate::table;
use crate::width;
use dflop_types::{DataProfile, ProfiledSample, number};
use serde::Serialize;
use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::hash::{Hash as _, Hasher as _};
use std::path::Path;

/// Distance of two distributions above which they differ.
pub const DISTANCE_MAX: f64 = 0.10;
/// Part of the mean by which it may move.
pub const MEAN_MAX: f64 = 0.10;
/// Part of the mean by which it may move in whole datasets, however few samples make it move.
pub const MEAN_SURE: f64 = 0.25;
/// Part of all samples by which the share of a kind may move.
pub const SHARE_MAX: f64 = 0.05;
/// Names of the sizes, in the order of [`sizes`].
const SIZES: [&str; 3] = ["encoder_tokens", "llm_tokens", "label_tokens"];
/// Groups and settings shown of many.
const SHOWN: usize = 12;
/// Columns of a name in the text.
const NAME: usize = 22;

/// What changed from one profile to another.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Drift {
    /// Whether a new plan is advised.
    pub drifted: bool,
    /// What changed and why it matters, one sentence each; empty where nothing did.
    pub findings: Vec<String>,
    /// Settings, family and hashes that differ: name, before, after.
    pub differing: Vec<(String, String, String)>,
    /// How samples changed, by source and record.
    pub samples: SampleChanges,
    /// All samples, then each kind, then each source.
    pub groups: Vec<Group>,
}

/// How many samples changed, told apart by the name of their source and the hash of their record.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct SampleChanges {
    /// Samples of the first profile.
    pub before: u64,
    /// Samples of the second.
    pub after: u64,
    /// In both, of the same sizes.
    pub same: u64,
    /// In both, of other sizes.
    pub changed: u64,
    /// In the second alone.
    pub added: u64,
    /// In the first alone.
    pub removed: u64,
}

/// A part of the samples in both profiles.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Group {
    /// `all`, `kind` or `source`.
    pub of: &'static str,
    /// Name of the kind or the source.
    pub name: String,
    /// Samples before and after.
    pub samples: [u64; 2],
    /// Part of all samples before and after; of a random sample, of what it stands for.
    pub share: [f64; 2],
    /// Encoder, LLM and label tokens.
    pub sizes: Vec<SizeDrift>,
}

/// One size of a group in both profiles.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SizeDrift {
    /// `encoder_tokens`, `llm_tokens` or `label_tokens`.
    pub name: &'static str,
    /// Before and after.
    pub mean: [f64; 2],
    /// Half of the samples are not larger.
    pub p50: [u64; 2],
    /// 95 in 100 samples are not larger.
    pub p95: [u64; 2],
    /// The largest.
    pub max: [u64; 2],
    /// Kolmogorov-Smirnov distance, from 0 (alike) to 1 (no size in common); 0 where a side has no sample.
    pub distance: f64,
    /// The distance that is still taken as alike: [`DISTANCE_MAX`], or more where there are few samples.
    pub distance_max: f64,
    /// Whether it is another distribution by the rules above.
    pub drifted: bool,
}

/// What changed from the profile at `before` to the one at `after`.
///
/// *Complexity*: O(n log n) in the samples; memory for 24 bytes a sample and for the different sizes.
///
/// # Errors
/// Those of [`table::read`].
pub fn diff(before: &Path, after: &Path) -> Result<Drift, DataError> {
    let paths = [before, after];
    let [(a, _), (b, _)] = [table::header(before)?, table::header(after)?];
    let mut sides: [Side; 2] = Default::default();
    let mut changes = SampleChanges::default();
    let mut known: HashMap<(u64, u64), i64> = HashMap::new();
    for (side, (path, header)) in paths.into_iter().zip([&a, &b]).enumerate() {
        let sign = if side == 0 { 1 } else { -1 };
        for sample in table::rows(path)? {
            let sample = sample?;
            sides[side].push(header, &sample);
            *known.entry(identity(header, &sample)).or_default() += sign;
            *(if side == 0 { &mut changes.before } else { &mut changes.after }) += 1;
        }
    }
    count_changes(&known, &mut changes);
    let is_whole = a.strata.is_empty() && b.strata.is_empty();
    let groups = groups(&sides, is_whole);
    let differing = differing(&a, &b);
    let findings = findings(&groups, &differing);
    Ok(Drift { drifted: !findings.is_empty(), findings, differing, samples: changes, groups })
}

/// Hash of what tells a sample apart from others, and hash of its sizes.
fn identity(header: &DataProfile, sample: &ProfiledSample) -> (u64, u64) {
    // Both sides are hashed in this process, so any hash that is the same throughout it will do.
    let hash = |of: &dyn Fn(&mut DefaultHasher)| {
        let mut hasher = DefaultHasher::new();
        of(&mut hasher);
        hasher.finish()
    };
    (
        hash(&|h| (header.sources.get(sample.source as usize), sample.record_hash).hash(h)),
        hash(&|h| (&sample.shape, sample.kind, sample.media_bytes, sample.media_ms).hash(h)),
    )
}

/// `known` holds for each record and sizes how many more there were before than after.
fn count_changes(known: &HashMap<(u64, u64), i64>, changes: &mut SampleChanges) {
    let mut by_record: HashMap<u64, (u64, u64)> = HashMap::new();
    for ((record, _), surplus) in known {
        let (gone, new) = by_record.entry(*record).or_default();
        *gone += u64::try_from(*surplus).unwrap_or(0);
        *new += u64::try_from(-surplus).unwrap_or(0);
    }
    for (gone, new) in by_record.into_values() {
        let in_both = gone.min(new);
        changes.changed += in_both;
        changes.removed += gone - in_both;
        changes.added += new - in_both;
    }
    changes.same = changes.before - changes.removed - changes.changed;
}

fn sizes(sample: &ProfiledSample) -> [u64; 3] {
    let shape = &sample.shape;
    [shape.encoder_tokens(), shape.llm_tokens.into(), shape.label_tokens.into()]
}

/// How often each size is there; of a random sample, what it stands for.
#[derive(Debug, Default)]
struct Counts {
    samples: u64,
    weight: f64,
    by_size: [BTreeMap<u64, f64>; 3],
}

impl Counts {
    fn push(&mut self, sizes: [u64; 3], weight: f64) {
        self.samples += 1;
        self.weight += weight;
        for (counts, size) in self.by_size.iter_mut().zip(sizes) {
            *counts.entry(size).or_default() += weight;
        }
    }

    /// Mean and variance of a size.
    fn moments(&self, size: usize) -> (f64, f64) {
        let moment = |of: &dyn Fn(f64) -> f64| {
            let sum: f64 = self.by_size[size].iter().map(|(value, n)| of(*value as f64) * n).sum();
            if self.weight > 0.0 { sum / self.weight } else { 0.0 }
        };
        let mean = moment(&|value| value);
        (mean, moment(&|value| (value - mean).powi(2)))
    }

    /// The smallest size that so large a part of the samples does not pass.
    fn percentile(&self, size: usize, part: f64) -> u64 {
        let mut up_to = 0.0;
        // Sums of weights are rounded; a hair less than wanted is enough.
        let wanted = self.weight * part * (1.0 - 1e-12);
        let found = self.by_size[size].iter().find(|(_, n)| {
            up_to += *n;
            up_to >= wanted
        });
        found.or(self.by_size[size].last_key_value()).map_or(0, |(value, _)| *value)
    }
}

/// One profile, in groups.
#[derive(Debug, Default)]
struct Side {
    all: Counts,
    kinds: BTreeMap<String, Counts>,
    sources: BTreeMap<String, Counts>,
}

impl Side {
    fn push(&mut self, header: &DataProfile, sample: &ProfiledSample) {
        let stratum = header.strata.get(sample.source as usize).filter(|stratum| stratum.drawn > 0);
        let weight = stratum.map_or(1.0, |stratum| stratum.population as f64 / stratum.drawn as f64);
        let source = header.sources.get(sample.source as usize).cloned().unwrap_or_default();
        let sizes = sizes(sample);
        self.all.push(sizes, weight);
        self.kinds.entry(sample.kind.to_string()).or_default().push(sizes, weight);
        self.sources.entry(source).or_default().push(sizes, weight);
    }
}

fn groups(sides: &[Side; 2], is_whole: bool) -> Vec<Group> {
    let [a, b] = sides;
    let totals = [a.all.weight, b.all.weight];
    let mut groups = vec![group("all", "all samples", [&a.all, &b.all], totals, is_whole)];
    let none = Counts::default();
    for (of, a, b) in [("kind", &a.kinds, &b.kinds), ("source", &a.sources, &b.sources)] {
        let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
        for name in names {
            let counts = [a, b].map(|side| side.get(name).unwrap_or(&none));
            groups.push(group(of, name, counts, totals, is_whole));
        }
    }
    groups
}

fn group(of: &'static str, name: &str, counts: [&Counts; 2], totals: [f64; 2], is_whole: bool) -> Group {
    let share = |side: usize| if totals[side] > 0.0 { counts[side].weight / totals[side] } else { 0.0 };
    Group {
        of,
        name: name.to_owned(),
        samples: counts.map(|c| c.samples),
        share: [share(0), share(1)],
        sizes: (0..SIZES.len()).map(|size| size_drift(size, counts, is_whole)).collect(),
    }
}

fn size_drift(size: usize, counts: [&Counts; 2], is_whole: bool) -> SizeDrift {
    let [a, b] = counts;
    let moments = counts.map(|c| c.moments(size));
    let mean = moments.map(|(mean, _)| mean);
    let [n, m] = counts.map(|c| c.samples as f64);
    let is_both = n > 0.0 && m > 0.0;
    let distance = if is_both { distance(a, b, size) } else { 0.0 };
    // What chance alone passes in 1 of 20 draws: of distances, and of differences of means.
    let distance_max =
        if is_both { DISTANCE_MAX.max(1.358 * ((n + m) / (n * m)).sqrt()) } else { DISTANCE_MAX };
    let chance = 1.96 * (moments[0].1 / n + moments[1].1 / m).sqrt();
    let moved = (mean[1] - mean[0]).abs();
    // One sample says nothing of how means vary.
    let is_sure = is_whole && moved > MEAN_SURE * mean[0];
    let is_mean_off = n.min(m) > 1.0 && moved > MEAN_MAX * mean[0] && (moved > chance || is_sure);
    SizeDrift {
        name: SIZES[size],
        mean,
        p50: counts.map(|c| c.percentile(size, 0.50)),
        p95: counts.map(|c| c.percentile(size, 0.95)),
        max: counts.map(|c| c.percentile(size, 1.0)),
        distance,
        distance_max,
        drifted: distance > distance_max || is_mean_off,
    }
}

/// The largest difference between the shares of samples up to a size.
fn distance(a: &Counts, b: &Counts, size: usize) -> f64 {
    let sizes: BTreeSet<&u64> = a.by_size[size].keys().chain(b.by_size[size].keys()).collect();
    let (mut in_a, mut in_b, mut largest) = (0.0_f64, 0.0_f64, 0.0_f64);
    for value in sizes {
        in_a += a.by_size[size].get(value).unwrap_or(&0.0);
        in_b += b.by_size[size].get(value).unwrap_or(&0.0);
        largest = largest.max((in_a / a.weight - in_b / b.weight).abs());
    }
    largest
}

/// Settings, family and hashes of the model's files that differ.
fn differing(a: &DataProfile, b: &DataProfile) -> Vec<(String, String, String)> {
    let mut list = Vec::new();
    let mut compare = |name: &str, a: Option<&String>, b: Option<&String>| {
        if a != b {
            let text = |value: Option<&String>| value.cloned().unwrap_or_else(|| "none".to_owned());
            list.push((name.to_owned(), text(a), text(b)));
        }
    };
    compare("family", Some(&a.family), Some(&b.family));
    for name in ["tokenizer", "processor"] {
        compare(name, a.made_from.get(name), b.made_from.get(name));
    }
    let names: BTreeSet<&String> = a.settings.keys().chain(b.settings.keys()).collect();
    for name in names {
        compare(name, a.settings.get(name), b.settings.get(name));
    }
    list
}

fn findings(groups: &[Group], differing: &[(String, String, String)]) -> Vec<String> {
    let mut findings = Vec::new();
    for (name, _, _) in
        differing.iter().filter(|(n, ..)| ["family", "tokenizer", "processor"].contains(&&**n))
    {
        findings.push(format!("the {name} differs: a plan made before is refused"));
    }
    let all = &groups[0];
    if all.samples.contains(&0) {
        if all.samples != [0, 0] {
            findings.push(format!("{} samples before, {} after", all.samples[0], all.samples[1]));
        }
        return findings;
    }
    for size in all.sizes.iter().filter(|size| size.drifted) {
        let [before, after] = size.mean;
        let rule = if size.distance > size.distance_max {
            format!("distance {:.2}, above {:.2} is drift", size.distance, size.distance_max)
        } else if (after - before).abs() > MEAN_SURE * before {
            format!("above {} is drift", number::whole_percent(MEAN_SURE))
        } else {
            format!("above {} and beyond chance is drift", number::whole_percent(MEAN_MAX))
        };
        findings.push(format!("{}: mean {} ({}), {rule}", size.name, change(size.mean), percent(size.mean)));
    }
    for kind in groups.iter().filter(|group| group.of == "kind") {
        // Two standard errors of a difference of shares.
        let [p, q] = kind.share;
        let [n, m] = all.samples.map(|n| n as f64);
        let chance = 1.96 * (p * (1.0 - p) / n + q * (1.0 - q) / m).sqrt();
        // Of a kind that so many samples had, none in as many draws.
        let none_of = |share: f64, draws: f64| (1.0 - share).powf(draws);
        let is_unlikely = match kind.samples {
            [_, 0] => none_of(p, m) < 0.05,
            [0, _] => none_of(q, n) < 0.05,
            _ => false,
        };
        if (q - p).abs() <= SHARE_MAX.max(chance) && is_unlikely {
            let [before, after] = kind.samples;
            findings.push(if after == 0 {
                format!("{} samples: all {before} are gone", kind.name)
            } else {
                format!("{} samples: {after} where there were none", kind.name)
            });
        } else if (q - p).abs() > SHARE_MAX.max(chance) {
            findings.push(format!(
                "{} samples: {} before, {} after, a change above {:.0} points is drift",
                kind.name,
                number::percent(p),
                number::percent(q),
                SHARE_MAX.max(chance) * 100.0
            ));
        }
    }
    findings
}

fn change([a, b]: [f64; 2]) -> String {
    format!("{} -> {}", number::number(a), number::number(b))
}

fn percent([a, b]: [f64; 2]) -> String {
    match b / a - 1.0 {
        _ if a <= 0.0 => if b > 0.0 { "from 0" } else { "" }.to_owned(),
        ratio if ratio < 10.0 => number::signed_percent(ratio),
        _ => number::times(b / a),
    }
}

/// The drift as text of at most 100 columns.
pub fn text(drift: &Drift) -> String {
    let mut text = String::new();
    let samples = &drift.samples;
    let _ = writeln!(text, "samples     {} before, {} after", samples.before, samples.after);
    let _ = writeln!(
        text,
        "            {} same, {} changed, {} added, {} removed",
        samples.same, samples.changed, samples.added, samples.removed
    );
    for (name, a, b) in drift.differing.iter().take(SHOWN) {
        let _ = writeln!(text, "{:<11} {} -> {}", short(name, NAME), short(a, 30), short(b, 30));
    }
    put_more(&mut text, drift.differing.len());
    for (size, name) in SIZES.iter().enumerate() {
        put_sizes(&mut text, &drift.groups, size, name);
    }
    put_shares(&mut text, &drift.groups[1..]);
    if drift.drifted {
        text.push_str("\ndrifted: a new plan is advised\n");
        for finding in &drift.findings {
            let _ = writeln!(text, "  {finding}");
        }
    } else {
        if drift.groups.iter().flat_map(|group| &group.sizes).any(|size| size.drifted) {
            text.push_str("\n* drifted within this group; all samples together decide\n");
        }
        let _ = writeln!(
            text,
            "\nalike: over all samples no change is both beyond chance and above its limit\n       (distance {DISTANCE_MAX:.2}, mean \
             {}, share of a kind {:.0} points)\n{}",
            number::whole_percent(MEAN_MAX),
            SHARE_MAX * 100.0,
            if samples.same == samples.before && samples.same == samples.after {
                "no new plan is needed"
            } else {
                "the layout of the old plan still suits; but the samples are others, and `dflop train`\nrefuses a plan of \
                 other samples: run `dflop plan` before you train on them"
            }
        );
    }
    text
}

/// How many there are that are not shown.
fn put_more(text: &mut String, total: usize) {
    if total > SHOWN {
        let _ = writeln!(text, "and {} more", total - SHOWN);
    }
}

/// One size of each group, before and after; a star where it drifted.
fn put_sizes(text: &mut String, groups: &[Group], size: usize, name: &str) {
    let _ = writeln!(
        text,
        "\n{:<NAME$} {:>17} {:>9} {:>15} {:>15} {:>9}",
        name.replace('_', " "),
        "mean",
        "change",
        "p50",
        "p95",
        "distance"
    );
    let pair = |[a, b]: [u64; 2]| format!("{} -> {}", number::thousands(a), number::thousands(b));
    for group in groups.iter().take(SHOWN) {
        let drift = &group.sizes[size];
        let [mean, moved] = match group.samples {
            [0, _] => [format!("new, {}", number::number(drift.mean[1])), String::new()],
            [_, 0] => [format!("gone, {}", number::number(drift.mean[0])), String::new()],
            _ => [change(drift.mean), percent(drift.mean)],
        };
        let _ = writeln!(
            text,
            "{} {mean:>17} {moved:>9} {:>15} {:>15} {:>7.2}{}",
            width::pad(&short(&group.name, NAME), NAME),
            pair(drift.p50),
            pair(drift.p95),
            drift.distance,
            if drift.drifted { " *" } else { "" }
        );
    }
    put_more(text, groups.len());
}

/// The part of all samples that each group is.
fn put_shares(text: &mut String, groups: &[Group]) {
    let _ = writeln!(text, "\n{:<NAME$} {:>17} {:>19}", "share of samples", "before", "after");
    for group in groups.iter().take(SHOWN) {
        let [before, after] = group.share.map(|share| share * 100.0);
        let _ = writeln!(
            text,
            "{} {before:>15.1} % {after:>17.1} %",
            width::pad(&short(&group.name, NAME), NAME)
        );
    }
    put_more(text, groups.len());
}

/// `text` within so many columns.
fn short(text: &str, columns: usize) -> String {
    width::cut(text, columns, "...")
}
