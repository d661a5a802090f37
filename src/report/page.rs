//! The page: one template, one stylesheet, and a script that shows values under the pointer.

use std::collections::BTreeSet;

use minijinja::value::Serde;
use minijinja::{Environment, UndefinedBehavior};
use serde_json::{Value, json};

use super::curves::{self, Named, PlotGroup};
use super::key_figures::{KeyFigure, key_figures};
use super::plot::Plot;
use super::recipe_text::{RecipeText, differences};
use super::run::Run;
use super::sections::sections;

const TEMPLATE: &str = include_str!("page.html");
const STYLE: &str = concat!(include_str!("plot.css"), include_str!("style.css"));
const SCRIPT: &str = include_str!("hover.js");

/// Renders the page of one or several runs.
///
/// # Panics
/// Never: the template is part of this crate.
pub fn render(runs: &[Run]) -> String {
    let named: Vec<Named<'_>> = runs.iter().zip(names(runs)).collect();
    let recipes: Vec<&RecipeText> = runs.iter().map(|run| &run.recipe).collect();
    let sections = named.iter().enumerate().map(|(at, (run, name))| sections(run, at + 1, name));
    let page = json!({
        "title": named.iter().map(|(_, name)| name.as_str()).collect::<Vec<_>>().join(", "),
        "version": env!("CARGO_PKG_VERSION"),
        "style": STYLE,
        "script": SCRIPT,
        "groups": drawn(&named),
        "comparison": comparison(runs), // for several runs
        "differences": differences(&recipes),
        "runs": sections.collect::<Vec<_>>(),
    });
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    // Because the name ends in .html, everything not marked as safe in the template is escaped.
    environment.render_named_str("page.html", TEMPLATE, Serde(page)).expect("our own template and all that it names")
}

/// The folders' names if they are distinct, else their paths.
fn names(runs: &[Run]) -> Vec<String> {
    let short: Vec<String> = runs.iter().map(Run::short_name).collect();
    let is_own = short.iter().collect::<BTreeSet<_>>().len() == short.len();
    if is_own { short } else { runs.iter().map(|run| run.path.display().to_string()).collect() }
}

fn drawn(runs: &[Named<'_>]) -> Vec<Value> {
    let mut number = 0;
    let mut draw = |plot: &Plot| {
        number += 1;
        plot.draw(&format!("plot{number}"))
    };
    let mut group = |group: PlotGroup| json!({"title": group.title, "plots": group.plots.iter().map(&mut draw).collect::<Vec<_>>()});
    curves::groups(runs).into_iter().map(&mut group).collect()
}

/// Key figures of every run: the rows for which any run has a value.
fn comparison(runs: &[Run]) -> Vec<Value> {
    let figures: Vec<_> = runs.iter().map(key_figures).collect();
    let row = |at: usize| {
        let words = |pick: fn(&KeyFigure) -> &'static str| {
            let distinct: BTreeSet<&str> = figures.iter().map(|run| pick(&run[at])).collect();
            distinct.into_iter().collect::<Vec<_>>().join(" / ")
        };
        let values: Vec<_> = figures.iter().map(|run| &run[at].value).collect();
        json!({"name": words(|figure| figure.name), "of": words(|figure| figure.of), "values": values})
    };
    let is_known = |&at: &usize| figures.iter().any(|run| run[at].value.is_some());
    (0..figures.first().map_or(0, Vec::len)).filter(is_known).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The relative luminance of `#rrggbb` (WCAG 2.2).
    fn luminance(colour: &str) -> f64 {
        let channel = |at: usize| {
            let part = f64::from(u8::from_str_radix(&colour[at..at + 2], 16).unwrap()) / 255.0;
            if part <= 0.040_45 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5)
    }

    fn contrast(one: &str, other: &str) -> f64 {
        let (one, other) = (luminance(one), luminance(other));
        (one.max(other) + 0.05) / (one.min(other) + 0.05)
    }

    #[test]
    fn lines_and_words_stand_out_on_light_paper_and_on_dark() {
        let themes: Vec<&str> = STYLE.split(":root {").skip(1).filter_map(|rest| rest.split('}').next()).collect();
        assert_eq!(themes.len(), 2);
        for theme in themes {
            let colour = |name: &str| {
                let value = theme.split(&format!("--{name}: ")).nth(1).and_then(|rest| rest.split(';').next());
                value.filter(|value| value.starts_with('#')).unwrap_or_else(|| panic!("no --{name}"))
            };
            let paper = ["card", "paper"].map(colour);
            for words in ["ink", "muted", "accent"].map(colour) {
                assert!(paper.iter().all(|paper| contrast(words, paper) >= 4.5), "{words} on {paper:?}");
            }
            for line in ["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"].map(colour) {
                assert!(contrast(line, paper[0]) >= 3.0, "{line} on {}", paper[0]);
            }
            assert!(contrast(colour("warn"), colour("warn-paper")) >= 4.5);
        }
    }
}
