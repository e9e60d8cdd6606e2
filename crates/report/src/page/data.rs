//! The data: how many samples of each kind, how their sizes spread, and which are the heaviest.

use super::{Section, first_of, plotted};
use crate::chart::{
    Bar, BarPart, Bins, Column, Dots, Mark, ScatterPlot, bars, histogram, legend, numbers, partly,
    scatter_plot, spread, table, table_below, words,
};
use crate::{OutlierView, Outliers, Report};
use dflop_types::{DataProfile, ProfiledSample, SampleKind, clipped, number, statistics};
use maud::{Markup, html};

/// The most samples that are drawn in the plot of both sizes.
const MOST_DOTS: usize = 1_500;
/// So many of the heaviest samples are listed by name. They are always drawn.
const MOST_HEAVY: usize = 12;
/// The most problems, and the most sources, that are listed.
const MOST_ROWS: usize = 20;
/// The most sources that have histograms of their own.
const MOST_SOURCES: usize = 8;
/// The most characters of a sample's name that are shown.
const MOST_NAME: usize = 80;

const fn class_of(kind: SampleKind) -> &'static str {
    match kind {
        SampleKind::Text => "k-text",
        SampleKind::Image => "k-image",
        SampleKind::MultiImage => "k-multi",
        SampleKind::Video => "k-video",
        SampleKind::Audio => "k-audio",
    }
}

const fn name_of(kind: SampleKind) -> &'static str {
    match kind {
        SampleKind::Text => "text",
        SampleKind::Image => "image",
        SampleKind::MultiImage => "several images",
        SampleKind::Video => "video",
        SampleKind::Audio => "audio",
    }
}

const fn mark_of(kind: SampleKind) -> Mark {
    match kind {
        SampleKind::Text => Mark::Square,
        SampleKind::Image => Mark::Circle,
        SampleKind::MultiImage => Mark::Diamond,
        SampleKind::Video => Mark::Triangle,
        SampleKind::Audio => Mark::Cross,
    }
}

/// One size of a sample.
type Size = fn(&ProfiledSample) -> u64;

/// The kinds that occur, each with its samples.
type ByKind<'a> = Vec<(SampleKind, Vec<&'a ProfiledSample>)>;

/// The section.
pub(super) fn section(report: &Report) -> Option<Section> {
    let data = report.data.as_ref()?;
    let by_kind: ByKind = SampleKind::ALL
        .into_iter()
        .map(|kind| (kind, data.samples.iter().filter(|s| s.kind == kind).collect::<Vec<_>>()))
        .filter(|(_, samples)| !samples.is_empty())
        .collect();
    let body = html! {
        @if data.samples.is_empty() {
            p { "The data profile holds no sample." }
        } @else {
            (counts(data, &by_kind))
            h3 { "How sizes spread" }
            (histograms(&by_kind))
            (histograms_by_source(data))
            (joint(data, &by_kind))
            @if let Some(outliers) = &report.outliers { (effect(outliers, data.samples.len() as u64)) }
        }
        (problems(data))
    };
    Some(Section { id: "data", name: "The data", body })
}

/// Counts, quantiles and totals of each kind.
fn counts(data: &DataProfile, by_kind: &ByKind) -> Markup {
    let total = data.samples.len() as u64;
    let share = |samples: &[&ProfiledSample]| samples.len() as f64 / total as f64;
    let bar = Bar {
        name: "samples".to_owned(),
        is_predicted: false,
        parts: by_kind
            .iter()
            .map(|(kind, samples)| BarPart {
                class: class_of(*kind),
                value: share(samples) * 100.0,
                title: format!(
                    "{}: {} ({})",
                    name_of(*kind),
                    number::counted(samples.len() as u64, "sample"),
                    number::percent(share(samples))
                ),
            })
            .collect(),
        total: number::thousands(total),
    };
    let part_of = |size: Size, name: &str| {
        let sums: Vec<f64> =
            by_kind.iter().map(|(_, samples)| samples.iter().map(|s| size(s) as f64).sum()).collect();
        let whole: f64 = sums.iter().sum();
        Bar {
            name: name.to_owned(),
            is_predicted: false,
            parts: by_kind
                .iter()
                .zip(&sums)
                .map(|((kind, _), sum)| BarPart {
                    class: class_of(*kind),
                    value: sum / whole * 100.0,
                    title: format!(
                        "{}: {} ({})",
                        name_of(*kind),
                        number::number(*sum),
                        number::percent(sum / whole)
                    ),
                })
                .collect(),
            total: number::compact(whole),
        }
    };
    let drawn = [
        bar,
        part_of(encoder_tokens, "encoder tokens"),
        part_of(llm_tokens, "LLM tokens"),
        part_of(label_tokens, "label tokens"),
    ];
    let all: Vec<&ProfiledSample> = data.samples.iter().collect();
    let line = |name: &str, samples: &[&ProfiledSample]| {
        vec![
            name.to_owned(),
            number::thousands(samples.len() as u64),
            number::percent(share(samples)),
            spread_of(samples.iter().map(|s| encoder_tokens(s)).collect()),
            spread_of(samples.iter().map(|s| llm_tokens(s)).collect()),
            spread_of(samples.iter().map(|s| label_tokens(s)).collect()),
            number::file_bytes(samples.iter().fold(0, |sum, s| sum.saturating_add(s.media_bytes))),
        ]
    };
    let mut rows: Vec<Vec<String>> =
        by_kind.iter().map(|(kind, samples)| line(name_of(*kind), samples)).collect();
    rows.push(line("all", &all));
    let columns = [
        words("kind"),
        numbers("samples"),
        numbers("share"),
        numbers("encoder tokens"),
        numbers("LLM tokens"),
        numbers("label tokens"),
        numbers("media"),
    ];
    html! {
        p {
            strong { (number::counted(total, "sample")) } " from " (number::counted(data.sources.len() as u64, "source"))
            ", sizes by the shape rule of " (data.family) ". A few samples hold much of the work: what a step costs depends on which samples meet in a microbatch."
        }
        figure class="wide" {
            figcaption { "What each kind is of all samples, and of all tokens" }
            (bars("Shares of each kind, as in the table below.", 720.0, &drawn, |v| format!("{} %", number::tick(v)), ""))
            (legend(by_kind.iter().map(|(kind, _)| (class_of(*kind), name_of(*kind)))))
        }
        (table("Samples by kind; tokens of a sample as median / 95th percentile / largest", &columns, &rows))
        (sources(data))
    }
}

fn sources(data: &DataProfile) -> Markup {
    let mut sizes = vec![(Vec::new(), Vec::new(), 0u64); data.sources.len()];
    for sample in &data.samples {
        if let Some(of_source) = sizes.get_mut(sample.source as usize) {
            of_source.0.push(encoder_tokens(sample));
            of_source.1.push(llm_tokens(sample));
            of_source.2 = of_source.2.saturating_add(sample.media_bytes);
        }
    }
    let rows: Vec<Vec<String>> = data
        .sources
        .iter()
        .zip(sizes)
        .take(MOST_ROWS)
        .map(|(name, (encoder, llm, media_bytes))| {
            let bad = data.problems.iter().filter(|problem| problem.file == *name).count();
            vec![
                clipped(name, MOST_NAME),
                number::thousands(llm.len() as u64),
                spread_of(encoder),
                spread_of(llm),
                number::file_bytes(media_bytes),
                number::thousands(bad as u64),
            ]
        })
        .collect();
    let columns = [
        words("source"),
        numbers("samples"),
        numbers("encoder tokens"),
        numbers("LLM tokens"),
        numbers("media"),
        numbers("bad samples"),
    ];
    html! {
        @if !rows.is_empty() {
            (table("Samples by source; tokens of a sample as median / 95th percentile / largest", &columns, &rows))
        }
        (first_of(rows.len(), data.sources.len(), "source"))
    }
}

/// Median / 95th percentile / largest.
fn spread_of(mut sizes: Vec<u64>) -> String {
    sizes.sort_unstable();
    let quantile =
        |part| statistics::occurring(&sizes, part).map_or(number::NONE.to_owned(), number::thousands);
    [0.5, 0.95, 1.0].map(quantile).join(" / ")
}

/// Sizes of each kind, stacked.
fn histograms(by_kind: &ByKind) -> Markup {
    let classes: Vec<&str> = by_kind.iter().map(|(kind, _)| class_of(*kind)).collect();
    let names: Vec<&str> = by_kind.iter().map(|(kind, _)| name_of(*kind)).collect();
    let mut columns: Vec<Column<'_>> = vec![words("tokens")];
    columns.extend(by_kind.iter().map(|(kind, _)| numbers(name_of(*kind))));
    let sizes: [(&str, Size); 3] =
        [("encoder tokens", encoder_tokens), ("LLM tokens", llm_tokens), ("label tokens", label_tokens)];
    html! {
        (legend(classes.iter().copied().zip(names.iter().copied())))
        div class="row three" {
            @for (unit, size) in sizes {
                @let series: Vec<Vec<u64>> = by_kind.iter().map(|(_, samples)| samples.iter().map(|s| size(s)).collect()).collect();
                @let bins = Bins::new(&series);
                @let label = format!("Histogram of {unit} of a sample, stacked by kind, as in the table below.");
                (plotted(&format!("{} of a sample", capital(unit)), &histogram(&label, &bins, &classes, &names, unit),
                    &table_below(unit, &columns, &bins.rows())))
            }
        }
    }
}

/// The same histograms for each source.
fn histograms_by_source(data: &DataProfile) -> Markup {
    let of_source = |source: usize| -> ByKind {
        let samples = |kind| -> Vec<&ProfiledSample> {
            data.samples.iter().filter(|s| s.source as usize == source && s.kind == kind).collect()
        };
        let kinds = SampleKind::ALL.into_iter().map(|kind| (kind, samples(kind)));
        kinds.filter(|(_, samples)| !samples.is_empty()).collect()
    };
    let drawn: Vec<(&String, ByKind)> = data
        .sources
        .iter()
        .enumerate()
        .take(MOST_SOURCES)
        .map(|(source, name)| (name, of_source(source)))
        .filter(|(_, by_kind)| !by_kind.is_empty())
        .collect();
    html! {
        @if data.sources.len() > 1 {
            @for (name, by_kind) in &drawn {
                details {
                    summary { "How sizes spread in " (clipped(name, MOST_NAME)) }
                    (histograms(by_kind))
                }
            }
            (first_of(drawn.len(), data.sources.len(), "source"))
        }
    }
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

/// Encoder tokens against LLM tokens, and the heaviest samples by name.
fn joint(data: &DataProfile, by_kind: &ByKind) -> Markup {
    let sum = |size: Size| data.samples.iter().map(|s| size(s) as f64).sum::<f64>().max(1.0);
    let (encoder_sum, llm_sum) = (sum(encoder_tokens), sum(llm_tokens));
    // A sample's weight is its fraction of all encoder tokens plus its fraction of all LLM tokens. So no cost model is needed.
    let weight = |s: &ProfiledSample| encoder_tokens(s) as f64 / encoder_sum + llm_tokens(s) as f64 / llm_sum;
    let mut heavy: Vec<usize> = (0..data.samples.len()).collect();
    heavy.sort_by(|&a, &b| weight(&data.samples[b]).total_cmp(&weight(&data.samples[a])).then(a.cmp(&b)));
    heavy.truncate(MOST_HEAVY);
    let mut drawn = spread(data.samples.len(), MOST_DOTS - MOST_HEAVY);
    drawn.extend(&heavy);
    drawn.sort_unstable();
    drawn.dedup();
    let series: Vec<Dots> = by_kind
        .iter()
        .map(|(kind, _)| Dots {
            class: class_of(*kind),
            mark: mark_of(*kind),
            points: drawn
                .iter()
                .filter(|&&i| data.samples[i].kind == *kind)
                .map(|i| {
                    let sample = &data.samples[*i];
                    let text = heavy.contains(i).then(|| {
                        format!(
                            "{}: {} encoder tokens, {} LLM tokens",
                            clipped(&sample.id, MOST_NAME),
                            number::thousands(encoder_tokens(sample)),
                            number::thousands(llm_tokens(sample))
                        )
                    });
                    (encoder_tokens(sample) as f64, llm_tokens(sample) as f64, text)
                })
                .collect(),
        })
        .collect();
    let plot = ScatterPlot {
        label: "Encoder tokens against LLM tokens, a dot a sample; the heaviest are in the table.",
        is_log: true,
        is_square: false,
        show: number::compact,
        name_x: "encoder tokens, log scale",
        name_y: "LLM tokens, log scale",
    };
    let rows: Vec<Vec<String>> = heavy
        .iter()
        .map(|&i| {
            let s = &data.samples[i];
            vec![
                clipped(&s.id, MOST_NAME),
                name_of(s.kind).to_owned(),
                number::thousands(encoder_tokens(s)),
                number::percent(encoder_tokens(s) as f64 / encoder_sum),
                number::thousands(llm_tokens(s)),
                number::percent(llm_tokens(s) as f64 / llm_sum),
            ]
        })
        .collect();
    let columns = [
        words("sample"),
        words("kind"),
        numbers("encoder tokens"),
        numbers("of all"),
        numbers("LLM tokens"),
        numbers("of all"),
    ];
    let keys = by_kind.iter().map(|(kind, _)| (key_of(*kind), name_of(*kind)));
    html! {
        h3 { "Two loads that do not go together" }
        p { "A sample far to the right is work for the encoder, one far up is work for the LLM. One number for each sample cannot balance both." }
        div class="row" {
            (plotted("Encoder tokens against LLM tokens", &scatter_plot(&plot, &series), &html! {
                (legend(keys))
                @if let Some(text) = partly(drawn.len(), data.samples.len(), "sample") { p class="note" { (text) } }
            }))
            (table("The heaviest samples, by their shares of all encoder and LLM tokens", &columns, &rows))
        }
    }
}

const fn key_of(kind: SampleKind) -> &'static str {
    match kind {
        SampleKind::Text => "k-text square",
        SampleKind::Image => "k-image round",
        SampleKind::MultiImage => "k-multi diamond",
        SampleKind::Video => "k-video triangle",
        SampleKind::Audio => "k-audio cross",
    }
}

/// How long the heaviest samples take compared with an even microbatch, and which samples do not fit.
fn effect(outliers: &Outliers, num_samples: u64) -> Markup {
    let times =
        |ms: f64, even: f64| if even > 0.0 { number::times(ms / even) } else { number::NONE.to_owned() };
    let row = |o: &OutlierView| {
        vec![
            clipped(&o.id, MOST_NAME),
            number::ms(o.encoder_ms),
            times(o.encoder_ms, outliers.even_encoder_ms),
            number::ms(o.llm_ms),
            times(o.llm_ms, outliers.even_llm_ms),
            number::memory_size(o.needed_bytes),
        ]
    };
    let columns = [
        words("sample"),
        numbers("encoder"),
        numbers("of an even microbatch"),
        numbers("slowest LLM stage"),
        numbers("of an even microbatch"),
        numbers("memory alone"),
    ];
    let longer = if outliers.num_longer == 0 {
        "No sample alone takes longer than an even microbatch: all can be hidden by packing.".to_owned()
    } else {
        format!(
            "Samples that alone take longer than an even microbatch: {} of {}. Packing cannot hide them, a step \
             that holds one waits for it.",
            number::thousands(outliers.num_longer),
            number::thousands(num_samples)
        )
    };
    let fit = match (outliers.budget_bytes, outliers.num_unfit) {
        (None, _) => {
            "No memory budget is set (cluster.memory_budget_bytes): what fits is not checked.".to_owned()
        }
        (Some(budget), 0) => {
            format!("Every sample fits the memory budget of {}.", number::memory_size(budget))
        }
        (Some(budget), n) => format!(
            "Samples that do not fit the memory budget of {1} even alone: {0}, listed below. Training stops at the \
             first.",
            number::thousands(n),
            number::memory_size(budget)
        ),
    };
    html! {
        h3 { "What the heaviest samples do to a step" }
        p {
            "Predicted for the plan, forward and backward of one sample alone. An even microbatch takes "
            (number::ms(outliers.even_encoder_ms)) " on an encoder replica and "
            (number::ms(outliers.even_llm_ms)) " on the slowest LLM stage: the times of its samples alone, added up; packed together they take less. " (longer) " " (fit)
        }
        (table("The heaviest samples against an even microbatch", &columns,
            &outliers.heaviest.iter().map(row).collect::<Vec<_>>()))
        @if !outliers.unfit.is_empty() {
            (table("Samples that do not fit on any rank", &columns,
                &outliers.unfit.iter().map(row).collect::<Vec<_>>()))
            (first_of(outliers.unfit.len(), outliers.num_unfit as usize, "sample"))
        }
    }
}

/// Samples that were left out.
fn problems(data: &DataProfile) -> Markup {
    let rows: Vec<Vec<String>> = data
        .problems
        .iter()
        .take(MOST_ROWS)
        .map(|p| {
            let sample = p.id.clone().or_else(|| p.position.map(|at| format!("record {at}")));
            vec![
                clipped(&p.file, MOST_NAME),
                clipped(&sample.unwrap_or_else(|| number::NONE.to_owned()), MOST_NAME),
                clipped(&p.cause, 4 * MOST_NAME),
            ]
        })
        .collect();
    html! {
        @if !rows.is_empty() {
            h3 { "Left out: " (number::counted(data.problems.len() as u64, "sample")) " that could not be read" }
            (table("Samples that could not be read", &[words("file"), words("sample"), words("why")], &rows))
            (first_of(rows.len(), data.problems.len(), "problem"))
        }
    }
}

/// Encoder tokens of a sample. An unsound file may hold sizes whose sum does not fit 64 bits; then it is the largest number.
fn encoder_tokens(sample: &ProfiledSample) -> u64 {
    sample
        .shape
        .encoder_segments
        .iter()
        .fold(0, |sum: u64, s| sum.saturating_add(u64::from(s.count) * u64::from(s.tokens)))
}

fn llm_tokens(sample: &ProfiledSample) -> u64 {
    u64::from(sample.shape.llm_tokens)
}

fn label_tokens(sample: &ProfiledSample) -> u64 {
    u64::from(sample.shape.label_tokens)
}
