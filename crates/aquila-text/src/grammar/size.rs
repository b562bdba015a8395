//! How many bytes a compiled grammar takes, estimated from what llguidance tells of it.
//!
//! The figures were fitted to the resident memory of processes that held many copies of one grammar,
//! for 50 grammars of all kinds, of 40 KB to 67 MB. The estimate is 0.8 to 2.1 times as much, mostly
//! more.

use std::collections::HashSet;

use llguidance::earley::{CGrammar, Parser};

/// Bytes that llguidance counts for a derivative, beyond those that it takes.
const TOO_MANY_PER_DERIVATIVE: usize = 40;
/// Bytes for each byte of an expression: two copies beside the one that the lexer counts, their tables,
/// and the texts that they were made from.
const PER_EXPRESSION_BYTE: usize = 5;
/// Bytes of what is known of an expression that the lexer has derived.
const PER_DERIVED: usize = 160;
/// Bytes of a symbol, and of a lexeme in its two copies.
const PER_SYMBOL: usize = 740;
/// Bytes of a place in a rule.
const PER_PLACE: usize = 120;

/// Bytes of a compiled grammar.
pub(super) fn bytes_of(parser: &Parser) -> usize {
    let (lexer, grammar) = (parser.lexer_stats(), parser.grammar());
    let spec = grammar.lexer_spec();
    let (symbols, places) = symbols_and_places(grammar);
    lexer.num_bytes.saturating_sub(lexer.num_derivatives * TOO_MANY_PER_DERIVATIVE)
        + spec.regex_builder.exprset().num_bytes() * PER_EXPRESSION_BYTE
        + lexer.num_derived * PER_DERIVED
        + (symbols + spec.lexemes.len()) * PER_SYMBOL
        + places * PER_PLACE
}

/// How many symbols a grammar has, and how many places their rules have, the ends of rules included.
fn symbols_and_places(grammar: &CGrammar) -> (usize, usize) {
    let mut seen = HashSet::from([grammar.start()]);
    let mut open = vec![grammar.start()];
    let mut places = 0;
    while let Some(symbol) = open.pop() {
        for &rule in grammar.rules_of(symbol) {
            let (symbols, ..) = grammar.rule_rhs(rule);
            places += symbols.len() + 1;
            open.extend(symbols.iter().copied().filter(|&symbol| seen.insert(symbol)));
        }
    }
    (seen.len(), places)
}
