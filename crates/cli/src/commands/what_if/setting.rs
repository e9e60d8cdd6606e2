//! What `--set` names: fields with their values, each within the limits that `dflop.yaml` has for it.

use super::super::{estimate, ready::has_adapters};
use super::Case;
use crate::Failure;
use crate::config::{ClusterSection, NODE_DEVICES, TrainSection};
use dflop_analytic::{HARDWARE, Hardware};
use dflop_types::{LinkSpan, Recipe, SampleKind};
use std::ops::RangeInclusive;

/// A field with the values that it is set to, one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Setting {
    pub(super) field: String,
    pub(super) values: Vec<String>,
}

/// The fields that can be set.
const FIELDS: &str = "cluster.num_ranks, cluster.ranks_per_node, cluster.device, cluster.memory_budget_bytes, \
    network.cluster_bytes_per_s, network.node_bytes_per_s, train.global_batch_size, train.num_microbatches, \
    train.bucket_tokens_max, train.recipe, data.llm_tokens_max, data.weights.KIND (text, image, multi_image, video, audio)";

/// Bytes a second of a link; `dflop.yaml` has no such field.
const BYTES_PER_S: RangeInclusive<u64> = 1_000_000..=1_000_000_000_000_000;

/// The setting in `FIELD=VALUE[,VALUE...]`.
pub(crate) fn setting(text: &str) -> Result<Setting, String> {
    let (field, values) =
        text.split_once('=').ok_or("must be FIELD=VALUE, as in cluster.num_ranks=64,128")?;
    let values: Vec<String> = values.split(',').map(|value| value.trim().to_owned()).collect();
    if values.iter().any(String::is_empty) {
        return Err("a value is missing behind `=` or `,`".to_owned());
    }
    for (at, value) in values.iter().enumerate() {
        if values[..at].iter().any(|earlier| is_same(earlier, value)) {
            return Err(format!("the value {value} comes twice, must come once"));
        }
    }
    Ok(Setting { field: field.trim().to_owned(), values })
}

/// Whether two values say the same: 8 and 8.0, h100 and H100.
fn is_same(one: &str, other: &str) -> bool {
    match (one.parse::<f64>(), other.parse::<f64>()) {
        (Ok(one), Ok(other)) => one.total_cmp(&other).is_eq(),
        _ => one.eq_ignore_ascii_case(other),
    }
}

/// `Ok` if no field is set twice: of two settings of one field, one would have no effect.
pub(crate) fn check_named_once(settings: &[Setting]) -> Result<(), Failure> {
    for (at, setting) in settings.iter().enumerate() {
        let field = &setting.field;
        if settings[..at].iter().any(|earlier| earlier.field == *field) {
            return Err(Failure::new(
                format!("`--set {field}`: the field is named twice, must be once"),
                Some(format!("give all its values in one place, for example `--set {field}=VALUE,VALUE`")),
            ));
        }
    }
    Ok(())
}

fn wrong(field: &str, value: &str, rule: &str) -> Failure {
    Failure::new(format!("`--set {field}={value}`: {rule}"), None)
}

/// When a field is set. What is derived from other fields comes after them: a node's ranks after all ranks, the profile of
/// a device after what it is estimated for, a link's rate after the profile that has the link.
fn turn(field: &str) -> u32 {
    match field {
        "cluster.ranks_per_node" => 1,
        "cluster.device" => 2,
        _ if field.starts_with("network.") => 3,
        _ => 0,
    }
}

impl Case {
    /// Sets each field to the case's value of it.
    pub(super) fn set_all(&mut self, settings: &[Setting]) -> Result<(), Failure> {
        let mut both: Vec<(&Setting, String)> = settings.iter().zip(self.values.clone()).collect();
        both.sort_by_key(|(setting, _)| turn(&setting.field));
        for (setting, value) in both {
            self.set(&setting.field, &value)?;
        }
        let (ranks, of_node) = (self.config.cluster.num_ranks, self.config.cluster.ranks_per_node);
        if of_node > ranks {
            let rule = format!("must not exceed `cluster.num_ranks`, {ranks}");
            return Err(wrong("cluster.ranks_per_node", &of_node.to_string(), &rule));
        }
        Ok(())
    }

    fn set(&mut self, field: &str, value: &str) -> Result<(), Failure> {
        let count = |range: RangeInclusive<u64>| {
            // People write 8e9 bytes. All limits are far below the integers that a 64-bit number no longer tells apart.
            let number = value.parse::<f64>().ok().filter(|n| n.fract() == 0.0 && *n >= 0.0 && *n < 1e18);
            let (least, most) = (*range.start(), *range.end());
            number
                .map(|n| n as u64)
                .filter(|n| range.contains(n))
                .ok_or_else(|| wrong(field, value, &format!("must be an integer from {least} to {most}")))
        };
        match field {
            "cluster.num_ranks" => {
                let before = self.config.cluster.num_ranks.max(1);
                let ranks = count(ClusterSection::NUM_RANKS)? as u32;
                if !self.is_batch_set {
                    let size =
                        u64::from(self.config.train.global_batch_size) * u64::from(ranks) / u64::from(before);
                    self.config.train.global_batch_size = u32::try_from(size).unwrap_or(u32::MAX).max(1);
                }
                self.config.cluster.num_ranks = ranks;
                let of_node = self.config.cluster.ranks_per_node;
                // A cluster of one node grows within it, as far as its device has such nodes.
                let most = match &self.config.cluster.hardware {
                    Some(_) if of_node == before => of_node.max(NODE_DEVICES),
                    None if of_node == before => ranks,
                    _ => of_node,
                };
                self.config.cluster.ranks_per_node = most.min(ranks);
            }
            "cluster.ranks_per_node" => {
                self.config.cluster.ranks_per_node = count(ClusterSection::NUM_RANKS)? as u32;
            }
            "cluster.memory_budget_bytes" => {
                self.config.cluster.memory_budget_bytes = Some(count(ClusterSection::MEMORY_BUDGET_BYTES)?);
            }
            "cluster.device" => {
                let hardware = Hardware::named(value)?;
                self.model = estimate::configured(&self.config, hardware)?;
            }
            "network.cluster_bytes_per_s" | "network.node_bytes_per_s" => {
                let span = if field.contains("cluster") { LinkSpan::Cluster } else { LinkSpan::Node };
                let rate = count(BYTES_PER_S)?;
                let links = &mut self.model.network.links;
                if links.iter().all(|link| link.span != span) {
                    return Err(wrong(field, value, "has no effect: the model profile knows no such link"));
                }
                for link in links.iter_mut().filter(|link| link.span == span) {
                    link.bandwidth_bytes_per_s = rate;
                    // What was measured was measured at another rate.
                    link.points.clear();
                }
                self.model.network.is_assumed = true;
            }
            "train.global_batch_size" => {
                self.config.train.global_batch_size = count(TrainSection::GLOBAL_BATCH_SIZE)? as u32;
            }
            "train.num_microbatches" => {
                self.config.train.num_microbatches = Some(count(TrainSection::NUM_MICROBATCHES)? as u32);
            }
            "train.bucket_tokens_max" => {
                self.config.train.bucket_tokens_max = Some(count(TrainSection::BUCKET_TOKENS_MAX)?);
            }
            "data.llm_tokens_max" => self.llm_tokens_max = Some(count(TrainSection::BUCKET_TOKENS_MAX)?),
            "train.recipe" => {
                let recipe: Result<Recipe, _> = value.parse();
                let recipe = recipe.map_err(|error| wrong(field, value, &error))?;
                self.config.train.recipe = recipe.to_string();
                self.add_adapters()?;
            }
            _ => {
                let kind = field
                    .strip_prefix("data.weights.")
                    .and_then(|name| SampleKind::ALL.iter().position(|kind| kind.to_string() == name));
                let Some(kind) = kind else {
                    let hint = Some(format!("fields: {FIELDS}"));
                    return Err(Failure { hint, ..wrong(field, value, "is no field that can be set") });
                };
                let part = value.parse::<f64>().ok().filter(|part| (0.0..=1.0).contains(part));
                self.weights.insert(kind, part.ok_or_else(|| wrong(field, value, "must be from 0 to 1"))?);
            }
        }
        Ok(())
    }

    /// Adds the layers with the adapters that now train to a profile that was estimated without them; a measured one stays as it
    /// is.
    fn add_adapters(&mut self) -> Result<(), Failure> {
        let lora_rank = self.config.trained().lora_rank;
        let device = HARDWARE.iter().find(|one| one.title == self.model.device.name);
        if let (Some(device), true, false) =
            (device, self.model.is_estimated, has_adapters(&self.model, lora_rank))
        {
            let made = estimate::configured(&self.config, device)?;
            let adapted = made.variants.into_iter().filter(|variant| variant.lora_rank == lora_rank);
            self.model.variants.extend(adapted);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_comes_once_and_a_field_too() {
        for text in ["a", "a=1,,2", "a=8,8", "a=8,8.0", "a=h100,H100"] {
            assert!(setting(text).is_err(), "{text}");
        }
        let (one, other) = (setting("a=1,2").unwrap(), setting("b=1,2").unwrap());
        assert!(check_named_once(&[one.clone(), other.clone()]).is_ok());
        let said = check_named_once(&[one.clone(), other, one]).unwrap_err().render();
        assert!(said.contains("`--set a`: the field is named twice, must be once\n\nhint: "), "{said}");
    }
}
