//! The text of `--products`.

use std::fmt::Write;

use crate::latency::products::{ProductSpeed, ProductSpeeds, RowsTime};
use crate::plural::counted;

/// A line for the memory, and one for each product.
///
/// # Errors
/// Never, of a string.
pub(super) fn write(out: &mut String, products: &ProductSpeeds) -> std::fmt::Result {
    let ProductSpeeds { threads, read_gigabytes_per_second, products } = products;
    writeln!(out, "memory read  {read_gigabytes_per_second:.1} GB/s by {}", counted(*threads, "thread"))?;
    writeln!(
        out,
        "products     GB/s of weights for one row of activations, % of the memory's, and how many times as long more rows take"
    )?;
    for ProductSpeed { weights, gigabytes_per_second, rows } in products {
        write!(
            out,
            "  {weights:<10} {gigabytes_per_second:5.1} {:4.0} %",
            100.0 * gigabytes_per_second / read_gigabytes_per_second
        )?;
        rows.iter().skip(1).try_for_each(|RowsTime { rows, times }| write!(out, "  {rows} rows {times:.2}"))?;
        writeln!(out)?;
    }
    Ok(())
}
