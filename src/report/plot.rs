//! Draws curves as SVG. Colours, dashes and widths come from the page's stylesheet through classes.

use std::fmt::Write;

use minijinja::HtmlEscape;
use serde::Serialize;

use super::axis::{Axis, Range};
use super::readable::{grouped, number, tick};

pub(super) const WIDTH: f64 = 440.0;
pub(super) const HEIGHT: f64 = 236.0;
/// Margins for labels: wide enough for `0.005` in the large type of a phone.
const LEFT: f64 = 46.0;
const RIGHT: f64 = WIDTH - 16.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = HEIGHT - 40.0;
/// Lines with more points have no markers.
const MARKED: usize = 40;
/// Styles of the page's stylesheet besides 0, which is plain ink: seven colours, each in two dashes.
const STYLES: usize = 14;
/// From a style to the one of the same colour in other dashes.
pub(super) const OTHER_DASHES: usize = STYLES / 2;

/// How a line is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SeriesKind {
    /// Thin: noisy training rows.
    Train,
    /// With markers: validation rows, and measurements at a few points.
    Marked,
    /// Without markers.
    Smooth,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Series {
    /// Name in the legend; lines with the same name share their colour and dashes.
    pub(super) name: String,
    /// 0 is plain ink; others have their own colours and dashes.
    pub(super) style: usize,
    pub(super) kind: SeriesKind,
    pub(super) points: Vec<(f64, f64)>,
}

/// A line for each name, in the order in which the names come, with its points from left to right.
pub(super) fn marked_lines(named: impl Iterator<Item = (String, Option<(f64, f64)>)>) -> Vec<Series> {
    let mut lines: Vec<Series> = Vec::new();
    for (name, point) in named {
        let at = lines.iter().position(|line| line.name == name).unwrap_or(lines.len());
        if at == lines.len() {
            lines.push(Series { name, style: at + 1, kind: SeriesKind::Marked, points: vec![] });
        }
        lines[at].points.extend(point);
    }
    lines.iter_mut().for_each(|line| line.points.sort_by(|a, b| a.0.total_cmp(&b.0)));
    lines
}

/// Lines on the same axes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Plot {
    pub(super) title: String,
    /// Name of the horizontal axis.
    pub(super) x: String,
    pub(super) x_range: Range,
    /// Unit of the vertical axis; empty if the title suffices.
    pub(super) unit: &'static str,
    /// Of the vertical axis.
    pub(super) range: Range,
    pub(super) series: Vec<Series>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct LegendEntry {
    pub(super) name: String,
    pub(super) style: usize,
}

/// A drawn plot for the page's template.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Drawn {
    title: String,
    unit: &'static str,
    logarithmic: bool,
    legend: Vec<LegendEntry>,
    /// With both kinds of lines, the legend explains the difference.
    has_train: bool,
    has_marked: bool,
    svg: String,
}

impl Series {
    /// Training lines are thin only beside validation lines.
    fn class(&self, has_both_kinds: bool) -> String {
        let kind = match self.kind {
            SeriesKind::Train if has_both_kinds => "train",
            SeriesKind::Marked => "marked",
            SeriesKind::Train | SeriesKind::Smooth => "smooth",
        };
        format!("{kind} s{}", style_class(self.style))
    }

    fn full_name(&self, has_both_kinds: bool) -> String {
        match self.kind {
            SeriesKind::Train if has_both_kinds => format!("{}, training", self.name),
            SeriesKind::Marked if has_both_kinds => format!("{}, validation", self.name),
            _ => self.name.clone(),
        }
    }
}

fn style_class(style: usize) -> usize {
    if style == 0 { 0 } else { 1 + (style - 1) % STYLES }
}

impl Plot {
    /// Whether there is nothing to draw.
    pub(super) fn is_empty(&self) -> bool {
        self.series.iter().all(|series| series.points.is_empty())
    }

    /// Draws the plot and its legend. `id` must be unique on the page.
    pub(super) fn draw(&self, id: &str) -> Drawn {
        let ((x, y), [has_train, has_marked]) = (self.axes(), self.kinds());
        let mut svg = self.opening(id, &x, &y, has_train && has_marked);
        self.marks((&x, &y), &mut svg);
        svg.push_str("<line class=\"rule\" hidden=\"\"/></svg>\n");
        let (title, unit) = (self.title.clone(), self.unit);
        Drawn { title, unit, logarithmic: y.logarithmic, legend: legend([self]), has_train, has_marked, svg }
    }

    /// Draws axes and lines, [`WIDTH`] by [`HEIGHT`], for a picture that has other things too.
    pub(super) fn draw_within(&self, svg: &mut String) {
        let (x, y) = self.axes();
        self.marks((&x, &y), svg);
    }

    fn axes(&self) -> (Axis, Axis) {
        let points = || self.series.iter().flat_map(|series| series.points.iter().copied());
        (Axis::of(points().map(|point| point.0), self.x_range), Axis::of(points().map(|point| point.1), self.range))
    }

    /// Whether there are training lines, and whether there are marked ones.
    fn kinds(&self) -> [bool; 2] {
        let has = |kind: SeriesKind| self.series.iter().any(|series| series.kind == kind && !series.points.is_empty());
        [SeriesKind::Train, SeriesKind::Marked].map(has)
    }

    fn marks(&self, (x, y): (&Axis, &Axis), svg: &mut String) {
        grid(x, y, &self.x, svg);
        let has_both_kinds = self.kinds() == [true; 2];
        for series in &self.series {
            let (class, name) = (series.class(has_both_kinds), series.full_name(has_both_kinds));
            line(series, (&class, &name), (x, y), svg);
        }
    }

    /// The opening tag with a description for screen readers, and with the axes' ranges for the pointer script.
    fn opening(&self, id: &str, x: &Axis, y: &Axis, has_both_kinds: bool) -> String {
        let axis = |axis: &Axis| format!("{},{},{}", axis.low, axis.high, u8::from(axis.logarithmic));
        format!(
            "<svg class=\"plot\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-labelledby=\"{id}-title {id}-desc\" \
             data-frame=\"{LEFT},{RIGHT},{TOP},{BOTTOM}\" data-x=\"{}\" data-y=\"{}\" data-names=\"{}|{}\">\n\
             <title id=\"{id}-title\">{}</title>\n<desc id=\"{id}-desc\">{}</desc>\n",
            axis(x),
            axis(y),
            HtmlEscape(&self.x),
            HtmlEscape(self.unit),
            HtmlEscape(&self.title),
            HtmlEscape(&self.described(has_both_kinds)),
        )
    }

    /// The first and last value of each line.
    fn described(&self, has_both_kinds: bool) -> String {
        let described = |series: &Series| {
            let ((from, first), (to, last)) = (series.points.first()?, series.points.last()?);
            let name = series.full_name(has_both_kinds);
            let ([first, last], [from, to]) = ([*first, *last].map(number), [*from, *to].map(grouped));
            Some(format!("{name}: {first} at {from}, {last} at {to}."))
        };
        let lines: Vec<String> = self.series.iter().filter_map(described).collect();
        format!("Over the {}. {}", self.x, lines.join(" "))
    }
}

/// The lines of plots by name, each once.
pub(super) fn legend<'p>(plots: impl IntoIterator<Item = &'p Plot>) -> Vec<LegendEntry> {
    let mut entries: Vec<LegendEntry> = Vec::new();
    let drawn = plots.into_iter().flat_map(|plot| &plot.series).filter(|series| !series.points.is_empty());
    for series in drawn {
        let entry = LegendEntry { name: series.name.clone(), style: style_class(series.style) };
        if !entries.contains(&entry) {
            entries.push(entry);
        }
    }
    entries
}

fn x_of(axis: &Axis, value: f64) -> f64 {
    LEFT + axis.part(value) * (RIGHT - LEFT)
}

fn y_of(axis: &Axis, value: f64) -> f64 {
    BOTTOM - axis.part(value) * (BOTTOM - TOP)
}

fn grid(x: &Axis, y: &Axis, x_name: &str, svg: &mut String) {
    svg.push_str("<g class=\"grid\" aria-hidden=\"true\">\n");
    for &value in &y.ticks {
        let (at, label) = (y_of(y, value), tick(value));
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/><text class=\"y\" x=\"{:.1}\" y=\"{:.1}\">{label}</text>",
            LEFT - 7.0,
            at + 4.0
        ); // writing to a String cannot fail
    }
    for &value in &x.ticks {
        let (at, label, below) = (x_of(x, value), tick(value), BOTTOM + 17.0);
        let _ = writeln!(
            svg,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{BOTTOM}\" y2=\"{:.1}\"/><text class=\"x\" x=\"{at:.1}\" y=\"{below:.1}\">{label}</text>",
            BOTTOM + 4.0
        ); // as above
    }
    let middle = f64::midpoint(LEFT, RIGHT);
    let _ = writeln!(
        svg,
        "<text class=\"x name\" x=\"{middle:.1}\" y=\"{:.1}\">{}</text></g>",
        HEIGHT - 5.0,
        HtmlEscape(x_name)
    ); // as above
}

fn line(series: &Series, (class, name): (&str, &str), (x, y): (&Axis, &Axis), svg: &mut String) {
    let points = series.points.iter().filter(|point| y.takes(point.1));
    let places: Vec<(f64, f64)> = points.map(|point| (x_of(x, point.0), y_of(y, point.1))).collect();
    if places.is_empty() {
        return;
    }
    let _ = write!(svg, "<g class=\"{class}\"><path data-name=\"{}\" d=\"M", HtmlEscape(name)); // writing to a String cannot fail
    for (x, y) in &places {
        let _ = write!(svg, "{x:.2} {y:.2} "); // as above
    }
    svg.push_str("\"/>");
    // A single point makes an invisible line, so it gets a marker.
    let is_marked = series.kind == SeriesKind::Marked && places.len() <= MARKED;
    for (x, y) in places.iter().filter(|_| is_marked || places.len() == 1) {
        let _ = write!(svg, "<circle cx=\"{x:.2}\" cy=\"{y:.2}\" r=\"2.6\"/>"); // as above
    }
    svg.push_str("</g>\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(series: Vec<Series>) -> Plot {
        Plot {
            title: "a <b> & c".into(),
            x: "step".into(),
            x_range: Range::Tight,
            unit: "%",
            range: Range::Free,
            series,
        }
    }

    fn series(name: &str, kind: SeriesKind, points: &[(f64, f64)]) -> Series {
        Series { name: name.into(), style: 16, kind, points: points.to_vec() }
    }

    #[test]
    fn names_are_escaped_and_lines_are_inside() {
        let two = [
            series("<i>", SeriesKind::Train, &[(1.0, 2.0), (3.0, 40.0)]),
            series("<i>", SeriesKind::Marked, &[(2.0, 7.0)]),
        ];
        let drawn = plot(two.to_vec()).draw("p1");
        assert!(drawn.svg.contains("a &lt;b&gt; &amp; c") && !drawn.svg.contains("<i>"), "{}", drawn.svg);
        assert!(drawn.svg.contains("&lt;i&gt;, training: 2.00 at 1, 40.0 at 3."), "{}", drawn.svg);
        assert!(drawn.logarithmic && drawn.has_train && drawn.has_marked);
        assert_eq!(
            drawn.legend,
            [LegendEntry { name: "<i>".into(), style: 2 }],
            "one entry for both, of a style that there is"
        );
        assert!(drawn.svg.contains("class=\"train s2\"") && drawn.svg.matches("<circle").count() == 1, "{}", drawn.svg);
        assert!(plot(two[..1].to_vec()).draw("p1").svg.contains("class=\"smooth s2\""), "alone it is not thin");
        let path = drawn.svg.split("d=\"M").nth(1).unwrap().split('"').next().unwrap();
        let places: Vec<f64> = path.split_whitespace().map(|number| number.parse().unwrap()).collect();
        assert_eq!((places.len(), places[0], places[2]), (4, LEFT, RIGHT));
        assert!(TOP < places[3] && places[3] < places[1] && places[1] < BOTTOM, "{places:?}");
    }

    #[test]
    fn every_style_is_in_the_stylesheet_and_no_two_are_alike() {
        let rule = |style: usize| {
            let rules = include_str!("plot.css").split(&format!(".s{style} {{")).nth(1)?;
            rules.split('}').next().map(str::to_owned)
        };
        let rules: Vec<String> =
            (0..=STYLES).map(|style| rule(style).unwrap_or_else(|| panic!("no .s{style}"))).collect();
        let distinct: std::collections::BTreeSet<&String> = rules.iter().collect();
        assert_eq!(distinct.len(), STYLES + 1, "{rules:?}");
    }

    #[test]
    fn nothing_to_draw_draws_an_empty_frame() {
        let empty = plot(vec![series("x", SeriesKind::Smooth, &[])]);
        assert!(empty.is_empty());
        let drawn = empty.draw("p1");
        assert!(!drawn.svg.contains("NaN") && !drawn.svg.contains("<path") && drawn.legend.is_empty(), "{}", drawn.svg);
    }
}
