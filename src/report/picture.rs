//! A sweep or a load of `medusa bench` as an SVG file: the page's plots beside each other, with colours of their own for light and dark.

use std::fmt::Write;

use minijinja::HtmlEscape;

use super::plot::{self, HEIGHT, LegendEntry, Plot, WIDTH};
use super::{load, sweep};
use crate::formats::bench::BenchResult;
use crate::formats::load::{LoadResult, LoadSource};

const STYLE: &str = include_str!("plot.css");
/// Rules for what only the picture has.
const OWN_STYLE: &str = "\
.paper { fill: var(--card); }
text.title { fill: var(--ink); font-size: 15px; font-weight: 600; }
text.heading { fill: var(--ink); font-size: 13px; font-weight: 600; }
";
/// Plots beside each other.
const COLUMNS: usize = 2;
const MARGIN: f64 = 20.0;
const GAP: f64 = 28.0;
/// From the top to the first line of the legend, and between its lines.
const LEGEND: f64 = 72.0;
const LEGEND_LINE: f64 = 18.0;
/// From the legend's last line to the headings of the plots, and from those to the plots.
const HEADING: f64 = 28.0;
const BELOW_HEADING: f64 = 8.0;
/// Length of a line in the legend, and the room that a letter is given.
const SWATCH: f64 = 26.0;
const LETTER: f64 = 6.6;

/// The picture of a sweep. One value alone has points without lines.
///
/// # Panics
/// Without results of a sweep.
pub fn draw_sweep(results: &[BenchResult]) -> String {
    let first = results.first().expect("a sweep has a result");
    draw(&title(first), &conditions(first), &sweep::plots(results))
}

/// The picture of results under load.
///
/// # Panics
/// Without results.
pub fn draw_load(results: &[LoadResult]) -> String {
    let source = &results.first().expect("a load has a result").source;
    let what = if matches!(source, LoadSource::Server { .. }) { "--endpoint" } else { "--concurrency" };
    draw(&format!("medusa bench {what}"), &source.conditions(), &load::plots(results))
}

/// Plots in rows of two below a common legend.
fn draw(title: &str, about: &str, plots: &[Plot]) -> String {
    let width = width(plots);
    let (legend, lines) = legend(&plot::legend(plots), width - MARGIN);
    let top = LEGEND + LEGEND_LINE * (lines - 1.0) + HEADING;
    let rows = plots.len().div_ceil(COLUMNS) as f64;
    let row_height = HEIGHT + BELOW_HEADING + HEADING;
    let height = top + rows * row_height - HEADING + MARGIN;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\" role=\"img\">\n\
         <style>\n{STYLE}{OWN_STYLE}</style>\n<rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n"
    );
    text(&mut svg, "title", (MARGIN, 30.0), title);
    text(&mut svg, "about", (MARGIN, 49.0), about);
    svg += &legend;
    for (at, plot) in plots.iter().enumerate() {
        let x = MARGIN + (at % COLUMNS) as f64 * (WIDTH + GAP);
        let y = top + (at / COLUMNS) as f64 * row_height;
        let unit = if plot.unit.is_empty() { String::new() } else { format!(", {}", plot.unit) };
        text(&mut svg, "heading", (x, y), &format!("{}{unit}", plot.title));
        let _ = write!(svg, "<g class=\"plot\" transform=\"translate({x:.0} {:.0})\">", y + BELOW_HEADING); // writing to a String cannot fail
        plot.draw_within(&mut svg);
        svg += "</g>\n";
    }
    svg + "</svg>\n"
}

fn width(plots: &[Plot]) -> f64 {
    let count = plots.len().min(COLUMNS) as f64;
    2.0 * MARGIN + count * WIDTH + (count - 1.0).max(0.0) * GAP
}

fn title(first: &BenchResult) -> String {
    let swept = first.sweep.as_ref().map_or("", |swept| swept.name.as_str());
    format!("medusa bench --sweep {swept}")
}

fn conditions(result: &BenchResult) -> String {
    let repeats = if result.repeats > 1 { format!(", median of {} repeats", result.repeats) } else { String::new() };
    format!("{} on {}, engine {}{repeats}", result.dtype, result.device, result.engine)
}

fn text(svg: &mut String, class: &str, (x, y): (f64, f64), words: &str) {
    let _ = writeln!(svg, "<text class=\"{class}\" x=\"{x:.0}\" y=\"{y:.0}\">{}</text>", HtmlEscape(words)); // as above
}

/// The legend up to `right`, and how many lines it takes.
fn legend(entries: &[LegendEntry], right: f64) -> (String, f64) {
    let (mut svg, mut x, mut line) = (String::new(), MARGIN, 0.0);
    for entry in entries {
        let room = SWATCH + 6.0 + LETTER * entry.name.chars().count() as f64;
        if x > MARGIN && x + room > right {
            (x, line) = (MARGIN, line + 1.0);
        }
        let y = LEGEND + LEGEND_LINE * line;
        let _ =
            writeln!(svg, "<g class=\"swatch s{}\"><path d=\"M{x:.0} {:.0} h{SWATCH}\"/></g>", entry.style, y - 4.0); // as above
        text(&mut svg, "about", (x + SWATCH + 6.0, y), &entry.name);
        x += room + 16.0;
    }
    (svg, line + 1.0)
}
