//! How people see numbers: units, thousands separators, no more digits than they can use.
//!
//! The command line, the report and every error write numbers by these functions, so that one quantity reads alike
//! wherever it stands.

/// What stands where there is no number.
pub const NONE: &str = "-";

/// `1,234,567`.
pub fn thousands(number: u64) -> String {
    grouped(&number.to_string())
}

/// A number of things: `1 sample`, `2,000 samples`.
pub fn counted(number: u64, thing: &str) -> String {
    format!("{} {thing}{}", thousands(number), if number == 1 { "" } else { "s" })
}

/// Digits of a whole number with a comma before each three: `1234567` as `1,234,567`.
fn grouped(digits: &str) -> String {
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Three significant digits, four from 100 on, with thousands separators and at most six decimals; `-` if not finite.
pub fn number(value: f64) -> String {
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
pub fn ms(value: f64) -> String {
    if value.is_finite() { format!("{} ms", number(value)) } else { NONE.to_owned() }
}

/// Nanoseconds as milliseconds with their unit, `474.5 ms`; below a tenth of a millisecond as they are, `41,260 ns`.
pub fn ns(value: u64) -> String {
    match value {
        1..100_000 => format!("{} ns", thousands(value)),
        _ => ms(value as f64 / 1e6),
    }
}

/// Nanoseconds as milliseconds without their unit, `474.5`: for a column whose heading has it.
pub fn ms_alone(value: u64) -> String {
    number(value as f64 / 1e6)
}

/// Nanoseconds with three significant digits in the largest unit that they fill: `1.63 us`, `70.5 us`, `1.50 s`.
///
/// For times that are not held against each other, as those of single kernels; a step is told by [`ns`].
pub fn unit_ns(value: f64) -> String {
    const UNITS: [(f64, &str); 4] = [(1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns")];
    let (size, unit) = UNITS.into_iter().find(|(size, _)| value >= *size).unwrap_or((1.0, "ns"));
    if value.is_finite() { format!("{} {unit}", number(value / size)) } else { NONE.to_owned() }
}

/// A ratio of 0.209 as `20.9 %`, with one digit more below 1 %.
pub fn percent(ratio: f64) -> String {
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

/// A ratio of 0.209 as `21 %`: for a part of a whole that is told in passing.
pub fn whole_percent(ratio: f64) -> String {
    if ratio.is_finite() { format!("{:.0} %", ratio * 100.0) } else { NONE.to_owned() }
}

/// A ratio with its sign: `+20.9 %`, `-0.14 %`.
pub fn signed_percent(ratio: f64) -> String {
    let sign = if ratio > 0.0 && ratio.is_finite() { "+" } else { "" };
    format!("{sign}{}", percent(ratio))
}

/// `1.151x`.
pub fn times(ratio: f64) -> String {
    if !ratio.is_finite() {
        NONE.to_owned()
    } else if ratio.abs() < 1e6 {
        format!("{ratio:.3}x")
    } else {
        format!("{ratio:.2e}x")
    }
}

/// Both ends of an interval of ratios: `1.051 to 1.126`.
pub fn ratios(low: f64, high: f64) -> String {
    let shown = |ratio: f64| times(ratio).trim_end_matches('x').to_owned();
    format!("{} to {}", shown(low), shown(high))
}

/// How long media play: `1.5 hours`, and below a tenth of an hour `4.2 minutes` or `12.5 seconds`.
pub fn playing_time(value_ms: u64) -> String {
    let seconds = value_ms as f64 / 1e3;
    match seconds {
        s if s >= 360.0 => format!("{:.1} hours", s / 3600.0),
        s if s >= 60.0 => format!("{:.1} minutes", s / 60.0),
        s => format!("{s:.1} seconds"),
    }
}

/// Bytes of files, in decimal units: `11.1 MB`. Bytes of memory are told by [`memory_size`].
pub fn file_bytes(value: u64) -> String {
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
pub fn compact(value: f64) -> String {
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
pub fn tick(value: f64) -> String {
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

/// Bytes of memory: `2.00 GiB`, `3.4 MiB`, `1,000 bytes`.
pub fn memory_size(bytes: u64) -> String {
    // A toy model needs a few MiB: two equal numbers of GiB would explain nothing.
    match bytes {
        0..0x10_0000 => format!("{} bytes", thousands(bytes)),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_digits_people_use() {
        assert_eq!(thousands(0), "0");
        assert_eq!(thousands(999), "999");
        assert_eq!(thousands(1_234_567), "1,234,567");
        assert_eq!(ms(474.512_3), "474.5 ms");
        assert_eq!(ms(12_345.6), "12,346 ms");
        assert_eq!(ms(0.041_26), "0.0413 ms");
        assert_eq!(ms(0.0), "0 ms");
        assert_eq!(number(-1.5), "-1.50");
        assert_eq!([0, 12, 99_999, 100_000].map(ns), ["0 ms", "12 ns", "99,999 ns", "0.100 ms"]);
        assert_eq!(
            [0.25, 1_630.0, 70_460.0, 1.5e9].map(unit_ns),
            ["0.250 ns", "1.63 us", "70.5 us", "1.50 s"]
        );
        assert_eq!([0.0014, -0.209].map(signed_percent), ["+0.14 %", "-20.9 %"]);
        assert_eq!([0.0, 0.209, 1.0].map(whole_percent), ["0 %", "21 %", "100 %"]);
        assert_eq!(percent(0.2094), "20.9 %");
        assert_eq!(percent(0.0014), "0.14 %");
        assert_eq!(times(1.1511), "1.151x");
        assert_eq!(ratios(1.0509, 1.126), "1.051 to 1.126");
        assert_eq!([1_597_400_000, 812_400_000, 0].map(ms_alone), ["1,597", "812.4", "0"]);
        assert_eq!(compact(1500.0), "1.5k");
        assert_eq!(compact(2_361_231.0), "2.36M");
        assert_eq!(compact(0.05), "0.05");
        assert_eq!(tick(20_000.0), "20,000");
        assert_eq!(tick(0.2), "0.2");
        assert_eq!(
            [12_500, 252_000, 1_080_000, 5_400_000].map(playing_time),
            ["12.5 seconds", "4.2 minutes", "0.3 hours", "1.5 hours"]
        );
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
            for show in [number, ms, unit_ns, percent, whole_percent, signed_percent, times, compact, tick] {
                assert_eq!(show(value), "-");
            }
        }
    }

    #[test]
    fn memory_is_never_rounded_to_nothing() {
        let bytes = [0, 1_000, (1 << 20) - 1, 1 << 20, (1 << 30) - 1, 3 << 29];
        let expected = ["0 bytes", "1,000 bytes", "1,048,575 bytes", "1.0 MiB", "1024.0 MiB", "1.50 GiB"];
        assert_eq!(bytes.map(memory_size), expected);
    }

    #[test]
    fn things_are_one_or_several() {
        let said = [0, 1, 2_000].map(|number| counted(number, "sample"));
        assert_eq!(said, ["0 samples", "1 sample", "2,000 samples"]);
    }

    #[test]
    fn digits_stand_in_threes() {
        let numbers = [0, 999, 1_000, 1_234_567, u64::MAX];
        let expected = ["0", "999", "1,000", "1,234,567", "18,446,744,073,709,551,615"];
        assert_eq!(numbers.map(thousands), expected);
        assert_eq!(grouped(""), "");
    }
}
