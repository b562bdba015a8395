//! Tokens per round, a group of bars for each algorithm and tree.

use aquila_spec::Shape;

use super::svg::Picture;

const LEFT: f64 = 232.0;
const TOP: f64 = 62.0;
const BAR: f64 = 13.0;
const GROUP: f64 = 52.0;
/// Of one token.
const UNIT: f64 = 84.0;

/// What one algorithm yields with trees of one shape.
pub struct Group {
    pub name: &'static str,
    pub shape: Shape,
    /// Tokens per round by kind of prompt.
    pub lengths: Vec<(String, f64)>,
}

/// Draws them.
pub fn picture(groups: &[Group]) -> String {
    let height = TOP + groups.len() as f64 * GROUP + 8.0;
    let lengths = groups.iter().flat_map(|group| group.lengths.iter().map(|(_, length)| *length));
    let longest = lengths.fold(1.0, f64::max);
    let says = "Tokens per round: what one pass of the target yields";
    let mut picture = Picture::new((LEFT + UNIT * longest + 60.0).ceil(), height, says);
    picture.text(14.0, 20.0, "", says);
    let kinds = groups.first().map_or(&[][..], |group| &group.lengths);
    for (index, (kind, _)) in kinds.iter().enumerate() {
        let x = 14.0 + index as f64 * 90.0;
        picture.rect(x, 32.0, 14.0, 14.0, &format!("c{index} fill"));
        picture.text(x + 20.0, 44.0, "note", kind);
    }
    for (at, Group { name, shape, lengths }) in groups.iter().enumerate() {
        let y = TOP + at as f64 * GROUP;
        picture.text(14.0, y + 16.0, "", name);
        picture.text(14.0, y + 33.0, "note", &caption(*shape));
        for (index, (_, length)) in lengths.iter().enumerate() {
            let top = y + index as f64 * (BAR + 1.5);
            picture.rect(LEFT, top, UNIT * length, BAR, &format!("c{index} fill"));
            picture.text(
                LEFT + (UNIT * length).round() + 6.0,
                top + 11.0,
                "note",
                &format!("{length:.2}"),
            );
        }
    }
    picture.finish()
}

fn caption(shape: Shape) -> String {
    match (shape.steps(), shape.topk()) {
        (0, _) => "plain decoding".to_owned(),
        (steps, 1) => format!("a chain of {steps}"),
        (steps, topk) => format!("{steps} steps, topk {topk}, {} nodes", shape.nodes()),
    }
}
