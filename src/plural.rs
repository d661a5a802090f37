//! Numbers of things in messages.

/// "1 row", "2 rows".
pub fn counted(number: usize, thing: &str) -> String {
    let s = if number == 1 { "" } else { "s" };
    format!("{number} {thing}{s}")
}
