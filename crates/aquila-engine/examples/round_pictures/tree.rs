//! The tree of one round, with what the target accepted.

use super::Round;
use super::svg::{Picture, width_of};

const ROW: f64 = 32.0;
const TOP: f64 = 74.0;

/// Draws it from left to right, a column for each depth.
pub fn picture(round: &Round) -> String {
    let nodes = round.tree.nodes();
    let words: Vec<String> = nodes.iter().map(|node| (round.words)(node.token)).collect();
    let deepest = nodes.iter().map(|node| node.depth).max().unwrap_or(0);
    let path = round.path();
    let bonus = round.yielded.last().map(|&token| (round.words)(token)).unwrap_or_default();

    // A column is as wide as its widest box, with the probability beside it.
    let mut lefts = vec![14.0];
    for depth in 0..=deepest {
        let of_depth = nodes.iter().zip(&words).filter(|(node, _)| node.depth == depth);
        let widest = of_depth.map(|(_, word)| width_of(word)).fold(30.0, f64::max);
        let beside = if depth == 0 { 0.0 } else { 40.0 };
        lefts.push(lefts[depth] + widest + beside + 40.0);
    }
    let mut rows = vec![0.0; nodes.len()];
    let mut leaves = 0.0;
    place(round, 0, &mut rows, &mut leaves);
    let height = TOP + leaves * ROW + 14.0;
    let width = lefts[deepest + 1] + width_of(&bonus);

    let right = path.len() - 1;
    let says = format!(
        "A round: {} drafts verified in one pass, {right} accepted, {} tokens",
        nodes.len() - 1,
        right + 1
    );
    let mut picture = Picture::new(width.max(720.0).ceil(), height, &says);
    picture.text(14.0, 20.0, "", &says);
    picture.rect(14.0, 32.0, 14.0, 14.0, "bonus");
    picture.text(34.0, 44.0, "note", "bonus token of the round before");
    picture.rect(254.0, 32.0, 14.0, 14.0, "yes");
    picture.text(274.0, 44.0, "note", "accepted");
    picture.rect(348.0, 32.0, 14.0, 14.0, "no");
    picture.text(368.0, 44.0, "note", "rejected");
    picture.rect(438.0, 32.0, 14.0, 14.0, "next");
    picture.text(458.0, 44.0, "note", "the target's next token: the new bonus");

    let middle = |row: f64| TOP + row * ROW + 12.0;
    for (at, node) in nodes.iter().enumerate() {
        let (x, y) = (lefts[node.depth], middle(rows[at]));
        if at > 0 {
            let parent = node.parent;
            let beside = if nodes[parent].depth == 0 { 0.0 } else { 40.0 };
            let from = lefts[nodes[parent].depth] + width_of(&words[parent]) + beside;
            let class = if path.contains(&at) { "way" } else { "edge" };
            picture.path(&curve(from, middle(rows[parent]), x, y), class);
        }
        let class = match (at, path.contains(&at)) {
            (0, _) => "bonus",
            (_, true) => "yes",
            (_, false) => "no",
        };
        picture.rect(x, y - 12.0, width_of(&words[at]), 24.0, class);
        picture.text(x + 7.0, y + 4.0, if class == "no" { "gone" } else { "" }, &words[at]);
        if at > 0 {
            let chance = node.score / nodes[node.parent].score;
            picture.text(x + width_of(&words[at]) + 5.0, y + 4.0, "note", &format!("{chance:.2}"));
        }
    }
    if let Some(&last) = path.last() {
        let (depth, y) = (nodes[last].depth, middle(rows[last]));
        let beside = if depth == 0 { 0.0 } else { 40.0 };
        let from = lefts[depth] + width_of(&words[last]) + beside;
        let x = lefts[depth + 1];
        // Children of the last accepted node may be where the arrow would go straight.
        let y_to = if round.tree.children(last).next().is_some() { y - 26.0 } else { y };
        picture.path(&curve(from, y, x, y_to), "next");
        picture.rect(x, y_to - 12.0, width_of(&bonus), 24.0, "next");
        picture.text(x + 7.0, y_to + 4.0, "", &bonus);
    }
    picture.finish()
}

/// Rows of leaves from top to bottom; a parent is level with its first child.
fn place(round: &Round, at: usize, rows: &mut [f64], leaves: &mut f64) {
    let children: Vec<usize> = round.tree.children(at).collect();
    if children.is_empty() {
        rows[at] = *leaves;
        *leaves += 1.0;
        return;
    }
    for &child in &children {
        place(round, child, rows, leaves);
    }
    rows[at] = rows[children[0]];
}

fn curve(x: f64, y: f64, to_x: f64, to_y: f64) -> String {
    let bend = (x + to_x) / 2.0;
    format!("M{x:.1} {y:.1}C{bend:.1} {y:.1} {bend:.1} {to_y:.1} {to_x:.1} {to_y:.1}")
}
