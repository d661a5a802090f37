//! Formats numbers for people.

use crate::plural;

/// Three significant digits, thousands separated: `9,001`, `45.8`, `2.70`, `0.0123`, `5e-4`.
pub(super) fn number(value: f64) -> String {
    let size = rounded(value.abs(), 3);
    match size {
        _ if !value.is_finite() => "–".into(),
        _ if size >= 1000.0 => grouped(value),
        _ if size >= 0.001 => format!("{value:.*}", (2 - size.log10().floor() as i32).max(0) as usize),
        0.0 => "0".into(),
        _ => format!("{:e}", rounded(value, 3)),
    }
}

/// Rounds to significant digits, so that the shortest text of the result has no more.
pub(super) fn rounded(value: f64, digits: usize) -> f64 {
    format!("{value:.*e}", digits.saturating_sub(1)).parse().unwrap_or(value) // infinite values stay as they are
}

/// A whole number with thousands separated.
pub(super) fn grouped(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = String::from(if value < 0.0 { "−" } else { "" });
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A fraction as a percentage.
pub(super) fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// Bytes with a suitable unit.
pub(super) fn bytes(count: f64) -> String {
    let (divisor, unit) = byte_unit(count);
    format!("{:.*} {unit}", usize::from(count / divisor < 100.0), count / divisor)
}

/// The divisor and name of a unit for up to `largest` bytes.
pub(super) fn byte_unit(largest: f64) -> (f64, &'static str) {
    if largest >= f64::from(1 << 30) { (f64::from(1 << 30), "GiB") } else { (f64::from(1 << 20), "MiB") }
}

/// Seconds in at most two units; few seconds with a digit.
pub(super) fn duration(seconds: f64) -> String {
    if seconds < 10.0 { format!("{seconds:.1} s") } else { plural::duration(seconds) }
}

/// A time of provenance.json with a blank between day and hour.
pub(super) fn time(rfc3339: &str) -> String {
    match rfc3339.strip_suffix('Z').and_then(|time| time.split_once('T')) {
        Some((day, hour)) => format!("{day} {hour} UTC"),
        None => rfc3339.to_owned(),
    }
}

/// A short label of a tick, which is a round number.
pub(super) fn tick(value: f64) -> String {
    let value = rounded(value, 4);
    match value.abs() {
        0.0 => "0".into(),
        size if size >= 1e6 => format!("{}M", rounded(value / 1e6, 4)),
        size if size >= 1e4 => format!("{}k", rounded(value / 1e3, 4)),
        size if size < 1e-3 => format!("{value:e}"),
        _ => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_as_long_as_they_matter() {
        let read = [9001.4, 45.78, 2.7, 0.999_9, 0.012_345, 0.000_5, 0.0, -1234.0, f64::NAN].map(number);
        assert_eq!(read, ["9,001", "45.8", "2.70", "1.00", "0.0123", "5e-4", "0", "−1,234", "–"]);
        assert_eq!([7.26, 75.0, 754.2, 7541.0].map(duration), ["7.3 s", "1 min 15 s", "12 min 34 s", "2 h 5 min"]);
        assert_eq!([666_365_952.0, 3.5e9, 5.0e6].map(bytes), ["635 MiB", "3.3 GiB", "4.8 MiB"]);
        assert_eq!((time("2026-11-21T10:11:10Z"), time("now")), ("2026-11-21 10:11:10 UTC".into(), "now".into()));
        assert_eq!(percent(0.72584), "72.6 %");
        assert_eq!([0.1 + 0.2, 200_000.0, 2.5e6, 5e-4, 0.001].map(tick), ["0.3", "200k", "2.5M", "5e-4", "0.001"]);
    }
}
