//! The target as its own draft, which is right about every token: whatever a round then keeps
//! short of the best path of its tree, the drafting or the accepting lost.

use std::sync::{Arc, Mutex};

use aquila_engine::Request;
use aquila_spec::{Shape, Tree};

use super::answers::{Change, prompts};
use super::shipped::{Algorithm, config, engine_watched};
use super::watched::Trees;
use super::{Heard, Notes, run};

/// The drafts that each round kept, and those on the longest path of first children in its tree.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rounds {
    pub kept: Vec<usize>,
    pub best: Vec<usize>,
}

fn first_children(tree: &Tree) -> usize {
    std::iter::successors(Some(0), |&node| tree.first_child(node)).count() - 1
}

/// The rounds of every `step`-th prompt of the acceptance tables.
pub fn rounds(shape: Shape, step: usize, change: Change) -> Vec<Rounds> {
    let trees = Arc::new(Trees::default());
    let mut engine = engine_watched(Algorithm::Itself, config(shape), trees.clone());
    let submit = |(index, (_, prompt)): (usize, (String, Vec<u32>))| {
        let heard = Arc::new(Mutex::new(Heard::default()));
        let listener = Box::new(Notes { heard: heard.clone(), stop_after: None });
        let mut request = Request::new(prompt, 41, listener);
        change(&mut request, index);
        let id = engine.submit(request).unwrap();
        (id.0, heard)
    };
    let all: Vec<_> = prompts().into_iter().step_by(step).enumerate().map(submit).collect();
    run(&mut engine);
    let trees = trees.0.lock().unwrap();
    let rounds = |(id, heard): &(u64, Arc<Mutex<Heard>>)| {
        // The first run is the token that the prefill chose.
        let runs = &heard.lock().unwrap().runs[1..];
        let mut best: Vec<usize> = trees[id].iter().map(first_children).collect();
        if best.len() + 1 == runs.len() {
            // Before the last token there is nothing to draft.
            best.push(0);
        }
        Rounds { kept: runs.iter().map(|run| run - 1).collect(), best }
    };
    all.iter().map(rounds).collect()
}
