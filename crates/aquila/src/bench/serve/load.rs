//! The load itself: requests sent at their times, whatever became of the ones before.
//!
//! The one invariant: an arrival waits for no answer, unless the number of requests at once is
//! bounded; then it waits here, and its latency begins when it is sent.

use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::answer::{Answer, ask};
use super::api::{Backend, RequestSettings};
use super::client::Client;
use super::prompts::Prompt;

/// What to send, and how.
pub struct Load {
    /// The server.
    pub client: Client,
    /// The API to speak.
    pub backend: Backend,
    /// What all requests say.
    pub settings: RequestSettings,
    /// The prompts, which are sent in turn, from the first on again after the last.
    pub prompts: Vec<Prompt>,
    /// The most tokens of an answer whose prompt does not say.
    pub output_len: usize,
    /// After how long a request is given up.
    pub timeout: Option<Duration>,
}

/// What became of one request.
#[derive(Debug)]
pub struct Record {
    /// Its place among the arrivals.
    pub index: usize,
    /// What kind of prompt it had.
    pub category: Option<String>,
    /// When it was to be sent, since the start.
    pub due: Duration,
    /// When it was sent, since the start.
    pub sent: Duration,
    /// When it ended, since the start.
    pub ended: Duration,
    /// The answer, or why there is none.
    pub outcome: Result<Answer, String>,
}

/// What became of all of them.
#[derive(Debug)]
pub struct Measured {
    /// Those that ended, in the order of their arrival.
    pub records: Vec<Record>,
    /// From the start to the end of the last.
    pub duration: Duration,
    /// How many were to be sent, if that was interrupted.
    pub interrupted: Option<Interrupted>,
}

/// What an interruption left.
#[derive(Debug, Clone, Copy)]
pub struct Interrupted {
    /// Requests that were given up while they ran or waited for their turn.
    pub given_up: usize,
    /// Requests that had not arrived.
    pub not_sent: usize,
}

impl Load {
    /// Sends one request and reads its answer.
    pub async fn one(&self, index: usize) -> Result<Answer, String> {
        let prompt = &self.prompts[index % self.prompts.len()];
        let tokens = prompt.output_len.unwrap_or(self.output_len);
        let body = self.backend.body(&prompt.text, tokens, &self.settings);
        let answer = ask(&self.client, self.backend, body);
        match self.timeout {
            None => answer.await,
            Some(limit) => tokio::time::timeout(limit, answer)
                .await
                .unwrap_or_else(|_| Err(format!("no end within {} s", limit.as_secs_f64()))),
        }
    }

    /// Sends a request at each of these times, at most so many at once, until all have ended or
    /// Ctrl-C is pressed.
    pub async fn run(
        self: &Arc<Self>,
        arrivals: &[Duration],
        most_at_once: Option<usize>,
        bar: &ProgressBar,
    ) -> Measured {
        let turns = most_at_once.map(|most| Arc::new(Semaphore::new(most)));
        let mut running: JoinSet<Record> = JoinSet::new();
        let mut records = Vec::with_capacity(arrivals.len());
        let mut left = arrivals.iter().enumerate().peekable();
        let mut ctrl_c = std::pin::pin!(tokio::signal::ctrl_c());
        let start = Instant::now();
        let mut interrupted = None;
        loop {
            let next = left.peek().map(|&(_, &due)| start + due);
            if next.is_none() && running.is_empty() {
                break;
            }
            let arrival = async {
                match next {
                    Some(at) if at > Instant::now() => tokio::time::sleep_until(at.into()).await,
                    Some(_) => (),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // Arrivals come before what has ended: counting must not delay sending.
                biased;
                () = arrival => {
                    let Some((index, &due)) = left.next() else { continue };
                    let (load, turns) = (self.clone(), turns.clone());
                    running.spawn(load.arrive(index, due, start, turns));
                }
                Some(ended) = running.join_next() => match ended {
                    Ok(record) => {
                        records.push(record);
                        bar.inc(1);
                    }
                    Err(error) => std::panic::resume_unwind(error.into_panic()),
                },
                _ = &mut ctrl_c => {
                    interrupted = Some(Interrupted {
                        given_up: running.len(),
                        not_sent: left.len(),
                    });
                    break;
                }
            }
        }
        let last = records.iter().map(|record| record.ended).max().unwrap_or_default();
        let duration = if interrupted.is_some() { start.elapsed() } else { last };
        records.sort_by_key(|record| record.index);
        Measured { records, duration, interrupted }
    }

    async fn arrive(
        self: Arc<Self>,
        index: usize,
        due: Duration,
        start: Instant,
        turns: Option<Arc<Semaphore>>,
    ) -> Record {
        let _turn = match &turns {
            Some(turns) => Some(turns.acquire().await.expect("turns are never closed")),
            None => None,
        };
        let sent = start.elapsed();
        let outcome = self.one(index).await;
        let category = self.prompts[index % self.prompts.len()].category.clone();
        Record { index, category, due, sent, ended: start.elapsed(), outcome }
    }
}
