//! The rounds of an answer, a line for each.

use super::Round;
use super::svg::{Picture, width_of};

const ROW: f64 = 30.0;
const TOP: f64 = 62.0;

/// Draws what each round yielded: drafts that were right, then the bonus.
pub fn picture(rounds: &[Round]) -> String {
    let tokens: usize = rounds.iter().map(|round| round.yielded.len()).sum();
    let says = format!(
        "{tokens} tokens of an answer in {} passes of the model; plain decoding takes {tokens}",
        rounds.len()
    );
    let widths = rounds.iter().map(|round| {
        round.yielded.iter().map(|&id| width_of(&(round.words)(id)) + 6.0).sum::<f64>()
    });
    let widest = widths.fold(560.0, f64::max);
    let height = TOP + rounds.len() as f64 * ROW + 4.0;
    let mut picture = Picture::new((widest + 110.0).ceil(), height, &says);
    picture.text(14.0, 20.0, "", &says);
    picture.rect(14.0, 32.0, 14.0, 14.0, "yes");
    picture.text(34.0, 44.0, "note", "drafts that the target accepted");
    picture.rect(244.0, 32.0, 14.0, 14.0, "bonus");
    picture.text(264.0, 44.0, "note", "the token that the target adds in every pass");
    for (number, round) in rounds.iter().enumerate() {
        let y = TOP + number as f64 * ROW;
        picture.text(14.0, y + 16.0, "note", &format!("round {}", number + 1));
        let mut x = 90.0;
        let last = round.yielded.len() - 1;
        for (at, &id) in round.yielded.iter().enumerate() {
            let word = (round.words)(id);
            picture.rect(x, y, width_of(&word), 24.0, if at == last { "bonus" } else { "yes" });
            picture.text(x + 7.0, y + 16.0, "", &word);
            x = (x + width_of(&word) + 6.0).round();
        }
    }
    picture.finish()
}
