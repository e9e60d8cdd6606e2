//! Numbers as people read them.

/// `1,234,567`.
pub fn thousands(number: u64) -> String {
    grouped(&number.to_string())
}

/// A number of things: `1 sample`, `2,000 samples`.
pub fn counted(number: u64, thing: &str) -> String {
    format!("{} {thing}{}", thousands(number), if number == 1 { "" } else { "s" })
}

/// Digits of a whole number with a comma before each three: `1234567` as `1,234,567`.
pub fn grouped(digits: &str) -> String {
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
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
