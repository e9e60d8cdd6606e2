//! The model profile as measured (or estimated) curves, module by module.

use super::{Section, links, plotted};
use crate::Report;
use crate::chart::{
    Frame, Line, LinePlot, legend, line_plot, names, numbers, partly, spread, table, table_below, words,
};
use dflop_types::{
    MeasuredCurve, MeasuredPoint, ModelProfile, ModuleProfile, Recompute, RecomputePoint, clipped, number,
    statistics,
};
use maud::{Markup, html};

/// The most modules that are drawn. A sound profile has six to ten.
const MOST_MODULES: usize = 12;
/// The most rows of a table.
const MOST_ROWS: usize = 200;

/// For a module: its name in words, what its size counts, and the part of the model to which it belongs.
fn describe(name: &str) -> (&str, &'static str, &'static str) {
    match name {
        "encoder_embedding" => ("Encoder embedding", "encoder tokens", "Encoder"),
        "encoder_layer" => ("One encoder layer", "encoder tokens", "Encoder"),
        ModelProfile::WINDOW_LAYER => ("One encoder layer with windows", "encoder tokens", "Encoder"),
        "projector" => ("Projector", "encoder tokens", "Encoder"),
        "sound_embedding" => ("Encoder embedding of sounds", "encoder tokens of sounds", "Encoder"),
        "sound_layer" => ("One encoder layer of sounds", "encoder tokens of sounds", "Encoder"),
        "sound_projector" => ("Projector of sounds", "encoder tokens of sounds", "Encoder"),
        "llm_embedding" => ("LLM embedding", "LLM tokens", "LLM"),
        "llm_layer" => ("One LLM layer", "LLM tokens", "LLM"),
        "llm_head" => ("LLM head and loss", "label tokens", "LLM"),
        other => (other, "tokens", "Other"),
    }
}

/// The section.
pub(super) fn section(report: &Report) -> Option<Section> {
    let model = report.model.as_ref()?;
    let shown: Vec<(&String, &ModuleProfile)> = model.modules.iter().take(MOST_MODULES).collect();
    let of_group = |group: &str| -> Vec<(&str, &ModuleProfile)> {
        shown
            .iter()
            .filter(|(name, _)| describe(name).2 == group)
            .map(|(name, m)| (name.as_str(), *m))
            .collect()
    };
    let body = html! {
        @if model.is_estimated {
            p class="note" { strong { "Estimated, not measured:" } " every time and size below comes from the analytic model." }
        }
        @if let Some(renewal) = &model.renewed {
            p class="note" {
                strong { "Renewed by a run:" } " the times are those of an earlier profile, multiplied by what "
                (number::counted(renewal.num_steps, "step")) " up to step " (number::thousands(renewal.last_step)) " took of it: "
                @for (name, of) in [("encoder", &renewal.encoder), ("LLM", &renewal.llm)] {
                    (name) " " (number::times(f64::from(of.forward_permille) / 1_000.0)) " (forward), "
                    (number::times(f64::from(of.backward_permille) / 1_000.0)) " (backward). "
                }
            }
        }
        (device(model))
        (legend(legend_of(model)))
        @for group in ["Encoder", "LLM", "Other"] {
            @let modules = of_group(group);
            @if !modules.is_empty() {
                h3 { (group) @if model.is_estimated { " (estimated)" } }
                (summary(group, &modules))
                div class="row three" {
                    @for (name, module) in &modules { @for figure in figures(name, module, model.is_estimated) { (figure) } }
                }
            }
        }
        @if let Some(text) = partly(shown.len(), model.modules.len(), "module") { p class="note" { (text) } }
        (variants(model))
        (links::links(&model.network))
    };
    let name = if model.is_estimated { "The model, estimated" } else { "The model, measured" };
    Some(Section { id: "model", name, body })
}

fn device(model: &ModelProfile) -> Markup {
    let d = &model.device;
    let device = if d.name.is_empty() { d.kind.clone() } else { format!("{} ({})", d.name, d.kind) };
    let mut facts = vec![
        ("family", model.family.clone()),
        ("model", model.model.clone()),
        ("device", device),
        ("dtype", d.dtype.clone()),
        ("PyTorch", d.torch.clone()),
        ("driver", d.driver.clone()),
        ("layers", format!("{} encoder, {} LLM", model.num_encoder_layers(), model.num_llm_layers())),
        ("optimizer", format!("{} for each million parameters", number::ns(model.optimizer_ns_per_million))),
    ];
    if d.num_threads > 0 {
        let beside = number::counted(u64::from(d.num_neighbours), "busy rank");
        facts.push(("threads a rank", format!("{}, beside {beside}", d.num_threads)));
    }
    if model.memory.context_bytes > 0 {
        facts.push(("held by the device\u{2019}s context", number::memory_size(model.memory.context_bytes)));
    }
    html! {
        dl class="facts" { @for (name, value) in &facts { @if !value.is_empty() { div { dt { (name) } dd { (value) } } } } }
    }
}

/// The colours that the plots of this profile use.
fn legend_of(model: &ModelProfile) -> Vec<(&'static str, &'static str)> {
    let has = |of: fn(&MeasuredPoint) -> u64| {
        model.modules.values().any(|m| m.linear.points.iter().chain(&m.attention.points).any(|p| of(p) > 0))
    };
    let mut entries = vec![("m-forward round", "forward (F)"), ("m-backward round", "backward (B)")];
    if has(|p| p.input_ns) {
        entries.push(("m-input round", "gradient of the inputs (I)"));
    }
    if has(|p| p.weight_ns) {
        entries.push(("m-weight round", "gradient of the weights (W)"));
    }
    for (mode, class, name) in [
        (Recompute::Selective, "m-selective round", "recomputed, selective"),
        (Recompute::Full, "m-full round", "recomputed, full"),
    ] {
        if model.modules.values().any(|m| m.recompute.contains_key(&mode)) {
            entries.push((class, name));
        }
    }
    entries
}

/// `ns` divided by `size`, in microseconds.
fn each_us(ns: u64, size: u64) -> String {
    number::number(ns as f64 / size.max(1) as f64 / 1e3)
}

/// A table with a row for each module, at its largest measured size.
fn summary(group: &str, modules: &[(&str, &ModuleProfile)]) -> Markup {
    let mut modes = vec![Recompute::Selective, Recompute::Full];
    modes.retain(|mode| modules.iter().any(|(_, module)| module.recompute.contains_key(mode)));
    let row = |(name, module): &(&str, &ModuleProfile)| -> Vec<String> {
        let point = module.linear.points.last().copied().unwrap_or_default();
        let size = point.size;
        let or_none = |ns: u64| if ns == 0 { "-".to_owned() } else { each_us(ns, size) };
        let recomputed = |mode| {
            let points = module.recompute.get(&mode);
            points.and_then(|points: &Vec<RecomputePoint>| points.last()).map_or_else(
                || "-".to_owned(),
                |p| {
                    format!(
                        "+{}, {}",
                        each_us(p.extra_ns, p.size),
                        number::memory_size(p.activation_bytes / p.size.max(1))
                    )
                },
            )
        };
        [
            clipped(describe(name).0, 40),
            number::thousands(u64::from(module.count)),
            number::thousands(module.num_parameters),
            number::memory_size(module.parameter_bytes),
            number::thousands(size),
            or_none(point.forward_ns),
            or_none(point.backward_ns),
            or_none(point.input_ns),
            or_none(point.weight_ns),
            number::memory_size(point.activation_bytes / size.max(1)),
        ]
        .into_iter()
        .chain(modes.iter().map(|&mode| recomputed(mode)))
        .collect()
    };
    let rows: Vec<Vec<String>> = modules.iter().map(row).collect();
    let mut columns = vec![
        names("module"),
        numbers("count"),
        numbers("parameters"),
        numbers("bytes"),
        numbers("tokens"),
        numbers("F"),
        numbers("B"),
        numbers("I"),
        numbers("W"),
        numbers("kept"),
    ];
    columns.extend(
        modes.iter().map(|mode| numbers(if *mode == Recompute::Full { "full" } else { "selective" })),
    );
    let recomputation = if modes.is_empty() {
        ""
    } else {
        "; with selective or full recomputation: microseconds that it adds, bytes that it keeps"
    };
    let caption = format!(
        "{group}: microseconds and kept bytes for each token, of one module at its largest measured size; the attention within segments is not in them{recomputation}"
    );
    table(&caption, &columns, &rows)
}

/// The plots of a module: its linear part with recomputation, and the attention of one segment.
fn figures(name: &str, module: &ModuleProfile, is_estimated: bool) -> Vec<Markup> {
    let (words, unit, _) = describe(name);
    let mark = if is_estimated { " (estimated)" } else { "" };
    let words = clipped(words, 40);
    let linear = match (module.attention.points.is_empty(), module.segment_tokens) {
        (false, _) => format!("{words}, without attention{mark}"),
        (true, Some(tokens)) => format!("{words}, with the attention of segments of {tokens}{mark}"),
        (true, None) => format!("{words}{mark}"),
    };
    let attention = format!("{words}, attention of one segment{mark}");
    let none = std::collections::BTreeMap::new();
    [(linear, &module.linear, &module.recompute), (attention, &module.attention, &none)]
        .into_iter()
        .filter(|(_, curve, _)| !curve.points.is_empty())
        .map(|(name, curve, recompute)| measured(&name, unit, curve, recompute))
        .collect()
}

fn measured(
    name: &str,
    unit: &str,
    curve: &MeasuredCurve,
    recompute: &std::collections::BTreeMap<Recompute, Vec<RecomputePoint>>,
) -> Markup {
    let points: Vec<&MeasuredPoint> =
        spread(curve.points.len(), MOST_ROWS).into_iter().map(|i| &curve.points[i]).collect();
    let line = |class, what: &str, values: &mut dyn Iterator<Item = (u64, u64)>| {
        let values: Vec<(u64, u64)> = values.collect();
        Line {
            class,
            titles: values
                .iter()
                .map(|&(size, ns)| {
                    format!("{what} of {} {unit}: {}", number::thousands(size), number::ns(ns))
                })
                .collect(),
            points: values.iter().map(|&(size, ns)| (size as f64, ns as f64 / 1e6)).collect(),
        }
    };
    let phase = |class, what: &str, ns: fn(&MeasuredPoint) -> u64| {
        line(class, what, &mut points.iter().map(|p| (p.size, ns(p))))
    };
    let mut lines = vec![
        phase("m-forward", "forward", |p| p.forward_ns),
        phase("m-backward", "backward", |p| p.backward_ns),
    ];
    for (class, what, ns) in [
        ("m-input", "gradient of the inputs", (|p| p.input_ns) as fn(&MeasuredPoint) -> u64),
        ("m-weight", "gradient of the weights", |p| p.weight_ns),
    ] {
        if points.iter().any(|p| ns(p) > 0) {
            lines.push(phase(class, what, ns));
        }
    }
    for (mode, points) in recompute {
        let (class, what) = match mode {
            // One layer is measured, so no profile has the first layers of a stage.
            Recompute::None | Recompute::SelectiveOf(_) | Recompute::FullOf(_) => continue,
            Recompute::Selective => ("m-selective", "selective recomputation"),
            Recompute::Full => ("m-full", "full recomputation"),
        };
        lines.push(line(class, what, &mut points.iter().take(MOST_ROWS).map(|p| (p.size, p.extra_ns))));
    }
    // The measured sizes mostly grow by a factor, so the axes are logarithmic. A short range is clearer on linear axes.
    let (low, high) = (points.first().map_or(1, |p| p.size.max(1)), points.last().map_or(1, |p| p.size));
    let is_log = high / low >= 20;
    let unit_x = if is_log { format!("{unit}, log scale") } else { unit.to_owned() };
    let plot = LinePlot {
        label: &format!("{name}: times over {unit}, as in the table below."),
        frame: Frame::third(),
        is_log,
        has_linear_y: false,
        show_x: number::compact,
        show_y: number::tick,
        name_x: &unit_x,
        name_y: if is_log { "ms, log scale" } else { "ms" },
    };
    plotted(
        name,
        &line_plot(&plot, &lines),
        &html! {
            (noise(&points))
            @if let Some(size) = curve.out_of_memory_at {
                p class="note" { "Out of memory at " (number::thousands(size)) " " (unit) ": the sizes end before." }
            }
            (points_table(unit, &points))
            @if let Some(text) = partly(points.len(), curve.points.len(), "point") { p class="note" { (text) } }
        },
    )
}

/// How much the runs of a point differ: (third - first quartile) / median time of forward and backward.
fn spread_ratio(point: &MeasuredPoint) -> f64 {
    point.spread_ns as f64 / (point.forward_ns as f64 + point.backward_ns as f64).max(1.0)
}

/// A sentence on how much the runs of the points differ.
fn noise(points: &[&MeasuredPoint]) -> Markup {
    let mut ratios: Vec<f64> = points.iter().filter(|p| p.repeats > 0).map(|p| spread_ratio(p)).collect();
    ratios.sort_by(f64::total_cmp);
    html! {
        @if let (Some(middle), Some(most)) = (statistics::quantile(&ratios, 0.5), ratios.last()) {
            p class="note" { "Quartile range of the runs: median " (number::percent(middle)) ", at most " (number::percent(*most)) "." }
        }
    }
}

fn points_table(unit: &str, points: &[&MeasuredPoint]) -> Markup {
    let or_none = |ns: u64| if ns == 0 { "-".to_owned() } else { number::ns(ns) };
    let rows: Vec<Vec<String>> = points
        .iter()
        .map(|p| {
            vec![
                number::thousands(p.size),
                number::ns(p.forward_ns),
                number::ns(p.backward_ns),
                or_none(p.input_ns),
                or_none(p.weight_ns),
                number::percent(spread_ratio(p)),
                number::memory_size(p.activation_bytes),
                number::memory_size(p.workspace_bytes),
                if p.repeats == 0 { "estimated".to_owned() } else { number::thousands(u64::from(p.repeats)) },
            ]
        })
        .collect();
    let columns = [
        numbers("tokens"),
        numbers("F"),
        numbers("B"),
        numbers("I"),
        numbers("W"),
        numbers("quartile range"),
        numbers("kept"),
        numbers("workspace"),
        numbers("runs"),
    ];
    table_below(&format!("over {unit}"), &columns, &rows)
}

/// A table of the modules that were measured cut over a tensor group, or with `LoRA` adapters.
fn variants(model: &ModelProfile) -> Markup {
    let all: Vec<Vec<String>> = model
        .variants
        .iter()
        .flat_map(|variant| {
            variant.modules.iter().map(move |(name, module)| {
                let point = module.linear.points.last().copied().unwrap_or_default();
                let collectives = match (variant.tensor_parallel_degree, variant.has_collectives) {
                    (0 | 1, _) => "-",
                    (_, true) => "within",
                    (_, false) => "one cut alone",
                };
                vec![
                    number::thousands(u64::from(variant.tensor_parallel_degree)),
                    if variant.lora_rank == 0 {
                        "-".to_owned()
                    } else {
                        number::thousands(u64::from(variant.lora_rank))
                    },
                    collectives.to_owned(),
                    clipped(describe(name).0, 40),
                    number::thousands(point.size),
                    each_us(point.forward_ns, point.size),
                    each_us(point.backward_ns, point.size),
                ]
            })
        })
        .collect();
    let rows: Vec<Vec<String>> = all.iter().take(MOST_ROWS).cloned().collect();
    let columns = [
        numbers("tensor parallel"),
        numbers("LoRA rank"),
        words("collectives"),
        names("module"),
        numbers("tokens"),
        numbers("F, us a token"),
        numbers("B, us a token"),
    ];
    html! {
        @if !rows.is_empty() { (table("Variants: cut by tensor parallelism, or with LoRA adapters", &columns, &rows)) }
        @if let Some(text) = partly(rows.len(), all.len(), "row") { p class="note" { (text) } }
    }
}
