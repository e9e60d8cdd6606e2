//! `dflop models`: the catalogue and the hardware table, with their sources.

use super::models_write;
use crate::Failure;
use crate::args;
use dflop_analytic::{CatalogueModel, EFFICIENCY, HARDWARE, Hardware, catalogue};
use dflop_types::{FAMILIES, FamilyRecord, thousands};
use serde_json::json;
use std::path::Path;

pub(super) fn run(arguments: &args::Models) -> Result<(), Failure> {
    if let Some([name, dir]) = arguments.write.as_deref() {
        return models_write::run(name, Path::new(dir));
    }
    let mut models = Vec::new();
    for model in catalogue() {
        models.push((model, model.architecture()?.num_parameters()));
    }
    if arguments.json {
        let hardware: Vec<_> = HARDWARE.iter().map(device).collect();
        let models: Vec<_> = models.iter().map(|(model, count)| entry(model, *count)).collect();
        let families: Vec<_> = FAMILIES.iter().map(family).collect();
        outln!(
            "{}",
            json!({"families": families, "models": models, "hardware": hardware, "efficiency": EFFICIENCY})
        );
        return Ok(());
    }
    print_families();
    outln!("\nmodels: for `dflop profile model --estimate --model NAME`");
    outln!("{:<32}{:>16}  {:<12} source", "name", "parameters", "");
    for (model, count) in &models {
        let mark = if model.published_parameters.is_some() { "as published" } else { "not verified" };
        let note = if model.note.is_empty() { String::new() } else { format!(" ({})", model.note) };
        outln!("{:<32}{:>16}  {mark} {}{note}", model.name, thousands(*count), model.source);
    }
    outln!(
        "not in it: InternVL2.5 2B, 8B and 26B (backbone InternLM2), InternVL3 9B (InternLM3), InternVL3.5 20B (gpt-oss)"
    );
    outln!("\nhardware: for `--hardware NAME`; peak rates are dense, the vendors' own");
    outln!(
        "{:<12}{:>15}{:>14}{:>13}{:>6}{:>11}{:>14}",
        "name",
        "16 bit TFLOP/s",
        "fp32 TFLOP/s",
        "memory GB/s",
        "GB",
        "node GB/s",
        "cluster GB/s"
    );
    for hardware in &HARDWARE {
        let giga = |number: u64| number / 1_000_000_000;
        outln!(
            "{:<12}{:>15}{:>14}{:>13}{:>6}{:>11}{:>14}",
            hardware.name,
            hardware.half_gflops as f64 / 1e3,
            hardware.float32_gflops as f64 / 1e3,
            giga(hardware.memory_bytes_per_s),
            giga(hardware.memory_bytes),
            giga(hardware.node_bytes_per_s),
            giga(hardware.cluster_bytes_per_s)
        );
        outln!("  from {}; network: {}", hardware.source, hardware.system);
    }
    outln!("\nefficiency, {EFFICIENCY}");
    Ok(())
}

/// What can be done with each family, a row a family.
fn print_families() {
    let columns = FAMILIES[0].abilities().map(|(name, _)| format!("{name:<10}")).concat();
    outln!("families: `model_type` of `config.json`, and what dflop can do with it");
    outln!("{:<18}{columns}media", "name");
    for family in &FAMILIES {
        let answers =
            family.abilities().map(|(_, can)| format!("{:<10}", if can { "yes" } else { "-" })).concat();
        outln!("{:<18}{answers}{}", family.model_type, family.media.join(", "));
    }
    outln!("  data: `dflop profile data`; estimate: `dflop profile model --estimate`;");
    outln!("  measure: `dflop profile model`; train: `dflop train`;");
    outln!("  share: `balance_encoder`, in a trainer of your own");
    outln!(
        "data of any other family of transformers: `model.family: transformers` (docs/data.md); it trains in a"
    );
    outln!(
        "  trainer of your own: the lines of `dflop.integrations` (docs/other_families.md: which were tried)"
    );
}

fn family(family: &FamilyRecord) -> serde_json::Value {
    let mut value = json!({"name": family.model_type, "media": family.media});
    for (name, can) in family.abilities() {
        value[name] = can.into();
    }
    value
}

fn entry(model: &CatalogueModel, num_parameters: u64) -> serde_json::Value {
    json!({
        "name": model.name,
        "family": model.family,
        "encoder": model.encoder,
        "backbone": model.backbone,
        "num_parameters": num_parameters,
        "is_verified": model.published_parameters.is_some(),
        "source": model.source,
        "date": model.date,
        "note": model.note,
        "config": model.config,
    })
}

fn device(hardware: &Hardware) -> serde_json::Value {
    let efficiency = &hardware.efficiency;
    json!({
        "name": hardware.name,
        "title": hardware.title,
        "half_gflops": hardware.half_gflops,
        "float32_gflops": hardware.float32_gflops,
        "tf32_gflops": hardware.tf32_gflops,
        "memory_bytes_per_s": hardware.memory_bytes_per_s,
        "memory_bytes": hardware.memory_bytes,
        "node_bytes_per_s": hardware.node_bytes_per_s,
        "pair_bytes_per_s": hardware.pair_bytes_per_s,
        "cluster_bytes_per_s": hardware.cluster_bytes_per_s,
        "source": hardware.source,
        "system": hardware.system,
        "assumed_permille": {
            "matmul": efficiency.matmul_permille,
            "attention_forward": efficiency.attention_forward_permille,
            "attention_backward": efficiency.attention_backward_permille,
            "memory": efficiency.memory_permille,
            "network": efficiency.network_permille,
        },
    })
}
