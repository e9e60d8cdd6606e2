//! Statistics of samples that come one by one.

use crate::statistics::estimate::{Estimate, StratumValues, ValueCounts};
use crate::statistics::summary::{Distribution, HeavySample, SampleGroup, Statistics};
use dflop_types::{DataProfile, ProfiledSample, SampleKind, Stratum};

impl Statistics {
    /// The statistics of a data profile.
    ///
    /// *Complexity*: O(n log m) in n samples of m different sizes. [`Tally`] takes samples one by one.
    pub fn new(profile: &DataProfile) -> Self {
        let mut tally = Tally::new(&profile.sources);
        profile.samples.iter().for_each(|sample| tally.push(sample));
        tally.finish(profile)
    }
}

/// Heaviest samples named.
const NAMED: usize = 5;
/// What is distributed.
const SIZES: [&str; 3] = ["encoder_tokens", "llm_tokens", "label_tokens"];

/// What the samples seen so far come to, exactly.
///
/// *Memory*: one counter a different token count and source, so at most the largest token count whatever the number of
/// samples; in practice some thousands.
#[derive(Debug, Clone)]
pub struct Tally {
    num_samples: u64,
    media_bytes: u64,
    media_ms: u64,
    sound_ms: u64,
    /// In the order of [`SampleKind::ALL`].
    kinds: Vec<SampleGroup>,
    sources: Vec<SampleGroup>,
    /// One a source, of each of [`SIZES`].
    counts: Vec<[ValueCounts; 3]>,
    /// With their weights, the heaviest first.
    heaviest: Vec<(u64, HeavySample)>,
}

impl Tally {
    /// Nothing yet, of sources with these names.
    pub fn new(sources: &[String]) -> Self {
        let zero = |name: String| SampleGroup { name, ..SampleGroup::default() };
        Self {
            num_samples: 0,
            media_bytes: 0,
            media_ms: 0,
            sound_ms: 0,
            kinds: SampleKind::ALL.iter().map(|kind| zero(kind.to_string())).collect(),
            sources: sources.iter().cloned().map(zero).collect(),
            counts: sources.iter().map(|_| Default::default()).collect(),
            heaviest: Vec::new(),
        }
    }

    /// Counts one sample in. One of a source without a name counts nowhere.
    pub fn push(&mut self, sample: &ProfiledSample) {
        let index = sample.source as usize;
        let (Some(source), Some(counts)) = (self.sources.get_mut(index), self.counts.get_mut(index)) else {
            return;
        };
        let (llm, label) = (u64::from(sample.shape.llm_tokens), u64::from(sample.shape.label_tokens));
        let encoder = sample.shape.encoder_tokens();
        self.num_samples += 1;
        // A sum that does not fit becomes the largest number: headers of a hostile dataset can claim any size.
        self.media_bytes = self.media_bytes.saturating_add(sample.media_bytes);
        self.media_ms = self.media_ms.saturating_add(sample.media_ms);
        if sample.kind == SampleKind::Audio {
            self.sound_ms = self.sound_ms.saturating_add(sample.media_ms);
        }
        let kind = SampleKind::ALL.iter().position(|kind| *kind == sample.kind).unwrap_or(0);
        for share in [source, &mut self.kinds[kind]] {
            share.samples += 1;
            share.encoder_tokens = share.encoder_tokens.saturating_add(encoder);
            share.llm_tokens = share.llm_tokens.saturating_add(llm);
            share.label_tokens = share.label_tokens.saturating_add(label);
        }
        for (counts, size) in counts.iter_mut().zip([encoder, llm, label]) {
            *counts.entry(size).or_default() += 1;
        }
        // Of equals, the first of the profile stands first.
        let weight = encoder.saturating_add(llm);
        let rank = self.heaviest.partition_point(|(other, _)| *other >= weight);
        if rank < NAMED {
            let heavy = HeavySample {
                id: sample.id.clone(),
                source: self.sources[index].name.clone(),
                kind: sample.kind,
                encoder_tokens: encoder,
                llm_tokens: llm,
            };
            self.heaviest.insert(rank, (weight, heavy));
            self.heaviest.truncate(NAMED);
        }
    }

    /// The statistics; `header` says what was left out, and of how many a sample was drawn.
    pub fn finish(&self, header: &DataProfile) -> Statistics {
        Statistics {
            num_samples: self.num_samples,
            num_problems: header.problems.len() as u64,
            num_population: (!header.strata.is_empty())
                .then(|| header.strata.iter().map(|stratum| stratum.population).sum()),
            media_bytes: self.media_bytes,
            media_ms: self.media_ms,
            sound_ms: self.sound_ms,
            kinds: self.kinds.iter().filter(|share| share.samples > 0).cloned().collect(),
            sources: self.sources.clone(),
            distributions: (0..SIZES.len()).map(|size| self.distribution(size, &header.strata)).collect(),
            heaviest: self.heaviest.iter().map(|(_, sample)| sample.clone()).collect(),
        }
    }

    fn distribution(&self, size: usize, strata: &[Stratum]) -> Distribution {
        let mut all = ValueCounts::new();
        for counts in &self.counts {
            for (&value, &count) in &counts[size] {
                *all.entry(value).or_default() += count;
            }
        }
        let mut distribution = Distribution::of_counts(SIZES[size], &all);
        let strata: Vec<_> = strata
            .iter()
            .zip(&self.counts)
            .map(|(stratum, counts)| StratumValues {
                population: stratum.population,
                drawn: stratum.drawn,
                counts: &counts[size],
            })
            .collect();
        if let Some(estimate) = Estimate::new(&strata) {
            distribution.mean = estimate.mean;
            distribution.p5 = estimate.percentile(0.05);
            distribution.p50 = estimate.percentile(0.5);
            distribution.p95 = estimate.percentile(0.95);
            distribution.p99 = estimate.percentile(0.99);
            distribution.intervals = Some(estimate.intervals());
        }
        distribution
    }
}
