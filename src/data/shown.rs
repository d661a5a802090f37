//! A JSON value as an error message shows it.

use serde_json::Value;

/// Its text, or the first characters of a long one.
pub(super) fn shown(value: &Value) -> String {
    let text = value.to_string();
    let start: String = text.chars().take(60).collect();
    if start.len() < text.len() { format!("{start}…") } else { text }
}
