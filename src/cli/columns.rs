//! Tables in aligned columns. Crates that draw tables break the words of a cell where the terminal is too narrow; here whole columns go below.

/// Aligns the columns, the first to the left, the others to the right. Columns that do not fit `width` stand below, behind the first one
/// again.
pub(super) fn aligned(rows: &[Vec<String>], width: Option<usize>) -> Vec<String> {
    let columns = rows.first().map_or(0, Vec::len);
    let widest = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(widest).collect();
    let mut lines: Vec<String> = Vec::new();
    let mut from = 1;
    while from < columns {
        let to = from + fitting(&widths, from, width);
        lines.extend((from > 1).then(String::new));
        lines.extend(rows.iter().map(|row| line(row, &widths, from..to)));
        from = to;
    }
    lines
}

const GAP: usize = 3;

/// How many columns, at least one, fit behind the first.
fn fitting(widths: &[usize], from: usize, width: Option<usize>) -> usize {
    let ends = widths[from..].iter().scan(widths[0], |end, width| {
        *end += GAP + width;
        Some(*end)
    });
    ends.take_while(|end| width.is_none_or(|width| *end <= width)).count().max(1)
}

fn line(row: &[String], widths: &[usize], columns: std::ops::Range<usize>) -> String {
    let cells = columns.map(|at| format!("{:GAP$}{:>width$}", "", row[at], width = widths[at]));
    format!("{:<width$}{}", row[0], cells.collect::<String>(), width = widths[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<Vec<String>> {
        let row = |cells: [&str; 4]| cells.map(str::to_owned).to_vec();
        vec![row(["a", "tokens", "speedup", "same"]), row(["all of it", "7", "1.25", "yes"])]
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        assert_eq!(
            aligned(&rows(), None),
            ["a           tokens   speedup   same", "all of it        7      1.25    yes"]
        );
    }

    #[test]
    fn columns_that_a_terminal_has_no_room_for_stand_below() {
        let lines = aligned(&rows(), Some(28));
        let (above, below) = (
            ["a           tokens   speedup", "all of it        7      1.25"],
            ["a           same", "all of it    yes"],
        );
        assert_eq!(lines, [&above[..], &[""], &below].concat());
        assert!(aligned(&rows(), Some(5)).iter().all(|line| line.len() <= 19), "one column a time");
    }
}
