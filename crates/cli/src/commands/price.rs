//! What a run costs: hours of devices and money for a number of samples, beside those of each baseline.

use dflop_types::{number, thousands};
use serde_json::{Value, json};
use std::fmt::Write as _;

/// A run of so many samples, at a price of a device and hour.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    pub(super) samples: u64,
    pub(super) num_ranks: u32,
    /// Of a step.
    pub(super) global_batch_size: u32,
    pub(super) price_per_gpu_hour: Option<f64>,
}

impl Run {
    /// Hours on the clock, and of all devices together, of steps of `step_ns`.
    fn hours(&self, step_ns: u64) -> (f64, f64) {
        let steps = self.samples.div_ceil(u64::from(self.global_batch_size.max(1)));
        let clock = steps as f64 * step_ns as f64 / 3.6e12;
        (clock, clock * f64::from(self.num_ranks))
    }

    fn money(&self, gpu_hours: f64) -> Option<f64> {
        self.price_per_gpu_hour.map(|price| price * gpu_hours)
    }

    /// A table of the plan and of what it saves against each baseline (name, step in nanoseconds).
    pub(super) fn words(&self, plan_ns: u64, baselines: &[(String, u64)]) -> String {
        let (clock, devices) = self.hours(plan_ns);
        let price = |gpu_hours: f64| {
            self.money(gpu_hours)
                .map_or_else(String::new, |money| format!("  {:>12}", thousands(money.round() as u64)))
        };
        let head =
            if self.price_per_gpu_hour.is_some() { format!("  {:>12}", "price") } else { String::new() };
        let mut text = format!(
            "\na run of {} samples on {} ranks, {} a step\n  {:<22}  {:>10}  {:>10}{head}  saved by the plan\n",
            thousands(self.samples),
            self.num_ranks,
            self.global_batch_size,
            "",
            "hours",
            "GPU hours",
        );
        let _ = writeln!(
            text,
            "  {:<22}  {:>10}  {:>10}{}",
            "plan",
            number::number(clock),
            number::number(devices),
            price(devices)
        );
        for (name, ns) in baselines {
            let (clock, of_it) = self.hours(*ns);
            let saved = of_it - devices;
            let money = self.money(saved).map_or_else(String::new, |money| {
                format!(", {}{}", if money < 0.0 { "-" } else { "" }, thousands(money.abs().round() as u64))
            });
            let sign = if saved < 0.0 { "-" } else { "" };
            let _ = writeln!(
                text,
                "  {name:<22}  {:>10}  {:>10}{}  {sign}{} GPU hours{money}",
                number::number(clock),
                number::number(of_it),
                price(of_it),
                number::number(saved.abs()),
            );
        }
        text
    }

    /// The same for programs.
    pub(super) fn json(&self, plan_ns: u64, baselines: &[(String, u64)]) -> Value {
        let (clock, devices) = self.hours(plan_ns);
        let row = |(name, ns): &(String, u64)| {
            let (clock, of_it) = self.hours(*ns);
            let value = json!({"hours": clock, "gpu_hours": of_it, "price": self.money(of_it),
                               "saved_gpu_hours": of_it - devices, "saved_price": self.money(of_it - devices)});
            (name.clone(), value)
        };
        json!({"samples": self.samples, "hours": clock, "gpu_hours": devices, "price": self.money(devices),
               "baselines": baselines.iter().map(row).collect::<serde_json::Map<_, _>>()})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1,000 steps of 36 s are 10 hours, on 4 ranks 40; a baseline of 54 s takes half as much again.
    #[test]
    fn hours_and_money_are_those_of_all_devices() {
        let run = Run { samples: 15_999, num_ranks: 4, global_batch_size: 16, price_per_gpu_hour: Some(2.5) };
        let baselines = [("fsdp".to_owned(), 54_000_000_000), ("faster".to_owned(), 18_000_000_000)];
        let value = run.json(36_000_000_000, &baselines);
        assert_eq!((value["hours"].as_f64(), value["gpu_hours"].as_f64()), (Some(10.0), Some(40.0)));
        assert_eq!(value["price"].as_f64(), Some(100.0));
        assert_eq!(value["baselines"]["fsdp"]["saved_gpu_hours"].as_f64(), Some(20.0));
        assert_eq!(value["baselines"]["fsdp"]["saved_price"].as_f64(), Some(50.0));
        let words = run.words(36_000_000_000, &baselines);
        assert!(
            words.contains("20.0 GPU hours, 50\n") && words.contains("-20.0 GPU hours, -50\n"),
            "{words}"
        );
        let free = Run { price_per_gpu_hour: None, ..run };
        assert!(!free.words(1, &[]).contains("price") && free.json(1, &[])["price"].is_null());
    }
}
