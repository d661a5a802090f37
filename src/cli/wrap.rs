//! Breaks the lines of messages between words, where a terminal would break them anywhere. Text that goes into a file or a pipe keeps its
//! lines, so that `grep` finds them. (textwrap would save `broken` alone: it knows nothing of quoted commands, tables and hanging `name   text` lines.)

use console::{Term, measure_text_width};

/// Names of `name   text` lines are no longer than this, with the spaces behind them.
const WIDEST_NAME: usize = 24;

/// The width of a terminal; `None` for a file or a pipe.
pub(super) fn columns(stream: &Term) -> Option<usize> {
    stream.size_checked().map(|(_, columns)| columns.into())
}

/// `text` in lines of at most `columns`. Unchanged: words, paths and commands that are longer, rows of tables, quoted lines of recipes.
pub(super) fn wrapped(text: &str, columns: Option<usize>) -> String {
    let Some(columns) = columns else { return text.to_owned() };
    let lines = text.split('\n').map(|line| if is_fixed(line) { line.to_owned() } else { broken(line, columns) });
    lines.collect::<Vec<_>>().join("\n")
}

/// Rows of tables (`a   b   c`), and lines that an error quotes (`3 | epochs = 0`).
fn is_fixed(line: &str) -> bool {
    let cells = line.split("  ").filter(|cell| !cell.trim().is_empty()).count();
    cells > 2 || line.trim_start_matches(|c: char| c.is_ascii_digit() || c == ' ').starts_with('|')
}

fn broken(line: &str, columns: usize) -> String {
    let indent = indent(line).min(columns / 2);
    let (mut out, mut column) = (String::new(), 0);
    for part in parts(line) {
        if column > indent && column + measure_text_width(part.trim_end()) > columns {
            out.truncate(out.trim_end().len());
            out.extend(["\n", &" ".repeat(indent)]);
            column = indent;
        }
        out.push_str(part);
        column += measure_text_width(part);
    }
    out
}

/// Where a broken line goes on: below its own beginning, or below the text of a `name   text` line.
fn indent(line: &str) -> usize {
    let behind_spaces = |from: usize| line.len() - line[from..].trim_start().len();
    let begin = behind_spaces(0);
    let text = line[begin..].find("  ").map(|gap| behind_spaces(begin + gap));
    text.filter(|text| *text <= WIDEST_NAME).unwrap_or(begin)
}

/// The parts of a line between which it may be broken, each with the spaces behind it: words, text in backticks, and a command after a colon.
fn parts(line: &str) -> Vec<&str> {
    let (mut parts, mut start, mut end, mut is_quoted) = (Vec::new(), 0, 0, false);
    for word in line.split_inclusive(' ') {
        if begins_command(&line[..end], word) {
            break;
        }
        end += word.len();
        is_quoted ^= word.matches('`').count() % 2 == 1;
        if !is_quoted {
            parts.push(&line[start..end]);
            start = end;
        }
    }
    parts.extend(Some(&line[start..]).filter(|rest| !rest.is_empty()));
    parts
}

fn begins_command(before: &str, word: &str) -> bool {
    let is_place = before.trim().is_empty() || before.ends_with(": ") && before != "error: ";
    is_place && ["medusa ", "medusa-train "].contains(&word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(columns: usize, text: &str) -> String {
        wrapped(text, Some(columns))
    }

    #[test]
    fn lines_end_between_words_and_go_on_below_their_text() {
        assert_eq!(at(12, "error: no such file"), "error: no\nsuch file");
        assert_eq!(at(14, "  two words each"), "  two words\n  each");
        assert_eq!(at(20, "device   AMD EPYC with 2 cores"), "device   AMD EPYC\n         with 2\n         cores");
        assert_eq!(at(10, "漢字 漢字漢 字"), "漢字\n漢字漢 字", "characters of two columns");
        assert_eq!(at(5, "\u{1b}[1merror\u{1b}[0m bold"), "\u{1b}[1merror\u{1b}[0m\nbold", "colours have no width");
        assert_eq!(at(80, "first\n\nlast "), "first\n\nlast ");
    }

    #[test]
    fn paths_commands_tables_and_quoted_lines_are_never_broken() {
        assert_eq!(at(10, "wrote /long/path/heads.safetensors now"), "wrote\n/long/path/heads.safetensors\nnow");
        assert_eq!(at(20, "go on with: medusa-train a.toml --resume"), "go on with:\nmedusa-train a.toml --resume");
        assert_eq!(at(12, "measure it with `medusa calibrate` anew"), "measure it\nwith\n`medusa calibrate`\nanew");
        for whole in
            ["medusa tree --calibration c.json", "head   targets   top-1", " 3 | epochs = 0 # none", "  |  ^^^^"]
        {
            assert_eq!(at(8, whole), whole);
        }
    }

    #[test]
    fn files_and_pipes_get_whole_lines() {
        let line = "word ".repeat(50);
        assert_eq!(wrapped(&line, None), line);
    }
}
