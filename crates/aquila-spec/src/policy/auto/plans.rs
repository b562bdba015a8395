//! What a round would do with each number of draft steps: rows, expected tokens and seconds.

use super::Auto;

/// What a round with so many draft steps would do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Plan {
    pub steps: usize,
    /// Rows to verify, those of the bonus tokens included.
    pub rows: usize,
    /// Tokens and seconds expected of it.
    pub tokens: f64,
    pub seconds: f64,
}

impl Plan {
    pub fn speed(&self) -> f64 {
        self.tokens / self.seconds
    }
}

/// What is compared at one batch: the plans by their number of steps, plain first, and whether
/// drafting could be faster at all, were every draft of every request right.
#[derive(Debug, Clone, Default)]
pub(super) struct Choice {
    pub batch: usize,
    pub drafting: usize,
    pub plans: Vec<Plan>,
    pub could_pay: bool,
}

impl Choice {
    pub fn best(plans: &[Plan]) -> Plan {
        let faster = |a: Plan, b: &Plan| if b.speed() > a.speed() { *b } else { a };
        plans[1..].iter().fold(plans[0], faster)
    }

    /// The fastest plan that drafts.
    pub fn best_drafting(&self) -> Option<Plan> {
        self.plans.get(1..).filter(|plans| !plans.is_empty()).map(Choice::best)
    }
}

impl Auto {
    /// Seconds of a plain round.
    pub(super) fn plain(&self, batch: usize) -> f64 {
        self.costs.verify(batch, batch)
    }

    /// Seconds of a round in which `drafting` requests draft so many steps and `rows` rows are
    /// verified.
    pub(super) fn seconds(&self, batch: usize, rows: usize, drafting: usize, steps: usize) -> f64 {
        let table = self.costs.verify(batch, rows) + self.costs.draft(drafting, steps);
        if steps == 0 { table } else { table * self.drafting.exp() }
    }

    /// Seconds, in all, to process rows that drafts have missed.
    pub(super) fn catch_up(&self, rows: usize) -> f64 {
        self.costs.draft_row * rows as f64 * self.drafting.exp()
    }

    /// The nodes of the tree of an average request, best first, each with its depth and the chance
    /// that it is accepted. `rates` are those of the first candidate by depth.
    fn profile(&self, rates: &[f64], later: impl Fn(usize) -> f64) -> Vec<(usize, f64)> {
        let largest = self.settings.largest;
        let mut nodes = Vec::with_capacity(largest.nodes());
        // Candidates: the chance that the parent is accepted and no earlier sibling is, the depth
        // and the rank.
        let mut open = vec![(1.0, 1, 0)];
        while nodes.len() + 1 < largest.nodes() {
            let chance = |&(reached, depth, rank): &(f64, usize, usize)| {
                reached * if rank == 0 { rates[depth - 1] } else { later(rank) }
            };
            let best =
                (0..open.len()).max_by(|&a, &b| chance(&open[a]).total_cmp(&chance(&open[b])));
            let Some(best) = best else { break };
            let (reached, depth, rank) = open.swap_remove(best);
            let accepted = chance(&(reached, depth, rank));
            nodes.push((depth, accepted));
            if rank + 1 < largest.topk() {
                open.push((reached - accepted, depth, rank + 1));
            }
            if depth < rates.len() {
                open.push((accepted, depth + 1, 0));
            }
        }
        nodes
    }

    /// The fastest plan for each number of steps. `drafting` has a factor on the rates of each
    /// request that may draft and the most steps that it may get; `missed` are rows that drafts
    /// must process first, which is spread over an answer.
    fn plans(
        &self,
        batch: usize,
        drafting: &[(f64, usize)],
        missed: usize,
        profile: &[(usize, f64)],
    ) -> Vec<Plan> {
        let plain =
            Plan { steps: 0, rows: batch, tokens: batch as f64, seconds: self.plain(batch) };
        let mut plans = vec![plain];
        let mut chances: Vec<(f64, usize)> = Vec::with_capacity(drafting.len() * profile.len());
        for &(factor, most) in drafting {
            let own = |&(depth, chance): &(usize, f64)| (chance * factor.powi(depth as i32), depth);
            let nodes = profile.iter().filter(|(depth, _)| *depth <= most).map(own);
            chances.extend(nodes.map(|(chance, depth)| (chance.min(1.0), depth)));
        }
        chances.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
        let catch_up = self.catch_up(missed) / self.acceptance.answer_tokens();
        for steps in 1..=self.settings.largest.steps() {
            let mut best: Option<Plan> = None;
            let (mut rows, mut tokens, mut deepest) = (batch, batch as f64, 0);
            for &(chance, depth) in chances.iter().filter(|(_, depth)| *depth <= steps) {
                rows += 1;
                tokens += chance;
                deepest = deepest.max(depth);
                if deepest < steps {
                    // Fewer steps would draft as much.
                    continue;
                }
                let per_token = catch_up * tokens / batch as f64;
                let seconds = self.seconds(batch, rows, drafting.len(), steps) + per_token;
                let plan = Plan { steps, rows, tokens, seconds };
                if best.is_none_or(|best| plan.speed() > best.speed()) {
                    best = Some(plan);
                }
            }
            plans.extend(best);
        }
        plans
    }

    /// Compares plans for a batch of which some requests may draft.
    pub(super) fn compare(&self, batch: usize, drafting: &[(f64, usize)], missed: usize) -> Choice {
        let largest = self.settings.largest.steps();
        let profile =
            self.profile(&self.acceptance.by_depth(largest), |rank| self.acceptance.of_rank(rank));
        let plans = self.plans(batch, drafting, missed, &profile);
        let certain: Vec<(usize, f64)> = (1..=largest).map(|depth| (depth, 1.0)).collect();
        let all = vec![(1.0, largest); batch];
        let at_best = Choice::best(&self.plans(batch, &all, missed, &certain));
        let could_pay = at_best.speed() > plans[0].speed() * (1.0 + self.settings.margin);
        Choice { batch, drafting: drafting.len(), plans, could_pay }
    }
}
