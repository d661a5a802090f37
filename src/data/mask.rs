//! Which tokens of a row carry loss, to look at: as text, or as a picture.

use std::fmt::Write;

use serde::Serialize;

use super::rows::{IGNORE, TokenRow};
use super::tokenize::{TextTokenizer, TokenizeError};

/// What stands before and behind learned tokens where there is no colour: Unicode's white square brackets.
const BRACKETS: [char; 2] = ['⟦', '⟧'];

const WIDTH: f64 = 920.0;
const MARGIN: f64 = 16.0;
const TOP: f64 = 56.0;
const LINE: f64 = 25.0;
const CHARACTER: f64 = 7.4;
const PADDING: f64 = 3.0;

/// Colours of light pages, and of dark ones; no font that a machine may lack.
const STYLE: &str = "\
text { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12px; fill: #57606a; white-space: pre; }
.title { font-family: system-ui, sans-serif; font-size: 14px; fill: #1f2328; }
rect { fill: #f3f4f6; stroke: #d0d7de; stroke-width: 0.8; }
.learned { fill: #cfe6ff; stroke: #2f6fb0; }
.said { fill: #0a3069; }
@media (prefers-color-scheme: dark) {
text { fill: #9198a1; }
.title { fill: #e6edf3; }
rect { fill: #161b22; stroke: #3d444d; }
.learned { fill: #12395f; stroke: #6cb0f5; }
.said { fill: #dbeeff; }
}";

/// One token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TokenPiece {
    pub id: i32,
    /// The text that it completes, nothing within a character; a special token's name.
    pub text: String,
    /// Whether it carries loss.
    pub learned: bool,
}

/// The tokens of a row as text, each with whether it carries loss.
///
/// # Errors
/// The tokenizer's own.
pub fn pieces(row: &TokenRow, tokenizer: &TextTokenizer) -> Result<Vec<TokenPiece>, TokenizeError> {
    let mut stream = tokenizer.stream();
    let tokens = row.input_ids.iter().zip(&row.labels);
    let piece = |(&id, &label): (&i32, &i32)| {
        let text = match tokenizer.is_special(id) {
            true => tokenizer.decode(&[id], false)?,
            false => stream.push(id)?.unwrap_or_default(),
        };
        Ok(TokenPiece { id, text, learned: label != IGNORE })
    };
    tokens.map(piece).collect()
}

/// The text with a mark before and behind each run of learned tokens: a terminal's colour, or brackets.
pub fn text(pieces: &[TokenPiece], in_colour: bool) -> String {
    let [start, end] =
        if in_colour { ["\u{1b}[1;32m", "\u{1b}[0m"].map(String::from) } else { BRACKETS.map(String::from) };
    let run = |run: &[TokenPiece]| {
        let text: String = run.iter().map(|piece| printable(&piece.text)).collect();
        if run[0].learned { format!("{start}{text}{end}") } else { text }
    };
    pieces.chunk_by(|a, b| a.learned == b.learned).map(run).collect()
}

/// Control characters of a data set are not for the terminal.
fn printable(text: &str) -> String {
    let shown = |letter: char| if letter.is_control() && letter != '\n' { '\u{fffd}' } else { letter };
    text.chars().map(shown).collect()
}

/// An SVG: every token a box, those that carry loss filled.
pub fn draw(pieces: &[TokenPiece]) -> String {
    let (mut x, mut line, mut boxes) = (MARGIN, 0, String::new());
    for piece in pieces {
        let text = shown(&piece.text);
        let width = width(&text);
        if x > MARGIN && x + width > WIDTH - MARGIN {
            (x, line) = (MARGIN, line + 1);
        }
        token(piece, &text, [x, line_y(line), width], &mut boxes);
        x += width + 1.0;
        if piece.text.contains('\n') {
            (x, line) = (MARGIN, line + 1);
        }
    }
    let learned = pieces.iter().filter(|piece| piece.learned).count();
    let height = line_y(line) + LINE + MARGIN;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH:.0} {height:.0}\" width=\"{WIDTH:.0}\" height=\"{height:.0}\">\n\
         <style>\n{STYLE}\n</style>\n\
         <text class=\"title\" x=\"{MARGIN}\" y=\"30\">{} tokens; the {learned} filled ones carry loss</text>\n{boxes}</svg>\n",
        pieces.len(),
    )
}

fn line_y(line: usize) -> f64 {
    TOP + LINE * line as f64
}

fn token(piece: &TokenPiece, shown: &str, [x, y, width]: [f64; 3], svg: &mut String) {
    let (filled, said) = if piece.learned { (" class=\"learned\"", " class=\"said\"") } else { ("", "") };
    let (height, text_x, text_y, length) = (LINE - 4.0, x + PADDING, y + 14.5, width - 2.0 * PADDING);
    let _ = writeln!(
        svg,
        "<rect{filled} x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height}\" rx=\"3\"><title>{}</title></rect>\
         <text{said} x=\"{text_x:.1}\" y=\"{text_y:.1}\" textLength=\"{length:.1}\" lengthAdjust=\"spacingAndGlyphs\">{}</text>",
        piece.id,
        escaped(shown),
    ); // a String takes all
}

/// A token as a box shows it: blanks keep their width, the end of a line has a sign.
fn shown(text: &str) -> String {
    let letters = text.chars().map(|letter| match letter {
        '\n' => '↵',
        ' ' => '\u{a0}',
        letter if letter.is_control() => '\u{fffd}',
        letter => letter,
    });
    let shown: String = letters.collect();
    if shown.is_empty() { "·".to_owned() } else { shown }
}

/// East Asian scripts and pictures take two places.
fn width(shown: &str) -> f64 {
    let places: f64 = shown.chars().map(|letter| if letter >= '\u{2e80}' { 2.0 } else { 1.0 }).sum();
    places * CHARACTER + 2.0 * PADDING
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn piece(text: &str, learned: bool) -> TokenPiece {
        TokenPiece { id: 7, text: text.to_owned(), learned }
    }

    #[test]
    fn runs_of_learned_tokens_stand_between_marks() {
        let row =
            [piece("<s>", false), piece("Hi\u{7} ", false), piece("a", true), piece("b", true), piece("!", false)];
        assert_eq!(text(&row, false), "<s>Hi\u{fffd} ⟦ab⟧!");
        assert_eq!(text(&row[2..4], true), "\u{1b}[1;32mab\u{1b}[0m");
    }

    #[test]
    fn a_picture_has_every_token_and_stays_within_its_width() {
        let row: Vec<TokenPiece> =
            (0..200).map(|n| piece(if n % 9 == 8 { "a<&\n" } else { " word" }, n % 3 == 0)).collect();
        let svg = draw(&row);
        assert_eq!((svg.matches("<rect").count(), svg.matches("class=\"learned\"").count()), (200, 67));
        assert!(svg.contains("a&lt;&amp;↵") && svg.contains("200 tokens; the 67 filled ones carry loss"), "{svg}");
        let number = |tag: &str, name: &str| -> f64 {
            tag.split(&format!(" {name}=\"")).nth(1).unwrap().split('"').next().unwrap().parse().unwrap()
        };
        let right = svg.split("<rect").skip(1).map(|tag| number(tag, "x") + number(tag, "width")).fold(0.0, f64::max);
        assert!(right <= WIDTH - MARGIN, "{right}");
        let words: Vec<TokenPiece> = (0..200).map(|_| piece(" word", false)).collect();
        let mut lines: Vec<f64> = draw(&words).split("<rect").skip(1).map(|tag| number(tag, "y")).collect();
        lines.dedup();
        assert!(lines.len() > 3 && lines.windows(2).all(|pair| (pair[1] - pair[0] - LINE).abs() < 0.1), "{lines:?}");
    }

    #[test]
    fn pieces_are_the_text_with_special_tokens_by_name() {
        let tokenizer = TextTokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone")).unwrap();
        let input_ids = tokenizer.encode("<|user|>Grüße 🙂<|end|>", false).unwrap();
        let labels = input_ids.iter().enumerate().map(|(at, id)| if at == 1 { *id } else { IGNORE }).collect();
        let pieces = pieces(&TokenRow { input_ids, labels }, &tokenizer).unwrap();
        assert_eq!(pieces.iter().filter(|piece| piece.learned).count(), 1);
        assert_eq!(text(&pieces, false).replace(BRACKETS, ""), "<|user|>Grüße 🙂<|end|>");
    }
}
