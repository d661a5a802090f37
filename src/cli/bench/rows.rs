//! Results as CSV.

use std::io;
use std::path::Path;

use serde_json::Value;

use crate::files;

/// Writes a header and the rows, which all have the same columns, atomically.
///
/// # Errors
/// An I/O error.
pub(super) fn write_rows(path: &Path, rows: &[Vec<(&'static str, Value)>]) -> io::Result<()> {
    files::write_atomic(path, |out| {
        let mut csv = csv::Writer::from_writer(out);
        csv.write_record(rows.iter().take(1).flatten().map(|(column, _)| column))?;
        rows.iter().try_for_each(|row| csv.write_record(row.iter().map(|(_, value)| csv_cell(value))))?;
        csv.flush()
    })
}

/// Empty for absent values.
fn csv_cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
