//! Stop strings against the obvious oracle: search in the whole text.

use aquila_text::{Error, Piece, StopStrings};
use proptest::prelude::*;

/// The match that completes first, and of those the one that starts first: where the text ends
/// and which string ended it.
fn oracle(text: &str, stops: &[String]) -> Option<(usize, usize)> {
    let matches = stops.iter().enumerate().flat_map(|(which, stop)| {
        let starts =
            (0..text.len()).filter(|at| text.as_bytes()[*at..].starts_with(stop.as_bytes()));
        starts.map(move |start| (start + stop.len(), start, which))
    });
    matches.min().map(|(_, start, which)| (start, which))
}

/// Everything emitted for `text` cut at `cuts`, and the stop.
fn run(text: &str, cuts: &[usize], stops: &[String]) -> (Vec<Piece>, String) {
    let mut matcher = StopStrings::new(stops.to_vec()).unwrap().matcher();
    let mut pieces = Vec::new();
    let mut at = 0;
    for &cut in cuts.iter().chain([&text.len()]) {
        pieces.push(matcher.push(&text[at..cut]));
        at = cut;
    }
    (pieces, matcher.finish())
}

fn word(longest: usize) -> impl Strategy<Value = String> {
    let letters = prop::sample::select(vec!['a', 'b', 'é', '世']);
    prop::collection::vec(letters, 1..=longest).prop_map(|letters| letters.into_iter().collect())
}

fn text_and_cuts() -> impl Strategy<Value = (String, Vec<usize>)> {
    (word(30), prop::collection::vec(any::<prop::sample::Index>(), 0..12)).prop_map(
        |(text, cuts)| {
            let places: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| *cut.get(&places)).collect();
            cuts.sort_unstable();
            (text, cuts)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn the_text_ends_before_the_first_complete_match(
        (text, cuts) in text_and_cuts(),
        stops in prop::collection::vec(word(5), 0..5),
    ) {
        let (pieces, rest) = run(&text, &cuts, &stops);
        let emitted: String = pieces.iter().map(|piece| piece.emit.as_str()).collect();
        let stopped = pieces.last().unwrap().stopped;
        match oracle(&text, &stops) {
            Some((end, which)) => {
                prop_assert_eq!(emitted, &text[..end]);
                prop_assert_eq!(stopped, Some(which));
                prop_assert_eq!(rest, "");
            }
            None => {
                prop_assert_eq!(emitted + &rest, text);
                prop_assert_eq!(stopped, None);
            }
        }
    }

    #[test]
    fn only_what_may_begin_a_stop_string_is_held_back(
        (text, cuts) in text_and_cuts(),
        stops in prop::collection::vec(word(5), 1..5),
    ) {
        let mut matcher = StopStrings::new(stops.clone()).unwrap().matcher();
        let mut at = 0;
        for cut in cuts.into_iter().chain([text.len()]) {
            if matcher.push(&text[at..cut]).stopped.is_some() {
                break;
            }
            at = cut;
            let begins = |held: &str| stops.iter().any(|stop| stop.starts_with(held));
            let seen = &text[..cut];
            let longest = (0..=cut).filter(|from| seen.is_char_boundary(*from))
                .map(|from| &seen[from..]).find(|held| begins(held)).unwrap();
            prop_assert_eq!(matcher.held(), longest);
            prop_assert!(longest.len() < stops.iter().map(String::len).max().unwrap());
        }
    }

    #[test]
    fn the_way_a_text_is_cut_changes_nothing(
        (text, cuts) in text_and_cuts(),
        stops in prop::collection::vec(word(4), 0..5),
    ) {
        let joined = |(pieces, rest): (Vec<Piece>, String)| {
            let emitted: String = pieces.iter().map(|piece| piece.emit.as_str()).collect();
            (emitted + &rest, pieces.last().unwrap().stopped)
        };
        prop_assert_eq!(joined(run(&text, &cuts, &stops)), joined(run(&text, &[], &stops)));
    }
}

#[test]
fn a_stop_string_across_pieces_is_never_shown() {
    let mut matcher = StopStrings::new(["</answer>"]).unwrap().matcher();
    let shown: Vec<String> =
        ["42 <", "/ans", "wer", "> more"].map(|text| matcher.push(text).emit).into();
    assert_eq!(shown, ["42 ", "", "", ""]);
    assert_eq!(matcher.stopped(), Some(0));
    assert_eq!(matcher.push("and more"), Piece { emit: String::new(), stopped: Some(0) });
    assert_eq!(matcher.finish(), "");
}

#[test]
fn a_false_alarm_is_released() {
    let mut matcher = StopStrings::new(["END", "\n\n"]).unwrap().matcher();
    assert_eq!(matcher.push("EN").emit, "");
    assert_eq!(matcher.push("ENx\n").emit, "ENENx");
    assert_eq!(matcher.finish(), "\n");
}

#[test]
fn of_strings_that_complete_together_the_longest_wins() {
    let stops = StopStrings::new(["b", "ab"]).unwrap();
    let piece = stops.matcher().push("xab");
    assert_eq!(piece, Piece { emit: "x".into(), stopped: Some(1) });
    assert_eq!(stops.strings(), ["b", "ab"]);
}

#[test]
fn nothing_to_stop_at_holds_nothing_back() {
    let stops = StopStrings::new(Vec::<String>::new()).unwrap();
    assert!(stops.is_empty());
    assert_eq!(stops.matcher().push("text").emit, "text");
}

#[test]
fn an_empty_stop_string_is_refused() {
    assert!(matches!(StopStrings::new(["a", ""]), Err(Error::EmptyStop)));
}
