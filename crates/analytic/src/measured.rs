//! What others measured and published: times of products, attention and collectives on A100 and H100, by size.
//!
//! The tables lie in `measured/`, with source and licence; the example `kernels` makes them and judges them on the rows
//! that they do not hold. Between the sizes of a table, logarithms of times are interpolated along logarithms of sizes.
//! Above the largest size its rate holds, below the smallest its time.

use dflop_types::{Collective, MessagePoint};
use std::sync::LazyLock;

/// The tables of one device.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// Its name in the table of collectives and of attention.
    name: &'static str,
    products: Products,
    attention: Vec<AttentionRow>,
    collectives: Vec<CollectiveRow>,
}

/// Times of products by their sizes.
#[derive(Debug, Clone, PartialEq)]
struct Products {
    rows: Vec<f64>,
    widths: Vec<f64>,
    /// Logarithms of nanoseconds, by `[n][k][m]`.
    logarithms: Vec<f64>,
}

/// The share of the peak that attention over segments of one length reaches where it fills the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct AttentionRow {
    is_causal: bool,
    head_size: u64,
    tokens: u64,
    permille: u64,
}

/// Time of one collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CollectiveRow {
    collective: Collective,
    num_ranks: u32,
    bytes: u64,
    ns: u64,
}

const A100: &str = "a100";
const H100: &str = "h100";

static A100_TABLES: LazyLock<Measured> =
    LazyLock::new(|| Measured::read(A100, include_str!("../measured/products_a100.csv")));
static H100_TABLES: LazyLock<Measured> =
    LazyLock::new(|| Measured::read(H100, include_str!("../measured/products_h100.csv")));

impl Measured {
    /// The tables of the chip `a100` or `h100`; `None` for every other name.
    pub fn of_chip(name: &str) -> Option<&'static Self> {
        match name {
            A100 => Some(&A100_TABLES),
            H100 => Some(&H100_TABLES),
            _ => None,
        }
    }

    /// The tables of one chip: its own products, and its rows of the other two files.
    fn read(name: &'static str, products: &str) -> Self {
        let rows = |text: &'static str| {
            let rows = lines(text).map(|line| line.split(',').collect::<Vec<_>>());
            rows.filter(|fields| fields[0] == name).collect::<Vec<_>>()
        };
        let attention = rows(include_str!("../measured/attention.csv"));
        let collectives = rows(include_str!("../measured/collectives.csv"));
        Self {
            name,
            products: Products::read(products),
            attention: attention
                .iter()
                .map(|fields| AttentionRow {
                    is_causal: fields[1] == "causal",
                    head_size: whole(fields[2]),
                    tokens: whole(fields[3]),
                    permille: whole(fields[4]),
                })
                .collect(),
            collectives: collectives
                .iter()
                .map(|fields| CollectiveRow {
                    collective: match fields[1] {
                        "all_reduce" => Collective::AllReduce,
                        "all_gather" => Collective::AllGather,
                        _ => Collective::ReduceScatter,
                    },
                    num_ranks: whole(fields[2]) as u32,
                    bytes: whole(fields[3]),
                    ns: whole(fields[4]),
                })
                .collect(),
        }
    }

    /// Time of a product of `m x k` with `k x n` values of 16 bit, in nanoseconds.
    ///
    /// *Not modelled*: operands whose rows do not begin at multiples of 16 bytes.
    pub fn product_ns(&self, m: u64, n: u64, k: u64) -> f64 {
        self.products.ns([m, n, k])
    }

    /// The share of the device's peak that the forward of attention over segments of so many tokens reaches where it
    /// fills the device. Of the kinds of attention that were measured the nearest is taken: first by its mask, then by the
    /// size of its heads.
    pub fn attention_utilization(&self, is_causal: bool, head_size: u64, tokens: u64) -> f64 {
        let nearest = self
            .attention
            .iter()
            .min_by_key(|row| (row.is_causal != is_causal, row.head_size.abs_diff(head_size), row.head_size));
        let Some(nearest) = nearest else { return f64::NAN };
        let same =
            |row: &&AttentionRow| (row.is_causal, row.head_size) == (nearest.is_causal, nearest.head_size);
        let points: Vec<(f64, f64)> = self
            .attention
            .iter()
            .filter(same)
            .map(|row| ((row.tokens as f64).ln(), (row.permille as f64 / 1e3).ln()))
            .collect();
        along(&points, (tokens.max(1) as f64).ln()).exp()
    }

    /// Times of a collective over so many ranks of one node by the bytes of its message; empty where it was not measured.
    /// None is shorter than that of a smaller message.
    pub fn collective(&self, collective: Collective, num_ranks: u32) -> Vec<MessagePoint> {
        let rows = self.collectives.iter();
        let rows = rows.filter(|row| (row.collective, row.num_ranks) == (collective, num_ranks));
        let mut longest = 0;
        rows.map(|row| {
            longest = row.ns.max(longest);
            MessagePoint { bytes: row.bytes, ns: longest }
        })
        .collect()
    }

    /// `a100` or `h100`.
    pub const fn name(&self) -> &'static str {
        self.name
    }
}

impl Products {
    /// Columns `n,k`, then the time in microseconds for each number of rows that the header names.
    fn read(text: &str) -> Self {
        let header = text.lines().find(|line| !line.starts_with('#')).unwrap_or_default();
        let rows: Vec<f64> = header.split(',').skip(2).map(number).collect();
        let (mut widths, mut logarithms) = (Vec::new(), Vec::new());
        for line in lines(text) {
            let fields: Vec<f64> = line.split(',').map(number).collect();
            if widths.last() != Some(&fields[0]) {
                widths.push(fields[0]);
            }
            logarithms.extend(fields[2..].iter().map(|us| (us * 1e3).ln()));
        }
        assert_eq!(logarithms.len(), widths.len() * widths.len() * rows.len(), "the table is a full grid");
        Self { rows, widths, logarithms }
    }

    fn ns(&self, [m, n, k]: [u64; 3]) -> f64 {
        let [m, n, k] = [m, n, k].map(|size| size.max(1) as f64);
        let axes = [(&self.widths, n), (&self.widths, k), (&self.rows, m)];
        let mut outside = 1.0;
        let places = axes.map(|(sizes, size)| {
            let last = sizes[sizes.len() - 1];
            outside *= (size / last).max(1.0);
            let inside = size.clamp(sizes[0], last);
            let at = sizes.partition_point(|&one| one <= inside).clamp(1, sizes.len() - 1) - 1;
            (at, (inside / sizes[at]).ln() / (sizes[at + 1] / sizes[at]).ln())
        });
        let mut logarithm = 0.0;
        for corner in 0..8_usize {
            let (mut weight, mut index) = (1.0, 0);
            for (axis, &(at, share)) in places.iter().enumerate() {
                let step = corner >> axis & 1;
                weight *= if step == 1 { share } else { 1.0 - share };
                index = index * axes[axis].0.len() + at + step;
            }
            if weight > 0.0 {
                logarithm += weight * self.logarithms[index];
            }
        }
        logarithm.exp() * outside
    }
}

/// The value at `x` of the line through points of ascending x; that of the nearest outside them.
fn along(points: &[(f64, f64)], x: f64) -> f64 {
    let after = points.partition_point(|point| point.0 <= x);
    match (after.checked_sub(1).map(|before| points[before]), points.get(after)) {
        (Some((x0, y0)), Some(&(x1, y1))) => y0 + (y1 - y0) * (x - x0) / (x1 - x0),
        (Some((_, y)), None) | (None, Some(&(_, y))) => y,
        (None, None) => f64::NAN,
    }
}

/// All lines but the header and those of the source.
fn lines(text: &'_ str) -> impl Iterator<Item = &'_ str> {
    text.lines().filter(|line| !line.starts_with('#')).skip(1)
}

fn number(text: &str) -> f64 {
    text.trim().parse().expect("the tables hold numbers")
}

fn whole(text: &str) -> u64 {
    text.trim().parse().expect("the tables hold whole numbers")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table of 2 x 2 x 2 sizes by hand: at its points the table's own times, between them their geometric mean, outside
    /// the last rate.
    #[test]
    fn products_between_and_outside_the_table() {
        let text = "# source\nn,k,1,100\n1,1,1,2\n1,100,4,8\n100,1,1,2\n100,100,4,8\n";
        let products = Products::read(text);
        let ns = |m, n, k| products.ns([m, n, k]).round() as u64;
        assert_eq!(
            [ns(1, 1, 1), ns(100, 1, 1), ns(1, 1, 100), ns(100, 100, 100)],
            [1_000, 2_000, 4_000, 8_000]
        );
        assert_eq!((ns(10, 7, 1), ns(1, 7, 10)), (1_414, 2_000));
        assert_eq!((ns(300, 1, 1), ns(200, 1, 200)), (6_000, 32_000));
    }

    #[test]
    fn every_table_is_read() {
        for chip in [A100, H100] {
            let measured = Measured::of_chip(chip).unwrap();
            assert_eq!(measured.name(), chip);
            // A large matrix product reaches 55 to 90 % of the peak rate, and a larger product never takes less time.
            let peak = if chip == A100 { 312e3 } else { 989.4e3 };
            let share = 2.0 * 8_192.0_f64.powi(3) / measured.product_ns(8_192, 8_192, 8_192) / peak;
            assert!((0.55..0.90).contains(&share), "{chip}: {share}");
            for num_ranks in [2, 4, 8] {
                for collective in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter] {
                    let points = measured.collective(collective, num_ranks);
                    assert!(points.len() > 10 && points.is_sorted_by_key(|point| (point.ns, point.bytes)));
                }
            }
            assert!(measured.collective(Collective::AllReduce, 3).is_empty());
            let share = |tokens| measured.attention_utilization(true, 128, tokens);
            assert!(share(256) < share(1_024) && share(1_024) < share(8_192) && share(8_192) < 0.75);
        }
        let h100 = Measured::of_chip(H100).unwrap();
        // The heads of a SigLIP encoder, 72 wide, are slower than those of 64.
        assert!(h100.attention_utilization(false, 72, 729) < h100.attention_utilization(false, 64, 729));
        assert!(Measured::of_chip("b200").is_none());
    }
}
