//! Which nodes of a batch's trees are verified where there are fewer rows than nodes.
//!
//! The one invariant: a node is kept only with its parent, because a child is never worth more
//! than its parent and, where both are worth the same, parents come first.

use super::Tree;

/// How much a later sibling is worth against the one before it, where its score must not count.
const NEXT_RANK: f32 = 0.5;

/// A tree, and how likely a draft of its request is to be right.
pub struct Weighted<'a> {
    /// The tree, pruned in place.
    pub tree: &'a mut Tree,
    /// The request's rate, from 0 to 1.
    pub rate: f32,
    /// Whether the drafts were drawn at random. Then their scores must not decide: to keep what
    /// was drawn by how likely it was would change the distribution that verification corrects.
    pub drawn: bool,
}

/// Prunes the trees of a batch to `rows` nodes in all, roots included: those with the largest
/// product of path score and the request's rate at each depth. Roots always stay.
pub fn prune_to_rows(trees: &mut [Weighted<'_>], rows: usize) {
    let nodes: usize = trees.iter().map(|weighted| weighted.tree.len()).sum();
    if nodes <= rows {
        return;
    }
    let mut worth: Vec<(f32, usize, usize, usize)> = Vec::with_capacity(nodes);
    for (at, Weighted { tree, rate, drawn }) in trees.iter().enumerate() {
        let mut by_rank = vec![1.0_f32; tree.len()];
        for (node, of) in tree.nodes().iter().enumerate().skip(1) {
            let rank = tree.children(of.parent).take_while(|&sibling| sibling < node).count();
            by_rank[node] = by_rank[of.parent] * NEXT_RANK.powi(rank as i32);
            let score = if *drawn { by_rank[node] } else { of.score };
            let rate = rate.clamp(0.0, 1.0).powi(of.depth as i32);
            worth.push((score * rate, of.depth, at, node));
        }
    }
    worth.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2, a.3).cmp(&(b.1, b.2, b.3))));
    let mut kept: Vec<Vec<bool>> = trees.iter().map(|w| vec![false; w.tree.len()]).collect();
    kept.iter_mut().for_each(|kept| kept[0] = true);
    for &(_, _, at, node) in worth.iter().take(rows.saturating_sub(trees.len())) {
        kept[at][node] = true;
    }
    for (weighted, kept) in trees.iter_mut().zip(kept) {
        weighted.tree.retain(&kept);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tree(parents: &[(usize, f32)]) -> Tree {
        let mut tree = Tree::root(7);
        for (at, &(parent, probability)) in parents.iter().enumerate() {
            tree.add(parent % (at + 1), at as u32, probability);
        }
        tree
    }

    proptest! {
        #[test]
        fn a_pruned_batch_has_its_rows_and_no_orphan(
            parents in proptest::collection::vec(
                proptest::collection::vec((0_usize..8, 0.0_f32..1.0), 0..12), 1..6),
            rates in proptest::collection::vec(0.0_f32..1.0, 6),
            rows in 0_usize..40,
            drawn in any::<bool>(),
        ) {
            let mut trees: Vec<Tree> = parents.iter().map(|p| tree(p)).collect();
            let before = trees.clone();
            let mut weighted: Vec<_> = trees.iter_mut().zip(&rates)
                .map(|(tree, &rate)| Weighted { tree, rate, drawn }).collect();
            prune_to_rows(&mut weighted, rows);
            let all: usize = before.iter().map(Tree::len).sum();
            let left: usize = trees.iter().map(Tree::len).sum();
            prop_assert_eq!(left, all.min(rows.max(trees.len())));
            for (tree, before) in trees.iter().zip(&before) {
                for (at, node) in tree.nodes().iter().enumerate() {
                    prop_assert!(at == 0 || node.parent < at);
                    // Its path carries the tokens that it had.
                    let tokens = |tree: &Tree, at| -> Vec<u32> {
                        tree.path(at).into_iter().map(|n| tree.nodes()[n].token).collect()
                    };
                    let same = |&b: &usize| tokens(before, b) == tokens(tree, at);
                    prop_assert!((0..before.len()).any(|b| same(&b)));
                }
            }
        }
    }

    #[test]
    fn rows_go_to_the_request_that_is_right_more_often() {
        let chain = || tree(&[(0, 1.0), (1, 1.0), (2, 1.0)]);
        let (mut good, mut bad) = (chain(), chain());
        let mut trees = [
            Weighted { tree: &mut bad, rate: 0.3, drawn: false },
            Weighted { tree: &mut good, rate: 0.9, drawn: false },
        ];
        prune_to_rows(&mut trees, 6);
        assert_eq!((good.len(), bad.len()), (4, 2));
    }

    #[test]
    fn scores_of_drawn_drafts_do_not_decide() {
        let (mut first, mut second) = (tree(&[(0, 0.1), (0, 0.9)]), tree(&[(0, 0.9), (0, 0.1)]));
        let mut trees = [
            Weighted { tree: &mut first, rate: 0.5, drawn: true },
            Weighted { tree: &mut second, rate: 0.5, drawn: true },
        ];
        prune_to_rows(&mut trees, 4);
        let tokens = |tree: &Tree| tree.nodes()[1..].iter().map(|n| n.token).collect::<Vec<_>>();
        assert_eq!((tokens(&first), tokens(&second)), (vec![0], vec![0]));
    }
}
