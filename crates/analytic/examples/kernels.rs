//! Makes the tables of `measured/` from published measurements, and judges them on the rows that they do not hold.
//!
//! ```sh
//! cargo run --release -p dflop-analytic --example kernels -- DIR            # held-out error by kind, in Markdown
//! cargo run --release -p dflop-analytic --example kernels -- DIR measured   # also writes the tables there
//! ```
//!
//! DIR holds `kernels_gemm_{a100,h100}_sxm.csv` (`m,n,k,latency_us`), `kernels_context_attention_{a100,h100}_sxm.csv`
//! (`batch,sequence_tokens,heads,kv_heads,head_size,latency_us`), `kernels_encoder_attention_h100_sxm.csv`
//! (`segments,tokens_per_segment,heads,head_size,latency_us`) and `nccl_{a100,h100}_sxm.csv`
//! (`operation,gpus,message_bytes,latency_us`): tables of ai-dynamo/aiconfigurator, columns as its collectors have them.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

use dflop_analytic::{Hardware, Measured};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// Sizes of products in the table: rows, and both widths.
const ROWS: [u64; 12] = [1, 16, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768];
const WIDTHS: [u64; 12] = [128, 256, 512, 1_024, 1_536, 2_048, 3_072, 4_096, 6_144, 8_192, 16_384, 65_536];
/// Lengths of segments in the table of attention; all others judge it.
const LENGTHS: [u64; 13] = [16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536];
/// Rows count as filling the device from a quarter of the most heads x tokens of their length on.
const FULL: u64 = 4;

const SOURCE: &str = "# ai-dynamo/aiconfigurator 095f58a51c4c, Apache-2.0, reduced 2026-11-23 by examples/kernels.rs; see README.md";

type Row = (Vec<u64>, f64);

/// The rows of a file: whole numbers, and the time in microseconds, which stands last. A first column of text is left out,
/// and returned as the number of its word in `words`.
fn read(path: &Path, words: &[&str]) -> Vec<Row> {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let row = |line: &str| {
        let fields: Vec<&str> = line.split(',').collect();
        let (last, sizes) = fields.split_last().unwrap();
        let size = |text: &&str| match words.iter().position(|word| word == text) {
            Some(index) => index as u64,
            None => text.parse().unwrap_or(u64::MAX),
        };
        (sizes.iter().map(size).collect(), last.trim().parse().unwrap())
    };
    text.lines().skip(1).map(row).collect()
}

/// Errors `predicted / measured - 1`, and how they are shown.
#[derive(Default)]
struct Errors(Vec<f64>);

impl Errors {
    fn line(&self, what: &str) -> String {
        let mut sizes: Vec<f64> = self.0.iter().map(|error| error.abs()).collect();
        sizes.sort_by(f64::total_cmp);
        let at = |share: f64| 100.0 * sizes[((sizes.len() - 1) as f64 * share).round() as usize];
        let mut signed = self.0.clone();
        signed.sort_by(f64::total_cmp);
        format!(
            "| {what} | {} | {:.1} % | {:.1} % | {:.1} % | {:+.1} % |",
            sizes.len(),
            at(0.5),
            100.0 * sizes.iter().sum::<f64>() / sizes.len() as f64,
            at(0.95),
            100.0 * signed[signed.len() / 2]
        )
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let dir = arguments.next().expect("usage: kernels DIR [OUT]");
    let (dir, out) = (Path::new(&dir), arguments.next());
    let products: Vec<(&str, Vec<Row>)> = ["a100", "h100"]
        .map(|chip| (chip, read(&dir.join(format!("kernels_gemm_{chip}_sxm.csv")), &[])))
        .into();
    // Mask, chip, and rows as (segments, tokens, heads, size of a head).
    let mut attention = Vec::new();
    for chip in ["a100", "h100"] {
        let rows = read(&dir.join(format!("kernels_context_attention_{chip}_sxm.csv")), &[]);
        let of = |(s, us): Row| (vec![s[0], s[1], s[2], s[4]], us);
        attention.push(("causal", chip, rows.into_iter().map(of).collect::<Vec<_>>()));
    }
    attention.push(("none", "h100", read(&dir.join("kernels_encoder_attention_h100_sxm.csv"), &[])));
    let words = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"];
    let collectives: Vec<(&str, Vec<Row>)> =
        ["a100", "h100"].map(|chip| (chip, read(&dir.join(format!("nccl_{chip}_sxm.csv")), &words))).into();
    if let Some(out) = out {
        write(Path::new(&out), &products, &attention, &collectives);
    }
    println!("| kind | rows judged | median | mean | 95th percentile | signed median |");
    println!("|---|---|---|---|---|---|");
    for (chip, rows) in &products {
        judge_products(chip, rows);
    }
    for (mask, chip, rows) in &attention {
        judge_attention(mask, chip, rows);
    }
    for (chip, rows) in &collectives {
        judge_collectives(chip, rows);
    }
}

fn judge_products(chip: &str, rows: &[Row]) {
    let measured = Measured::of_chip(chip).unwrap();
    let is_held = |s: &[u64]| ROWS.contains(&s[0]) && WIDTHS.contains(&s[1]) && WIDTHS.contains(&s[2]);
    let hardware = Hardware::named(chip).unwrap();
    let constant = hardware.half_gflops as f64 * hardware.efficiency.matmul_permille as f64 / 1e3;
    for (what, rows_min, width_min) in [("all sizes", 1, 1), ("m >= 256, n and k >= 512", 256, 512)] {
        let (mut errors, mut before) = (Errors::default(), Errors::default());
        for (s, us) in rows {
            if !is_held(s) && s[0] >= rows_min && s[1].min(s[2]) >= width_min {
                errors.0.push(measured.product_ns(s[0], s[1], s[2]) / (us * 1e3) - 1.0);
                before.0.push(2.0 * (s[0] * s[1] * s[2]) as f64 / constant / (us * 1e3) - 1.0);
            }
        }
        println!("{}", errors.line(&format!("products {chip}, {what}")));
        println!("{}", before.line(&format!("- one efficiency for all, {what}")));
    }
}

/// What attention takes where it fills the device: as the model profile counts it, segment by segment.
fn judge_attention(mask: &str, chip: &str, rows: &[Row]) {
    let measured = Measured::of_chip(chip).unwrap();
    let hardware = Hardware::named(chip).unwrap();
    let is_causal = mask == "causal";
    let most = most_work(rows);
    for (what, is_full) in [("device full", true), ("from 1,024 heads x tokens / 16", false)] {
        let (mut errors, mut before) = (Errors::default(), Errors::default());
        for (s, us) in rows {
            let work = s[0] * s[1] * s[2];
            let is_judged = if is_full { work * FULL >= most[&(s[3], s[1])] } else { work >= 1_024 * 64 };
            if LENGTHS.contains(&s[1]) || s[1] < 64 || !is_judged {
                continue;
            }
            let operations = if is_causal { 2.0 } else { 4.0 } * (work * s[3]) as f64 * s[1] as f64;
            let ns = |share: f64| operations / (hardware.half_gflops as f64 * share);
            errors.0.push(ns(measured.attention_utilization(is_causal, s[3], s[1])) / (us * 1e3) - 1.0);
            before.0.push(ns(hardware.efficiency.attention_forward_permille as f64 / 1e3) / (us * 1e3) - 1.0);
        }
        let kind = if is_causal { "causal attention" } else { "encoder attention" };
        println!("{}", errors.line(&format!("{kind} {chip}, {what}")));
        println!("{}", before.line(&format!("- one efficiency for all, {what}")));
    }
}

/// Odd places of the sizes are fitted to here, even ones judge: the committed table holds all sizes.
fn judge_collectives(chip: &str, rows: &[Row]) {
    let mut curves: BTreeMap<(u64, u64), Vec<(u64, f64)>> = BTreeMap::new();
    for (s, us) in rows.iter().filter(|(s, _)| s[0] < 3) {
        curves.entry((s[0], s[1])).or_default().push((s[2], *us));
    }
    for (operation, name) in ["all-reduce", "all-gather", "reduce-scatter"].into_iter().enumerate() {
        let mut errors = Errors::default();
        for points in curves.iter().filter(|(key, _)| key.0 == operation as u64).map(|(_, points)| points) {
            for three in points.windows(3).step_by(2) {
                let [(x0, y0), (x, y), (x1, y1)] = [three[0], three[1], three[2]];
                let line = y0 + (y1 - y0) * (x - x0) as f64 / (x1 - x0) as f64;
                errors.0.push(line / y - 1.0);
            }
        }
        println!("{}", errors.line(&format!("{name} {chip}, from the sizes around it")));
    }
}

/// The most heads x tokens of each size of a head and length.
fn most_work(rows: &[Row]) -> BTreeMap<(u64, u64), u64> {
    let mut most = BTreeMap::new();
    for (s, _) in rows {
        let one = most.entry((s[3], s[1])).or_insert(0);
        *one = s[0].saturating_mul(s[1] * s[2]).max(*one);
    }
    most
}

fn write(
    out: &Path,
    products: &[(&str, Vec<Row>)],
    attention: &[(&str, &str, Vec<Row>)],
    collectives: &[(&str, Vec<Row>)],
) {
    for (chip, rows) in products {
        let times: BTreeMap<(u64, u64, u64), f64> =
            rows.iter().map(|(s, us)| ((s[0], s[1], s[2]), *us)).collect();
        let mut text = format!("{SOURCE}\nn,k,{}\n", ROWS.map(|m| m.to_string()).join(","));
        for n in WIDTHS {
            for k in WIDTHS {
                let us = ROWS.map(|m| match times.get(&(m, n, k)) {
                    Some(us) => format!("{us:.6}"),
                    // 65,536 x 65,536 was not measured: four times the time of a quarter of the depth.
                    None => format!("{:.6}", 4.0 * times[&(m, n, k / 4)]),
                });
                let us = us.map(|us| us.parse::<f64>().unwrap()).map(|us| format!("{:.*}", digits(us), us));
                writeln!(text, "{n},{k},{}", us.join(",")).unwrap();
            }
        }
        fs::write(out.join(format!("products_{chip}.csv")), text).unwrap();
    }
    let mut text = format!("{SOURCE}\nchip,mask,head_size,tokens,permille\n");
    for (mask, chip, rows) in attention {
        let peak = Hardware::named(chip).unwrap().half_gflops as f64;
        let mut shares: BTreeMap<(u64, u64), Vec<f64>> = BTreeMap::new();
        let most = most_work(rows);
        for (s, us) in rows {
            let work = s[0] * s[1] * s[2];
            if LENGTHS.contains(&s[1]) && work * FULL >= most[&(s[3], s[1])] {
                let factor = if *mask == "causal" { 2.0 } else { 4.0 };
                let operations = factor * (work * s[3]) as f64 * s[1] as f64;
                shares.entry((s[3], s[1])).or_default().push(operations / (us * 1e3) / peak);
            }
        }
        for ((head_size, tokens), mut shares) in shares {
            shares.sort_by(f64::total_cmp);
            let permille = (1e3 * shares[shares.len() / 2]).round().max(1.0);
            writeln!(text, "{chip},{mask},{head_size},{tokens},{permille}").unwrap();
        }
    }
    fs::write(out.join("attention.csv"), text).unwrap();
    let mut text = format!("{SOURCE}\nchip,operation,ranks,bytes,ns\n");
    for (chip, rows) in collectives {
        for (s, us) in rows.iter().filter(|(s, _)| s[0] < 3) {
            let name = ["all_reduce", "all_gather", "reduce_scatter"][s[0] as usize];
            writeln!(text, "{chip},{name},{},{},{:.0}", s[1], s[2], us * 1e3).unwrap();
        }
    }
    fs::write(out.join("collectives.csv"), text).unwrap();
}

/// Places behind the point that leave four digits.
fn digits(us: f64) -> usize {
    (3 - us.log10().floor() as i64).max(0) as usize
}
