//! A way of decoding that is compared, and how its passes are timed.

use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use aquila_engine::Times;
use aquila_spec::SpecStats;
use aquila_text::{AnswerSink, CheckedParams, Delta, End, Generator};

use crate::error::{Error, Result};

/// A way of decoding, and what its passes gave.
pub(super) struct Contender {
    pub name: String,
    pub generator: Generator,
    pub params: CheckedParams,
    /// Whether acceptance is simulated, and answers mean nothing.
    pub pretends: bool,
    pub passes: Vec<Pass>,
}

/// One pass over the prompts.
#[derive(Default)]
pub(super) struct Pass {
    tokens: usize,
    time: Duration,
    pub times: Times,
    pub spec: SpecStats,
    pub answers: Vec<Vec<u32>>,
}

impl Pass {
    pub fn speed(&self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

impl Contender {
    /// Answers one batch and adds what it took to `pass`.
    pub fn answer(&self, prompts: &[Vec<u32>], pass: &mut Pass) -> Result<()> {
        let engine = self.generator.engine();
        let before = engine.stats().times();
        let (done, ended) = channel();
        for (index, prompt) in prompts.iter().enumerate() {
            self.generator.submit(prompt.clone(), &self.params, None, |_| {
                Box::new(Stopwatch { index, heard: Vec::new(), done: done.clone() })
            })?;
        }
        drop(done);
        let mut all: Vec<(usize, Heard, End)> = ended.iter().collect();
        all.sort_by_key(|(index, ..)| *index);
        for (_, _, end) in &all {
            if let Some(why) = end.reason.failure() {
                Error::check(engine)?;
                return Err(Error::Other(format!("{}: {why}", self.name)));
            }
            pass.spec.add(&end.usage.spec);
        }
        let read = all.iter().filter_map(|(_, heard, _)| Some(heard.first()?.0)).max();
        let end = all.iter().filter_map(|(_, heard, _)| Some(heard.last()?.0)).max();
        let (Some(read), Some(end)) = (read, end) else {
            return Err(Error::Other("there are no tokens to time: raise --max-tokens".into()));
        };
        let heard = all.iter().flat_map(|(_, heard, _)| heard);
        pass.tokens += heard.filter(|(at, _)| *at > read).count();
        pass.time += end - read;
        let ids = |heard: &Heard| heard.iter().map(|(_, id)| *id).collect();
        pass.answers.extend(all.iter().map(|(_, heard, _)| ids(heard)));
        // The next pass is to find no more than this one did; and once this is answered, the last
        // round has been counted.
        engine.flush_cache();
        pass.times.add(&engine.stats().times().since(&before));
        Ok(())
    }
}

/// When each token came.
type Heard = Vec<(Instant, u32)>;

/// Notes when the tokens of one answer came.
struct Stopwatch {
    index: usize,
    heard: Heard,
    done: Sender<(usize, Heard, End)>,
}

impl AnswerSink for Stopwatch {
    fn delta(&mut self, delta: Delta) -> bool {
        let now = Instant::now();
        self.heard.extend(delta.tokens.iter().map(|token| (now, token.id)));
        true
    }

    fn end(self: Box<Self>, end: End) {
        // If the command gave up, there is nobody to tell.
        let _ = self.done.send((self.index, self.heard, end));
    }
}
