//! Where listeners hear tokens: on the scheduler's thread, or on one thread for all requests.
//!
//! The scheduler settles a round as if every listener went on, hands its tokens over and reads what
//! listeners said before it settles the next one. A listener that ended its request makes that next
//! round void: its tokens are neither heard nor counted. So texts and counts are the same on both.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

use aquila_compute::round::VerifiedTree;

use crate::error::panic_text;
use crate::listener::{
    FinishReason, Listener, Outcome, StopCause, Token, TokenRows, Usage, Verdict,
};
use crate::request::RequestId;
use crate::stats::Stats;

/// Hands tokens to listeners.
pub(crate) struct OutputProcessor {
    place: Place,
    /// Whether a round was handed over whose replies were not read.
    awaits: bool,
}

enum Place {
    Inline { processor: Processor, replies: Vec<Reply> },
    OnThread(OnThread),
}

/// A thread on which listeners hear.
struct OnThread {
    messages: Option<Sender<Message>>,
    /// Those of a round, then nothing.
    replies: Receiver<Option<Reply>>,
    thread: Option<JoinHandle<()>>,
}

/// What a listener is told.
enum Message {
    /// Answers are counted there from now on.
    CountIn(Arc<Stats>),
    /// A request begins.
    Open(RequestId, Box<dyn Listener>),
    /// The prompt's tokens.
    Prompt(RequestId, Vec<Token>),
    /// The tree that the tokens after it come from.
    Tree(RequestId, Box<VerifiedTree>),
    /// Tokens of an answer that goes on.
    Tokens(RequestId, Vec<Token>),
    /// The last tokens of an answer.
    Last(RequestId, Box<Last>),
    /// A request ended with no more tokens.
    End(RequestId, Outcome),
    /// All requests that are left end for this reason.
    EndAll(String),
    /// All of a round was handed over.
    RoundEnds,
}

/// The last tokens of an answer.
pub(crate) struct Last {
    pub tokens: Vec<Token>,
    /// With all of the tokens counted.
    pub outcome: Outcome,
    /// Drafts of the round that were verified and that were counted as right, if it was one.
    pub drafts: Option<(usize, usize)>,
}

/// A listener that ended its request.
pub(crate) struct Reply {
    pub request: RequestId,
    /// Never to go on.
    pub verdict: Verdict,
}

impl OutputProcessor {
    /// On the caller's thread.
    pub fn inline(stats: Arc<Stats>) -> Self {
        let processor = Processor { listeners: HashMap::new(), stats };
        Self { place: Place::Inline { processor, replies: Vec::new() }, awaits: false }
    }

    /// Puts listeners on a thread of their own, if they are not there yet.
    pub fn on_a_thread(self) -> std::io::Result<Self> {
        let Place::Inline { mut processor, .. } = self.place else { return Ok(self) };
        let (messages, inbox) = mpsc::channel();
        let (outbox, replies) = mpsc::channel();
        let work = move || {
            for message in inbox {
                let ends = matches!(message, Message::RoundEnds);
                let reply = processor.deliver(message);
                // A scheduler that is gone reads no replies; its listeners hear the rest.
                if ends || reply.is_some() {
                    let _ = outbox.send(reply);
                }
            }
        };
        let thread = std::thread::Builder::new().name("aquila-output".into()).spawn(work)?;
        let thread_end = OnThread { messages: Some(messages), replies, thread: Some(thread) };
        Ok(Self { place: Place::OnThread(thread_end), awaits: false })
    }

    fn tell(&mut self, message: Message) {
        match &mut self.place {
            Place::Inline { processor, replies } => replies.extend(processor.deliver(message)),
            Place::OnThread(OnThread { messages, .. }) => {
                if let Some(messages) = messages {
                    // The thread catches the panics of listeners, so it is there.
                    let _ = messages.send(message);
                }
            }
        }
    }

    /// Counts answers there from now on.
    pub fn count_in(&mut self, stats: Arc<Stats>) {
        self.tell(Message::CountIn(stats));
    }

    /// A request begins.
    pub fn open(&mut self, request: RequestId, listener: Box<dyn Listener>) {
        self.tell(Message::Open(request, listener));
    }

    /// Hands out the prompt's tokens.
    pub fn prompt(&mut self, request: RequestId, tokens: Vec<Token>) {
        self.tell(Message::Prompt(request, tokens));
    }

    /// Hands out the tree that the tokens after it come from.
    pub fn tree(&mut self, request: RequestId, tree: Box<VerifiedTree>) {
        self.tell(Message::Tree(request, tree));
    }

    /// Hands out tokens of an answer that goes on.
    pub fn tokens(&mut self, request: RequestId, tokens: Vec<Token>) {
        self.tell(Message::Tokens(request, tokens));
    }

    /// Hands out the last tokens of an answer.
    pub fn last(&mut self, request: RequestId, last: Last) {
        self.tell(Message::Last(request, Box::new(last)));
    }

    /// A request ended with no more tokens.
    pub fn end(&mut self, request: RequestId, outcome: Outcome) {
        self.tell(Message::End(request, outcome));
    }

    /// All requests that are left end for a reason.
    pub fn end_all(&mut self, why: String) {
        self.tell(Message::EndAll(why));
    }

    /// All of a round was handed over; answers the listeners that are known to have ended their
    /// requests already.
    pub fn round_ends(&mut self) -> Vec<Reply> {
        match &mut self.place {
            Place::Inline { replies, .. } => std::mem::take(replies),
            Place::OnThread(_) => {
                self.tell(Message::RoundEnds);
                self.awaits = true;
                Vec::new()
            }
        }
    }

    /// Waits until the listeners have heard the last round; answers those that ended their
    /// requests.
    pub fn replies(&mut self) -> Vec<Reply> {
        let awaits = std::mem::take(&mut self.awaits);
        match &mut self.place {
            Place::OnThread(thread_end) if awaits => {
                thread_end.replies.iter().map_while(|r| r).collect()
            }
            _ => Vec::new(),
        }
    }
}

impl Drop for OnThread {
    fn drop(&mut self) {
        self.messages = None;
        if let Some(thread) = self.thread.take() {
            // The thread catches the panics of listeners, and has no others to report.
            let _ = thread.join();
        }
    }
}

/// The listeners of all requests.
struct Processor {
    listeners: HashMap<RequestId, Box<dyn Listener>>,
    stats: Arc<Stats>,
}

impl Processor {
    /// Tells a listener; answers if it ends its request.
    fn deliver(&mut self, message: Message) -> Option<Reply> {
        let (request, verdict) = match message {
            Message::CountIn(stats) => {
                self.stats = stats;
                return None;
            }
            Message::Open(request, listener) => {
                self.listeners.insert(request, listener);
                return None;
            }
            Message::Prompt(request, tokens) => {
                let listener = self.listeners.get_mut(&request)?;
                let heard = catch_unwind(AssertUnwindSafe(|| listener.prompt(tokens)));
                (request, heard.err().map(|panic| Verdict::Abort(panic_text(&panic))))
            }
            Message::Tree(request, tree) => {
                let listener = self.listeners.get_mut(&request)?;
                let heard = catch_unwind(AssertUnwindSafe(|| listener.tree(tree)));
                (request, heard.err().map(|panic| Verdict::Abort(panic_text(&panic))))
            }
            Message::Tokens(request, tokens) => {
                let verdict = self.tokens(request, &tokens)?;
                (request, (verdict != Verdict::Continue).then_some(verdict))
            }
            Message::Last(request, last) => {
                self.last(request, *last);
                return None;
            }
            Message::End(request, outcome) => {
                self.end(request, outcome);
                return None;
            }
            Message::EndAll(why) => {
                let left: Vec<RequestId> = self.listeners.keys().copied().collect();
                for request in left {
                    let reason = FinishReason::Abort(why.clone());
                    let (usage, rows) = (Usage::default(), TokenRows::default());
                    self.end(request, Outcome { reason, usage, rows });
                }
                return None;
            }
            Message::RoundEnds => return None,
        };
        verdict.map(|verdict| Reply { request, verdict })
    }

    fn tokens(&mut self, request: RequestId, tokens: &[Token]) -> Option<Verdict> {
        let listener = self.listeners.get_mut(&request)?;
        let verdict = catch_unwind(AssertUnwindSafe(|| listener.tokens(tokens)))
            .unwrap_or_else(|panic| Verdict::Abort(panic_text(&panic)));
        let kept = kept(&verdict, tokens.len());
        self.stats.completion_tokens.fetch_add(kept as u64, Relaxed);
        Some(verdict)
    }

    fn last(&mut self, request: RequestId, last: Last) {
        let Last { tokens, mut outcome, drafts } = last;
        let Some(verdict) = self.tokens(request, &tokens) else { return };
        let dropped = tokens.len() - kept(&verdict, tokens.len());
        take_back(&mut outcome.usage, dropped, tokens.len(), drafts);
        if let Some(ended) = reason_of(verdict) {
            outcome.reason = ended;
        }
        self.end(request, outcome);
    }

    fn end(&mut self, request: RequestId, mut outcome: Outcome) {
        let Usage { prompt_tokens, completion_tokens, .. } = outcome.usage;
        outcome.rows.cut(prompt_tokens, completion_tokens);
        let Some(listener) = self.listeners.remove(&request) else { return };
        self.stats.finished.fetch_add(1, Relaxed);
        self.stats.add_speculation(&outcome.usage.spec);
        if catch_unwind(AssertUnwindSafe(|| listener.finished(outcome))).is_err() {
            tracing::error!(id = %request, "a listener panicked at the end of its request");
        }
    }
}

/// How many of so many tokens belong to the answer.
pub(crate) fn kept(verdict: &Verdict, tokens: usize) -> usize {
    match verdict {
        Verdict::Stop { kept } => (*kept).min(tokens),
        Verdict::Continue | Verdict::Abort(_) => tokens,
    }
}

/// Why a request ends by a verdict, if it does.
pub(crate) fn reason_of(verdict: Verdict) -> Option<FinishReason> {
    match verdict {
        Verdict::Continue => None,
        Verdict::Stop { .. } => Some(FinishReason::Stop(StopCause::Listener)),
        Verdict::Abort(why) => Some(FinishReason::Abort(why)),
    }
}

/// Takes `dropped` of the `tokens` that a round yielded out of a request's usage; `drafts` are
/// those of the round that were verified and that were counted as right.
pub(crate) fn take_back(
    usage: &mut Usage,
    dropped: usize,
    tokens: usize,
    drafts: Option<(usize, usize)>,
) {
    usage.completion_tokens -= dropped;
    if let Some((proposed, correct)) = drafts.filter(|_| dropped > 0) {
        usage.spec.take_back(proposed, correct);
        usage.spec.round(proposed, correct.min(tokens - dropped));
    }
}
