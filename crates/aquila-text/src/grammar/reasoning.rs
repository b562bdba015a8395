//! Reasoning before an answer that a grammar holds: it is free up to its mark.

pub(super) use crate::parts::{CLOSE, OPEN};

/// The name of the grammar that holds the answer.
pub(super) const ANSWER: &str = "answer";

/// The grammar of reasoning and what follows it. `begun`: the prompt has begun the reasoning; else
/// the answer may have none. `special`: the marks are special tokens, which are no text.
pub(super) fn before(begun: bool, special: bool) -> String {
    let (open, reasoning) = match special {
        true => (OPEN.to_owned(), format!("reasoning: /(?s:.*)/ {CLOSE}")),
        false => {
            let close = CLOSE.replace('/', "\\/");
            (format!("\"{OPEN}\""), format!("reasoning[lazy]: /(?s:.*){close}/"))
        }
    };
    // Models write empty lines behind the mark.
    let start = match begun {
        true => format!("start: reasoning LINES? @{ANSWER}"),
        false => format!("start: ({open} reasoning LINES?)? @{ANSWER}"),
    };
    format!("{start}\n{reasoning}\nLINES: /\\n{{1,4}}/\n")
}
