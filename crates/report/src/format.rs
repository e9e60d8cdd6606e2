//! How people see numbers: units, thousands separators, no more digits than they can use.

use dflop_types::grouped;
pub(crate) use dflop_types::{counted, thousands as count};

/// What stands where there is no number.
pub(crate) const NONE: &str = "-";

/// Three significant digits, four from 100 on, with thousands separators and at most six decimals; `-` if not finite.
pub(crate) fn number(value: f64) -> String {
    if !value.is_finite() {
        return NONE.to_owned();
    }
    let size = value.abs();
    let sign = if value < 0.0 { "-" } else { "" };
    if size >= 1e15 {
        return format!("{value:.2e}");
    }
    if size < 0.000_000_5 {
        return "0".to_owned();
    }
    let decimals = match size {
        s if s >= 1000.0 => 0,
        s if s >= 10.0 => 1,
        s => (2 - s.log10().floor() as i32).clamp(0, 6) as usize,
    };
    let text = format!("{size:.decimals$}");
    let (whole, rest) = text.split_once('.').map_or((text.as_str(), ""), |(whole, rest)| (whole, rest));
    if rest.is_empty() {
        format!("{sign}{}", grouped(whole))
    } else {
        format!("{sign}{}.{rest}", grouped(whole))
    }
}

/// Milliseconds with their unit: `474.5 ms`.
pub(crate) fn ms(value: f64) -> String {
    if value.is_finite() { format!("{} ms", number(value)) } else { NONE.to_owned() }
}

/// Nanoseconds, shown as milliseconds with their unit.
pub(crate) fn ns(value: u64) -> String {
    ms(value as f64 / 1e6)
}

/// A ratio of 0.209 as `20.9 %`, with one digit more below 1 %.
pub(crate) fn percent(ratio: f64) -> String {
    let value = ratio * 100.0;
    if !value.is_finite() {
        return NONE.to_owned();
    }
    if value == 0.0 {
        "0 %".to_owned()
    } else if value.abs() < 1.0 {
        format!("{value:.2} %")
    } else if value.abs() < 1e6 {
        format!("{value:.1} %")
    } else {
        format!("{value:.1e} %")
    }
}

/// `1.151x`.
pub(crate) fn times(ratio: f64) -> String {
    if !ratio.is_finite() {
        NONE.to_owned()
    } else if ratio.abs() < 1e6 {
        format!("{ratio:.3}x")
    } else {
        format!("{ratio:.2e}x")
    }
}

/// Binary units: `1.25 GiB`.
pub(crate) fn bytes(value: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if value < 1024 {
        return format!("{value} B");
    }
    let mut size = value as f64 / 1024.0;
    let mut unit = 0;
    while size >= 1023.995 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    let decimals = match size {
        s if s < 10.0 => 2,
        s if s < 100.0 => 1,
        _ => 0,
    };
    format!("{size:.decimals$} {}", UNITS[unit])
}

/// Decimal units, as of files and as the command line says them: `11.1 MB`.
pub(crate) fn file_bytes(value: u64) -> String {
    let size = value as f64;
    let (unit, divisor) = match value {
        0..=999 => return format!("{value} B"),
        1_000..=999_999 => ("kB", 1e3),
        1_000_000..=999_999_999 => ("MB", 1e6),
        1_000_000_000..=999_999_999_999 => ("GB", 1e9),
        _ => ("TB", 1e12),
    };
    format!("{:.1} {unit}", size / divisor)
}

/// Short form for axes, three significant digits: `0.5`, `20`, `1.5k`, `2.36M`.
pub(crate) fn compact(value: f64) -> String {
    if !value.is_finite() {
        return NONE.to_owned();
    }
    let size = value.abs();
    if size >= 1e15 {
        return format!("{value:.0e}");
    }
    let (scaled, unit) = match size {
        s if s >= 1e12 => (value / 1e12, "T"),
        s if s >= 1e9 => (value / 1e9, "G"),
        s if s >= 1e6 => (value / 1e6, "M"),
        s if s >= 1e3 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let decimals = if scaled == 0.0 { 0 } else { (2 - scaled.abs().log10().floor() as i32).clamp(0, 6) };
    let rounding = 10f64.powi(decimals);
    format!("{}{unit}", trimmed((scaled * rounding).round() / rounding))
}

/// A tick's value: no trailing zeros, thousands separators.
pub(crate) fn tick(value: f64) -> String {
    if !value.is_finite() {
        return NONE.to_owned();
    }
    if value.abs() >= 1e15 {
        return format!("{value:.0e}");
    }
    let text = trimmed(value);
    match text.split_once('.') {
        None if value >= 0.0 => grouped(&text),
        _ => text,
    }
}

fn trimmed(value: f64) -> String {
    let text = format!("{value:.6}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

/// The first `most` characters of a text, with `...` where it is longer.
pub(crate) fn clipped(text: &str, most: usize) -> String {
    let short: String = text.chars().take(most).collect();
    if short.len() < text.len() { format!("{short}...") } else { short }
}

/// The value below which `part` (0 to 1) of `sorted` lie, by linear interpolation between the two nearest; `None` if
/// there are none. For what was measured: the report and the command line say the same of the same run.
pub fn quantile(sorted: &[f64], part: f64) -> Option<f64> {
    let position = part * sorted.len().checked_sub(1)? as f64;
    let (below, above) = (sorted[position.floor() as usize], sorted[position.ceil() as usize]);
    Some(below + (above - below) * position.fract())
}

/// The value below which `part` (0 to 1) of `sorted` lie, by nearest rank; `None` if there are none. For sizes of samples:
/// it is the size of one that occurs.
pub(crate) fn occurring<T: Copy>(sorted: &[T], part: f64) -> Option<T> {
    let rank = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1).min(sorted.len().saturating_sub(1))).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_digits_people_use() {
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(ms(474.512_3), "474.5 ms");
        assert_eq!(ms(12_345.6), "12,346 ms");
        assert_eq!(ms(0.041_26), "0.0413 ms");
        assert_eq!(ms(0.0), "0 ms");
        assert_eq!(number(-1.5), "-1.50");
        assert_eq!(percent(0.2094), "20.9 %");
        assert_eq!(percent(0.0014), "0.14 %");
        assert_eq!(times(1.1511), "1.151x");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1_048_575), "1.00 MiB");
        assert_eq!(bytes(5 << 30), "5.00 GiB");
        assert_eq!(compact(1500.0), "1.5k");
        assert_eq!(compact(2_361_231.0), "2.36M");
        assert_eq!(compact(0.05), "0.05");
        assert_eq!(tick(20_000.0), "20,000");
        assert_eq!(tick(0.2), "0.2");
    }

    #[test]
    fn files_are_counted_as_the_command_line_counts_them() {
        assert_eq!(
            [0, 999, 1_000, 11_100_000, u64::MAX].map(file_bytes),
            ["0 B", "999 B", "1.0 kB", "11.1 MB", "18446744.1 TB"]
        );
    }

    #[test]
    fn what_is_not_finite_is_not_shown_as_a_number() {
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for show in [number, ms, percent, times, compact, tick] {
                assert_eq!(show(value), "-");
            }
        }
    }

    #[test]
    fn quantiles_of_sizes_occur() {
        assert_eq!(occurring::<u64>(&[], 0.5), None);
        assert_eq!(occurring(&[7], 0.95), Some(7));
        assert_eq!(occurring(&[1, 2, 3, 4], 0.5), Some(2));
        assert_eq!(occurring(&[1, 2, 3, 4], 1.0), Some(4));
        assert_eq!(occurring(&[1, 2, 3, 4], 0.0), Some(1));
    }

    #[test]
    fn quantiles_of_measurements_lie_between_them() {
        assert_eq!(quantile(&[], 0.5), None);
        assert_eq!(quantile(&[7.0], 0.95), Some(7.0));
        let four = [1.0, 2.0, 3.0, 5.0];
        assert_eq!([0.0, 0.5, 0.75, 1.0].map(|part| quantile(&four, part)), [1.0, 2.5, 3.5, 5.0].map(Some));
    }
}
