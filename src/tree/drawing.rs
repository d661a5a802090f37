//! Draws a tree as an SVG, like figure 6 of the paper: levels from the top, edges as thick as they are probable. No tensors here.

use std::fmt::Write;

use super::sparse_tree::SparseTree;
use crate::plural::counted;

const COLUMN: f64 = 26.0;
const LEVEL: f64 = 84.0;
const RADIUS: f64 = 10.0;
/// Margins: left of the tree for the names of the levels, above it for the title.
const LEFT: f64 = 74.0;
const TOP: f64 = 74.0;
const RIGHT: f64 = 24.0;
/// Wide enough in a page that a chain does not touch the names of the levels.
const MIN_WIDTH_IN_PAGE: f64 = 160.0;
/// The title's share of the margin above the tree.
const TITLE: f64 = 36.0;
/// Probability that edges are drawn with if none is given.
const UNKNOWN: f64 = 0.15;
/// Wide enough for the title.
const MIN_WIDTH: f64 = 480.0;

/// Colours for light and dark pages; uses system fonts only.
const STYLE: &str = "\
.paper { fill: #ffffff; }
text { font-family: system-ui, sans-serif; font-size: 11px; fill: #1f2328; }
.title { font-size: 14px; }
.edge { stroke: #2f6fb0; fill: none; stroke-linecap: round; }
.node { fill: #ffffff; stroke: #1f2328; stroke-width: 1.2; }
.rank { text-anchor: middle; }
@media (prefers-color-scheme: dark) {
.paper { fill: #0d1117; }
text { fill: #e6edf3; }
.edge { stroke: #6cb0f5; }
.node { fill: #0d1117; stroke: #e6edf3; }
}";

/// An SVG of the tree. Nodes carry their guess as in `tree.json` (0 is a head's best); edges are as thick and opaque as their
/// lower node is probable.
/// - `probabilities[n]`: probability that node `n` is right; 1 for the root
pub fn draw(tree: &SparseTree, probabilities: &[f64], expected_tokens_per_step: f64) -> String {
    let (width, places) = layout(tree, MIN_WIDTH);
    let height = level_y(tree.max_depth()) + RADIUS + RIGHT;
    let svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\">\n\
         <style>\n{STYLE}\n</style>\n<rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n\
         <text class=\"title\" x=\"16\" y=\"28\">{}, {expected_tokens_per_step:.2} tokens per step expected</text>\n",
        counted(tree.choices().len(), "node"),
    );
    levels_edges_nodes(tree, Some(probabilities), &places, svg)
}

/// The same picture for use inside a page, without title and style: the page styles the classes `edge`, `node` and `rank` within
/// `tree`. Without probabilities all edges look alike. `id` is the element id of the picture's description.
pub fn draw_in_page(tree: &SparseTree, probabilities: Option<&[f64]>, id: &str) -> String {
    let (width, places) = layout(tree, MIN_WIDTH_IN_PAGE);
    let height = level_y(tree.max_depth()) + RADIUS + RIGHT - TITLE;
    let svg = format!(
        "<svg class=\"tree\" role=\"img\" aria-labelledby=\"{id}\" viewBox=\"0 {TITLE:.0} {width:.0} {height:.0}\" width=\"{width:.0}\" \
         height=\"{height:.0}\">\n<desc id=\"{id}\">A sparse tree of {} over {}.</desc>\n",
        counted(tree.choices().len(), "node"),
        counted(tree.max_depth(), "head"),
    );
    levels_edges_nodes(tree, probabilities, &places, svg)
}

/// Appends levels, edges and nodes to `svg`.
fn levels_edges_nodes(
    tree: &SparseTree,
    probabilities: Option<&[f64]>,
    places: &[(f64, f64)],
    mut svg: String,
) -> String {
    levels(tree, &mut svg);
    edges(tree, probabilities, places, &mut svg);
    nodes(tree, probabilities, places, &mut svg);
    svg.push_str("</svg>\n");
    svg
}

/// The picture's width and each node's position. A narrow tree is centred.
fn layout(tree: &SparseTree, min_width: f64) -> (f64, Vec<(f64, f64)>) {
    let columns = columns(tree);
    let last_column = columns.iter().copied().fold(0.0, f64::max);
    let width = (LEFT + COLUMN * last_column + RIGHT).max(min_width);
    let left = LEFT + (width - LEFT - RIGHT - COLUMN * last_column) / 2.0;
    let place = |node| (left + COLUMN * columns[node], level_y(tree.depth(node)));
    (width, (0..tree.len()).map(place).collect())
}

fn level_y(depth: usize) -> f64 {
    TOP + LEVEL * depth as f64
}

/// Each leaf has its own column, in the order of paths; a parent is centred above its children.
fn columns(tree: &SparseTree) -> Vec<f64> {
    let mut leaves: Vec<usize> = (0..tree.len()).filter(|&node| tree.children(node).is_empty()).collect();
    leaves.sort_by(|&a, &b| tree.path(a).cmp(tree.path(b)));
    let mut columns = vec![0.0; tree.len()];
    for (column, leaf) in leaves.into_iter().enumerate() {
        columns[leaf] = column as f64;
    }
    // Children come after their parents, so going backwards their columns are known.
    for node in (0..tree.len()).rev() {
        let children = tree.children(node);
        if !children.is_empty() {
            columns[node] = f64::midpoint(columns[children.start], columns[children.end - 1]);
        }
    }
    columns
}

fn levels(tree: &SparseTree, svg: &mut String) {
    for depth in 0..=tree.max_depth() {
        let (y, name) = (level_y(depth) + 4.0, if depth == 0 { "LM head".into() } else { format!("head {depth}") });
        let _ = writeln!(svg, "<text x=\"16\" y=\"{y:.0}\">{name}</text>"); // writing to a String cannot fail
    }
}

/// Edges leave and arrive vertically, so that none crosses a neighbouring node.
fn edges(tree: &SparseTree, probabilities: Option<&[f64]>, places: &[(f64, f64)], svg: &mut String) {
    for (node, parent) in (1..tree.len()).filter_map(|node| Some((node, tree.parent(node)?))) {
        let ((x1, y1), (x2, y2)) = (places[parent], places[node]);
        let (middle, below) = (f64::midpoint(y1, y2), y2 - RADIUS);
        let probability = probabilities.map_or(UNKNOWN, |all| all[node]);
        let (stroke, opacity) = (0.8 + 7.0 * probability, 0.3 + 0.7 * probability.sqrt());
        let _ = writeln!(
            svg,
            "<path class=\"edge\" d=\"M{x1:.1} {y1:.1} C{x1:.1} {middle:.1} {x2:.1} {middle:.1} {x2:.1} {below:.1}\" \
             stroke-width=\"{stroke:.2}\" stroke-opacity=\"{opacity:.2}\"/>"
        ); // writing to a String cannot fail
    }
}

fn nodes(tree: &SparseTree, probabilities: Option<&[f64]>, places: &[(f64, f64)], svg: &mut String) {
    for (node, (x, y)) in places.iter().enumerate() {
        let path = tree.path(node);
        let probability = probabilities.map(|all| format!(": {:.4}", all[node])).unwrap_or_default();
        let _ = writeln!(
            svg,
            "<circle class=\"node\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{RADIUS}\"><title>{path:?}{probability}</title></circle>"
        ); // writing to a String cannot fail
        if let Some(rank) = tree.child_index(node) {
            let _ = writeln!(svg, "<text class=\"rank\" x=\"{x:.1}\" y=\"{:.1}\">{rank}</text>", y + 4.0); // cannot fail
        } else {
            let above = y - RADIUS - 6.0;
            let _ = writeln!(svg, "<text class=\"rank\" x=\"{x:.1}\" y=\"{above:.1}\">root</text>"); // cannot fail
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tree::sparse_tree::strategy::trees;

    /// Values of an attribute in all elements of a name.
    fn values(svg: &str, element: &str, attribute: &str) -> Vec<f64> {
        let value = |tag: &str| tag.split(&format!(" {attribute}=\"")).nth(1)?.split('"').next()?.parse().ok();
        svg.split(&format!("<{element} ")).skip(1).filter_map(value).collect()
    }

    /// Whether every element is closed in order, inside a single root element.
    fn is_well_formed(svg: &str) -> bool {
        let mut open: Vec<&str> = Vec::new();
        for (at, tag) in svg.split('<').skip(1).enumerate() {
            let Some((tag, _)) = tag.split_once('>') else { return false };
            let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap_or("");
            match (tag.starts_with('/'), tag.ends_with('/')) {
                (true, _) if open.pop() != Some(name) => return false,
                (false, false) if at > 0 && open.is_empty() => return false,
                (false, false) => open.push(name),
                _ => {}
            }
        }
        open.is_empty() && !svg.contains('&')
    }

    #[test]
    fn a_narrow_tree_is_centred() {
        let tree = SparseTree::new(vec![vec![0], vec![1], vec![2]]).unwrap();
        let (width, places) = layout(&tree, 1000.0);
        let x = places.iter().map(|&(x, _)| x);
        let [left, right] = [x.clone().fold(width, f64::min) - LEFT, width - RIGHT - x.fold(0.0, f64::max)];
        assert_eq!((width, left), (1000.0, right));
        assert!(left > 0.0);
    }

    proptest! {
        #[test]
        fn there_is_a_circle_a_node_and_a_path_an_edge(tree in trees(80, 5, 10)) {
            let probabilities: Vec<f64> = (0..tree.len()).map(|node| 0.7f64.powi(tree.depth(node) as i32)).collect();
            let svg = draw(&tree, &probabilities, 2.5);
            prop_assert!(is_well_formed(&svg), "{}", svg);
            let (x, y) = (values(&svg, "circle", "cx"), values(&svg, "circle", "cy"));
            prop_assert_eq!((x.len(), svg.matches("<path class=\"edge\"").count()), (tree.len(), tree.len() - 1));
            for a in 0..x.len() {
                for b in 0..a {
                    prop_assert!((x[a] - x[b]).hypot(y[a] - y[b]) > 2.0 * RADIUS, "nodes {} and {} overlap", b, a);
                }
            }
            let thick = values(&svg, "path", "stroke-width");
            for node in 1..tree.len() {
                let parent = tree.parent(node).unwrap();
                prop_assert!(parent == 0 || thick[node - 1] <= thick[parent - 1], "an edge is no thicker than the one above");
            }
        }
    }

    #[test]
    fn levels_and_guesses_are_named() {
        let tree = SparseTree::new(vec![vec![0], vec![7], vec![7, 3]]).unwrap();
        let svg = draw(&tree, &[1.0, 0.5, 0.2, 0.1], 1.8);
        for text in [
            ">root<",
            ">LM head<",
            ">head 1<",
            ">head 2<",
            ">0<",
            ">7<",
            ">3<",
            "[7, 3]: 0.1000",
            "3 nodes, 1.80 tokens per step",
        ] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
        assert!(
            svg.contains("<rect class=\"paper\"") && svg.contains(".paper { fill: #0d1117; }"),
            "dark text needs it: {svg}"
        );
        let in_page = draw_in_page(&tree, Some(&[1.0, 0.5, 0.2, 0.1]), "t1");
        assert!(
            is_well_formed(&in_page) && in_page.contains("[7, 3]: 0.1000") && !in_page.contains("<style>"),
            "{in_page}"
        );
        assert!(draw_in_page(&tree, None, "t1").contains("<title>[7, 3]</title>"));
        assert!(!is_well_formed(&svg.replace("</svg>", "")) && !is_well_formed(&svg.replacen("/>", ">", 1)));
    }
}
