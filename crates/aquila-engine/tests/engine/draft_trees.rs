//! The trees that requests get, and what tokens say about how they came.

use std::sync::{Arc, Mutex};

use aquila_engine::{
    EngineConfig, Listener, Outcome, Request, Scheduler, Token, Usage, Verdict, VerifiedTree,
};
use aquila_spec::{Shape, Verify};

use crate::support::answers::*;
use crate::support::run;
use crate::support::shipped::{config, named};

/// What one request hears: the tree and the tokens of each round.
#[derive(Default)]
struct Rounds {
    rounds: Vec<(Option<Box<VerifiedTree>>, Vec<Token>)>,
    tree: Option<Box<VerifiedTree>>,
    usage: Usage,
}

struct Ear(Arc<Mutex<Rounds>>);

impl Listener for Ear {
    fn tree(&mut self, tree: Box<VerifiedTree>) {
        let before = self.0.lock().unwrap().tree.replace(tree);
        assert!(before.is_none(), "one tree comes before the tokens of its round");
    }

    fn tokens(&mut self, tokens: &[Token]) -> Verdict {
        let mut rounds = self.0.lock().unwrap();
        let tree = rounds.tree.take();
        rounds.rounds.push((tree, tokens.to_vec()));
        Verdict::Continue
    }

    fn finished(self: Box<Self>, outcome: Outcome) {
        self.0.lock().unwrap().usage = outcome.usage;
    }
}

fn submit(
    engine: &mut Scheduler,
    prompt: &[u32],
    change: impl Fn(&mut Request),
) -> Arc<Mutex<Rounds>> {
    let rounds = Arc::new(Mutex::new(Rounds::default()));
    let mut request = Request::new(prompt.to_vec(), 40, Box::new(Ear(rounds.clone())));
    request.limits.stop_ids = vec![0, 2];
    change(&mut request);
    engine.submit(request).unwrap();
    rounds
}

/// Checks a round's tokens against its tree; answers how many drafts they are.
fn check(tree: &VerifiedTree, bonus: u32, tokens: &[Token], what: &str) -> usize {
    let VerifiedTree { nodes, accepted } = tree;
    assert_eq!((nodes[0].token, nodes[0].depth, accepted[0]), (bonus, 0, 0), "{what}");
    for (at, node) in nodes.iter().enumerate().skip(1) {
        let parent = nodes[node.parent];
        assert!(node.parent < at && node.depth == parent.depth + 1, "{what}");
        assert!(node.score <= parent.score, "{what}");
    }
    for step in accepted.windows(2) {
        assert_eq!(nodes[step[1]].parent, step[0], "{what}: the path follows parents");
    }
    let drafted: Vec<u32> = accepted[1..].iter().map(|&node| nodes[node].token).collect();
    let mut drafts = 0;
    for (at, token) in tokens.iter().enumerate() {
        let depth = token.drafted.map(|depth| usize::from(depth.get()));
        assert_eq!(depth, (at < drafted.len()).then_some(at + 1), "{what}");
        if let Some(&draft) = drafted.get(at) {
            assert_eq!(token.id, draft, "{what}: an accepted draft is the token");
            drafts += 1;
        }
    }
    drafts
}

#[test]
fn trees_and_tokens_of_a_round_agree() {
    let prompts: Vec<Vec<u32>> = prompts().into_iter().step_by(12).map(|(_, ids)| ids).collect();
    for (name, shape) in [
        ("EAGLE3", shape(4, 4, 12)),
        ("STANDALONE", Shape::chain(3)),
        ("NGRAM", shape(4, 2, 8)),
        ("EAGLE3+NGRAM", shape(3, 2, 6)),
        ("NONE", Shape::PLAIN),
    ] {
        for verify in [Verify::Match, Verify::Rejection] {
            let config = EngineConfig { verify, ..config(shape) };
            let mut engine = named(name, config);
            let ask = |(index, prompt): (usize, &Vec<u32>)| {
                let change = |request: &mut Request| {
                    hot(request, index);
                    // Others in the batch ask for none.
                    request.draft_trees = !index.is_multiple_of(3);
                };
                submit(&mut engine, prompt, change)
            };
            let all: Vec<_> = prompts.iter().enumerate().map(ask).collect();
            run(&mut engine);
            let mut branches = 0;
            for (index, heard) in all.iter().enumerate() {
                let what = format!("{name}, {verify}, request {index}");
                let heard = heard.lock().unwrap();
                let (mut drafts, mut proposed, mut bonus) = (0, 0, None);
                for (tree, tokens) in &heard.rounds {
                    match (tree, bonus) {
                        (Some(tree), Some(bonus)) => {
                            drafts += check(tree, bonus, tokens, &what);
                            proposed += tree.nodes.len() - 1;
                            branches += usize::from(tree.nodes.len() > tree.accepted.len());
                        }
                        (None, bonus) => {
                            assert!(bonus.is_none() || index.is_multiple_of(3), "{what}");
                            drafts += tokens.iter().filter(|t| t.drafted.is_some()).count();
                        }
                        (Some(_), None) => panic!("{what}: the first token comes from no tree"),
                    }
                    bonus = tokens.last().map(|token| token.id);
                }
                let spec = &heard.usage.spec;
                assert_eq!(drafts as u64, spec.correct_drafts, "{what}");
                if !index.is_multiple_of(3) {
                    assert_eq!(proposed as u64, spec.proposed_drafts, "{what}");
                }
            }
            assert_eq!(branches > 0, name != "NONE", "{name}: some drafts are rejected");
        }
    }
}
