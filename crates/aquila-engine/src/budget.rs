//! What memory goes where, told before anything is served.

use std::fmt;

use aquila_model::Needs;
use aquila_model::memory::ByteSize;

/// Memory that does not suffice.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BudgetError {
    /// No room for the weights.
    #[error(
        "weights ({}) alone exceed the {} that a memory fraction of {fraction} of {} allows: raise \
         it, or run a smaller model",
        ByteSize(*weights), ByteSize(*limit), ByteSize(*available)
    )]
    Weights {
        /// Bytes of weights, of a draft's too.
        weights: u64,
        /// Bytes that may be used.
        limit: u64,
        /// How much of what is free that is.
        fraction: f64,
        /// Bytes that are free.
        available: u64,
    },
    /// No room for what does not depend on the size of the KV pool.
    #[error(
        "weights ({}), scratch of passes ({}) and rows of requests with their logits ({}) exceed the \
         {} that a memory fraction of {fraction} of {} allows: raise it, read fewer prompt tokens a \
         round, or run fewer requests at a time",
        ByteSize(*weights), ByteSize(*scratch), ByteSize(*requests), ByteSize(*limit),
        ByteSize(*available)
    )]
    Fixed {
        /// Bytes of weights, and of texts to draft from.
        weights: u64,
        /// Bytes that grow with the rows of a pass.
        scratch: u64,
        /// Bytes that grow with the requests that run at a time.
        requests: u64,
        /// Bytes that may be used.
        limit: u64,
        /// How much of what is free that is.
        fraction: f64,
        /// Bytes that are free.
        available: u64,
    },
    /// A KV pool that is larger than what is left.
    #[error(
        "a KV pool of {tokens} tokens needs {}, but {} are left: {fitting} tokens fit",
        ByteSize(*needed), ByteSize(*left)
    )]
    Pool {
        /// Tokens that the pool was to hold.
        tokens: usize,
        /// Bytes that they need.
        needed: u64,
        /// Bytes that are left.
        left: u64,
        /// Tokens that fit.
        fitting: usize,
    },
    /// A KV pool without a page.
    #[error(
        "no page of {page_size} slots fits into the {} left for keys and values: raise the memory \
         fraction or the tokens of the KV pool",
        ByteSize(*left)
    )]
    NoPage {
        /// Slots of a page.
        page_size: usize,
        /// Bytes that are left.
        left: u64,
    },
}

/// One line of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BudgetLine {
    /// What the memory is for.
    pub what: String,
    /// How much.
    pub bytes: u64,
}

/// The table: what each part takes, and how many tokens fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Budget {
    /// The parts.
    pub lines: Vec<BudgetLine>,
    /// What may be used in all.
    pub limit: u64,
    /// Tokens that the KV pool holds.
    pub tokens: usize,
}

impl Budget {
    /// What the target needs, and the draft, if there is one: both have as many slots.
    ///
    /// Sizes the KV pool: `max_total_tokens` where given, else what `most_useful` tokens or the
    /// memory allow, in whole pages. What does not fit is refused.
    pub fn plan(
        needs: Needs,
        draft: Option<Needs>,
        available: u64,
        fraction: f64,
        max_total_tokens: Option<usize>,
        most_useful: usize,
        page_size: usize,
    ) -> Result<Self, BudgetError> {
        let limit = (available as f64 * fraction) as u64;
        let all = draft.map_or(needs, |draft| needs + draft);
        let Needs { weights, kv_per_token, .. } = all;
        if weights > limit {
            return Err(BudgetError::Weights { weights, limit, fraction, available });
        }
        let weights = weights + all.texts;
        let (scratch, requests) = (all.scratch + all.hidden, all.logits + all.rounds);
        let left = limit.checked_sub(weights + scratch + requests);
        let left = left.ok_or(BudgetError::Fixed {
            weights,
            scratch,
            requests,
            limit,
            fraction,
            available,
        })?;
        let fitting = (left / kv_per_token.max(1)) as usize;
        let wanted = max_total_tokens.unwrap_or(most_useful.min(fitting));
        let tokens = wanted / page_size * page_size;
        if tokens > fitting {
            let needed = tokens as u64 * kv_per_token;
            return Err(BudgetError::Pool { tokens, needed, left, fitting });
        }
        if tokens == 0 {
            return Err(BudgetError::NoPage { page_size, left });
        }
        let line = |what: &str, bytes| BudgetLine { what: what.into(), bytes };
        let kv = |needs: Needs| tokens as u64 * needs.kv_per_token;
        let mut lines = vec![
            line("weights", needs.weights),
            line("scratch", needs.scratch),
            line("logits", needs.logits),
            line("rows of requests", needs.rounds),
            line(&format!("KV ({tokens} tokens)"), kv(needs)),
        ];
        lines.retain(|line| line.bytes > 0);
        if let Some(draft) = draft {
            let mut of_draft = vec![
                line("weights of the draft", draft.weights),
                line("scratch of the draft", draft.scratch),
                line("logits of the draft", draft.logits),
                line("KV of the draft", kv(draft)),
                line("texts to draft from", draft.texts),
            ];
            of_draft.retain(|line| line.bytes > 0);
            lines.extend(of_draft);
            // There even where none are kept, as for drafts that take none.
            lines.push(line("hidden rows for drafts", draft.hidden));
        }
        Ok(Self { lines, limit, tokens })
    }

    /// What all parts take together.
    pub fn total(&self) -> u64 {
        self.lines.iter().map(|line| line.bytes).sum()
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.lines {
            writeln!(f, "{:<24} {:>12}", line.what, ByteSize(line.bytes).to_string())?;
        }
        write!(
            f,
            "{:<24} {:>12} of {}",
            "total",
            ByteSize(self.total()).to_string(),
            ByteSize(self.limit)
        )
    }
}

/// Memory that this process may still take: what the system has available, or what its control
/// group leaves if that is less.
pub fn available_memory() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    let system = kib.map_or(4 << 30, |kib| kib * 1024);
    let read = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let group = read("/sys/fs/cgroup/memory.max")
        .map(|max| max.saturating_sub(read("/sys/fs/cgroup/memory.current").unwrap_or(0)));
    group.map_or(system, |left| left.min(system))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDS: Needs = Needs {
        weights: 1000,
        scratch: 150,
        logits: 40,
        hidden: 0,
        rounds: 10,
        kv_per_token: 10,
        texts: 0,
    };

    #[test]
    fn the_pool_takes_what_is_useful_in_whole_pages() {
        let budget = Budget::plan(NEEDS, None, 10_000, 0.5, None, 99, 16).unwrap();
        assert_eq!(budget.tokens, 96);
        assert_eq!(budget.total(), 1000 + 200 + 960);
    }

    #[test]
    fn the_table_says_which_hidden_rows_a_draft_takes() {
        let of = |hidden| {
            let draft = Needs { weights: 100, hidden, kv_per_token: 1, ..Needs::default() };
            Budget::plan(NEEDS, Some(draft), 10_000, 0.5, None, 96, 16).unwrap()
        };
        let line = |bytes| BudgetLine { what: "hidden rows for drafts".into(), bytes };
        assert!(of(30).lines.contains(&line(30)) && of(0).lines.contains(&line(0)));
        assert_eq!(of(30).total(), 1000 + 200 + 960 + 100 + 30 + 96);
        let plain = Budget::plan(NEEDS, None, 10_000, 0.5, None, 96, 16).unwrap();
        assert!(!plain.lines.contains(&line(0)));
    }

    #[test]
    fn the_pool_takes_what_fits_if_that_is_less() {
        assert_eq!(Budget::plan(NEEDS, None, 4000, 0.5, None, 1_000_000, 1).unwrap().tokens, 80);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_what_would() {
        let refused = |result: Result<Budget, BudgetError>| result.unwrap_err();
        assert_eq!(
            refused(Budget::plan(NEEDS, None, 2000, 0.5, None, 9, 1)),
            BudgetError::Fixed {
                weights: 1000,
                scratch: 150,
                requests: 50,
                limit: 1000,
                fraction: 0.5,
                available: 2000
            }
        );
        assert_eq!(
            refused(Budget::plan(NEEDS, None, 1998, 0.5, None, 9, 1)),
            BudgetError::Weights { weights: 1000, limit: 999, fraction: 0.5, available: 1998 }
        );
        assert_eq!(
            refused(Budget::plan(NEEDS, None, 4000, 0.5, Some(81), 9, 1)),
            BudgetError::Pool { tokens: 81, needed: 810, left: 800, fitting: 80 }
        );
        assert_eq!(
            refused(Budget::plan(NEEDS, None, 4000, 0.5, None, 9, 64)),
            BudgetError::NoPage { page_size: 64, left: 800 }
        );
    }
}
