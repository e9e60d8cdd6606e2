//! A model profile in words: what was measured on what, and what a token costs.

use dflop_types::number::{self, memory_size, percent, times, unit_ns};
use dflop_types::{
    Collective, LinkProfile, LinkSpan, MeasuredCurve, MeasuredPoint, ModelProfile, Renewal, RenewedTimes,
};
use dflop_types::{counted, thousands};
use std::fmt::Write as _;

/// Sizes shown of a curve: both ends and the middle.
const SIZES_SHOWN: usize = 3;

/// The profile for people: at most 110 columns, ASCII, ending with a line break.
pub(super) fn text(profile: &ModelProfile, notices: &[String]) -> String {
    let mut text = String::new();
    header(&mut text, profile);
    linear(&mut text, profile);
    attention(&mut text, profile);
    recompute(&mut text, profile);
    variants(&mut text, profile);
    links(&mut text, profile);
    if !notices.is_empty() {
        text.push('\n');
    }
    for notice in notices {
        let _ = writeln!(text, "note: {notice}");
    }
    text
}

/// What the numbers do not hold, a sentence each.
pub(super) fn notices(profile: &ModelProfile) -> Vec<String> {
    let mut notices = Vec::new();
    if profile.is_estimated {
        notices.push("every time and size is ESTIMATED by the analytic model, none was measured".to_owned());
    }
    notices.extend(profile.renewed.map(|renewal| renewed(&renewal)));
    if profile.network.is_assumed {
        notices.push("the links are ASSUMED from a table of hardware, none was measured".to_owned());
    }
    if profile.network.point_to_point().is_none() {
        notices.push(
            "no link was measured, so transfers count as free; `dflop profile model --network` measures them"
                .to_owned(),
        );
    }
    for (name, module) in &profile.modules {
        for (part, curve) in [("linear", &module.linear), ("attention", &module.attention)] {
            if let Some(size) = curve.out_of_memory_at {
                notices.push(format!(
                    "{name} {part}: out of memory at {} tokens; no larger size was measured",
                    thousands(size)
                ));
            }
        }
    }
    notices
}

/// Where renewed times come from, in words.
pub(super) fn renewed(renewal: &Renewal) -> String {
    let of_component = |of: &RenewedTimes| {
        let ratio = |permille: u32| times(f64::from(permille) / 1_000.0);
        format!("{} (forward) and {} (backward)", ratio(of.forward_permille), ratio(of.backward_permille))
    };
    // A comparison runs each step once for each arm.
    let steps = if renewal.num_steps > renewal.last_step + 1 {
        format!("{} measured steps of a comparison", renewal.num_steps)
    } else {
        format!("{} of a run", counted(renewal.num_steps, "step"))
    };
    format!(
        "renewed by {steps}, the last is step {}: the encoder's times are {} those of the profile before, the LLM's {}; \
         memory, links and optimizer are as they were",
        renewal.last_step,
        of_component(&renewal.encoder),
        of_component(&renewal.llm)
    )
}

fn header(text: &mut String, profile: &ModelProfile) {
    let device = &profile.device;
    let model = if profile.model.is_empty() { "unnamed" } else { profile.model.as_str() };
    let how = if profile.is_estimated { "ESTIMATED" } else { "measured" };
    let _ = writeln!(text, "model profile: {model} ({}), {how}", profile.family);
    let mut facts = vec![format!("{} ({})", device.name, device.kind), device.dtype.clone()];
    if device.compiles_layers {
        facts.push("compiled layers".to_owned());
    }
    if !device.torch.is_empty() {
        facts.push(format!("torch {}", device.torch));
    }
    if !device.driver.is_empty() {
        facts.push(format!("driver {}", device.driver));
    }
    if device.memory_bytes > 0 {
        facts.push(memory_size(device.memory_bytes));
    }
    if device.num_threads > 0 {
        facts.push(format!(
            "{} a rank beside {}",
            counted(device.num_threads.into(), "thread"),
            counted(device.num_neighbours.into(), "busy rank")
        ));
    }
    let _ = writeln!(text, "  device     {}", facts.join(", "));
    // Embedding and head may share a matrix. Then the numbers of both contain it.
    let twice = profile.modules.get("llm_embedding").filter(|_| profile.is_tied);
    let whole = |of: fn(&dflop_types::ModuleProfile) -> u64| -> u64 {
        let all = profile.modules.values().map(|module| of(module).saturating_mul(u64::from(module.count)));
        all.fold(0, u64::saturating_add).saturating_sub(twice.map_or(0, of))
    };
    let tied = if profile.is_tied { ", head tied to the embedding" } else { "" };
    let _ = writeln!(
        text,
        "  model      {} parameters ({}), {} encoder and {} LLM layers{tied}",
        thousands(whole(|module| module.num_parameters)),
        memory_size(whole(|module| module.parameter_bytes)),
        profile.num_encoder_layers(),
        profile.num_llm_layers()
    );
    let _ = writeln!(
        text,
        "  optimizer  {} for each million parameters",
        unit_ns(profile.optimizer_ns_per_million as f64)
    );
    let reserve = &profile.memory;
    if reserve.context_bytes > 0 || reserve.allocator_overhead_permille > 0 {
        let _ = writeln!(
            text,
            "  reserve    {} of context; the allocator takes {} more than the tensors",
            memory_size(reserve.context_bytes),
            percent(f64::from(reserve.allocator_overhead_permille) / 1_000.0)
        );
    }
}

/// Both ends of a curve and the point nearest to their geometric middle.
fn shown(curve: &MeasuredCurve) -> Vec<&MeasuredPoint> {
    let points = &curve.points;
    if points.len() <= SIZES_SHOWN {
        return points.iter().collect();
    }
    let (first, last) = (&points[0], &points[points.len() - 1]);
    let middle = ((first.size.max(1) as f64) * (last.size as f64)).sqrt();
    let off = |point: &&MeasuredPoint| (point.size as f64 / middle).ln().abs();
    let inner = points[1..points.len() - 1].iter().min_by(|a, b| off(a).total_cmp(&off(b)));
    [Some(first), inner, Some(last)].into_iter().flatten().collect()
}

fn linear(text: &mut String, profile: &ModelProfile) {
    text.push_str(
        "\ntime and memory for each token, of one module of each kind: forward F, backward B; of its halves inputs I, weights W\n",
    );
    let _ = writeln!(
        text,
        "  {:<21}{:>5}{:>15}{:>9}{:>10}{:>10}{:>10}{:>10}{:>8}{:>14}",
        "module", "count", "parameters", "tokens", "F", "B", "I", "W", "spread", "kept"
    );
    for (name, module) in &profile.modules {
        for (row, point) in shown(&module.linear).into_iter().enumerate() {
            let head = if row == 0 {
                format!("{name:<21}{:>5}{:>15}", module.count, thousands(module.num_parameters))
            } else {
                " ".repeat(41)
            };
            let _ = writeln!(text, "  {head}{}", numbers(point, point.size));
        }
        if let Some(experts) = module.experts {
            let (count, own) = (experts.count, thousands(experts.num_parameters));
            let _ = writeln!(
                text,
                "  {:<21} with {count} experts of {own} parameters in all; a token reads {}",
                "", experts.per_token
            );
        }
        if let Some(tokens) = module.segment_tokens {
            let _ = writeln!(text, "  {:<21} with the attention of its segments of {tokens} tokens", "");
        }
    }
}

fn attention(text: &mut String, profile: &ModelProfile) {
    let with: Vec<_> =
        profile.modules.iter().filter(|(_, module)| !module.attention.points.is_empty()).collect();
    if with.is_empty() {
        return;
    }
    text.push_str("\nattention of one segment, on top\n");
    for (name, module) in with {
        for (row, point) in shown(&module.attention).into_iter().enumerate() {
            let _ =
                writeln!(text, "  {:<41}{}", if row == 0 { name.as_str() } else { "" }, numbers(point, 1));
        }
    }
}

/// Tokens, times, spread and memory of a point, over `divisor`.
fn numbers(point: &MeasuredPoint, divisor: u64) -> String {
    let each = |value: u64| value as f64 / divisor.max(1) as f64;
    let or_none = |ns: u64| if ns == 0 { "-".to_owned() } else { unit_ns(each(ns)) };
    let whole_ns = point.forward_ns.saturating_add(point.backward_ns).max(1);
    let spread =
        if point.repeats == 0 { "-".to_owned() } else { percent(point.spread_ns as f64 / whole_ns as f64) };
    format!(
        "{:>9}{:>10}{:>10}{:>10}{:>10}{spread:>8}{:>14}",
        thousands(point.size),
        unit_ns(each(point.forward_ns)),
        or_none(point.backward_ns),
        or_none(point.input_ns),
        or_none(point.weight_ns),
        memory_size(each(point.activation_bytes).round() as u64)
    )
}

fn recompute(text: &mut String, profile: &ModelProfile) {
    let rows: Vec<String> = profile
        .modules
        .iter()
        .flat_map(|(name, module)| module.recompute.iter().map(move |(mode, points)| (name, mode, points)))
        .filter_map(|(name, mode, points)| {
            let point = points.last()?;
            let each = |value: u64| value as f64 / point.size.max(1) as f64;
            Some(format!(
                "  {name:<21}{:<12}{:>17}{:>10} more{:>15}",
                mode.to_string(),
                thousands(point.size),
                unit_ns(each(point.extra_ns)),
                memory_size(each(point.activation_bytes).round() as u64)
            ))
        })
        .collect();
    if !rows.is_empty() {
        let _ = writeln!(
            text,
            "\nwith recomputation, for each token\n  {:<21}{:<12}{:>17}{:>15}{:>15}",
            "module", "mode", "tokens", "backward", "kept"
        );
        let _ = writeln!(text, "{}", rows.join("\n"));
    }
}

fn variants(text: &mut String, profile: &ModelProfile) {
    if profile.variants.is_empty() {
        return;
    }
    text.push_str("\nvariants, a token at their largest size\n");
    for variant in &profile.variants {
        let lora =
            if variant.lora_rank > 0 { format!(", LoRA rank {}", variant.lora_rank) } else { String::new() };
        let how = match (variant.tensor_parallel_degree, variant.has_collectives) {
            (1, _) => "",
            (_, true) => ", with their collectives",
            (_, false) => ", one cut alone, without collectives",
        };
        let _ = writeln!(text, "  tensor parallel {}{lora}{how}", variant.tensor_parallel_degree);
        for (name, module) in &variant.modules {
            if let Some(point) = module.linear.points.last() {
                let _ = writeln!(text, "    {name:<39}{}", numbers(point, point.size));
            }
        }
    }
}

fn links(text: &mut String, profile: &ModelProfile) {
    let network = &profile.network;
    if network.links.is_empty() {
        return;
    }
    let how = match (network.is_assumed, network.backend.as_str()) {
        (true, _) => "ASSUMED".to_owned(),
        (false, "") => "measured".to_owned(),
        (false, backend) => format!("measured, {backend}"),
    };
    let _ = writeln!(text, "\nlinks between ranks ({how})");
    let _ = writeln!(
        text,
        "  {:<21}{:<16}{:>6}{:>12}{:>14}{:>24}",
        "", "span", "ranks", "latency", "bandwidth", "measured sizes"
    );
    for link in &network.links {
        let _ = writeln!(
            text,
            "  {:<21}{:<16}{:>6}{:>12}{:>14}{:>24}",
            collective_name(link.collective),
            match link.span {
                LinkSpan::Node => "within a node",
                LinkSpan::Cluster => "across nodes",
            },
            link.num_ranks,
            unit_ns(link.latency_ns as f64),
            format!("{} GB/s", number::number(link.bandwidth_bytes_per_s as f64 / 1e9)),
            sizes(link)
        );
    }
}

fn collective_name(collective: Collective) -> &'static str {
    match collective {
        Collective::PointToPoint => "point to point",
        Collective::AllReduce => "all-reduce",
        Collective::AllGather => "all-gather",
        Collective::ReduceScatter => "reduce-scatter",
        Collective::AllToAll => "all-to-all",
    }
}

fn sizes(link: &LinkProfile) -> String {
    match (link.points.first(), link.points.last()) {
        (Some(first), Some(last)) => format!("{} to {}", memory_size(first.bytes), memory_size(last.bytes)),
        _ => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_is_shown_by_its_ends_and_its_middle() {
        let point = |size| MeasuredPoint { size, ..MeasuredPoint::default() };
        let curve =
            MeasuredCurve { points: [1, 2, 8, 70, 100].map(point).to_vec(), ..MeasuredCurve::default() };
        let sizes: Vec<u64> = shown(&curve).iter().map(|point| point.size).collect();
        assert_eq!(sizes, [1, 8, 100]);
    }
}
