//! Numbers as readers see them.

/// A time in s, ms or µs.
pub(crate) fn duration(seconds: f64) -> String {
    if seconds >= 1.0 {
        format!("{seconds:.2} s")
    } else if seconds >= 1e-3 {
        format!("{:.1} ms", seconds * 1e3)
    } else {
        format!("{:.0} µs", seconds * 1e6)
    }
}

/// A share between 0 and 1, for sentences.
pub(super) fn percent(share: f64) -> String {
    match share * 100.0 {
        percent if percent > 0.0 && percent < 0.5 => "less than 1 %".to_owned(),
        percent => format!("{percent:.0} %"),
    }
}

/// A share between 0 and 1, for tables.
pub(super) fn in_hundred(share: f64) -> String {
    match share * 100.0 {
        percent if percent > 0.0 && percent < 0.05 => "< 0.1 %".to_owned(),
        percent => format!("{percent:.1} %"),
    }
}

/// Digits in groups of three.
pub(super) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push('\u{202f}');
        }
        out.push(digit);
    }
    out
}

/// A count and its noun.
pub(super) fn plural(number: u64, noun: &str) -> String {
    format!("{} {noun}{}", count(number), if number == 1 { "" } else { "s" })
}

#[expect(clippy::cast_precision_loss, reason = "rounded for reading")]
pub(crate) fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// A part of a whole, between 0 and 1.
#[expect(clippy::cast_precision_loss, reason = "rounded for reading")]
pub(super) fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_and_small_shares_are_not_zero() {
        assert_eq!(["1", "1\u{202f}234", "123\u{202f}456\u{202f}789"], [1, 1234, 123_456_789].map(count));
        assert_eq!(["0 %", "less than 1 %", "38 %"], [0.0, 0.004, 0.381].map(percent));
        assert_eq!(["0.0 %", "< 0.1 %", "12.5 %"], [0.0, 0.0004, 0.125].map(in_hundred));
        assert_eq!(["1 rank", "0 ranks"], [1, 0].map(|number| plural(number, "rank")));
    }
}
