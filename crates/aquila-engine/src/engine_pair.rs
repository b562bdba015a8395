//! Two engines in one process: one processes prompts, the other decodes answers.
//!
//! There is no network between them, so what a request gets differs from one engine in nothing but
//! that its rows and its draft's state have moved. For tests, and for checks of algorithms.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::SubmitError;
use crate::request::{Request, RequestId};
use crate::scheduler::Scheduler;
use crate::transfer::{Claim, Delivery, HandOver, KvRows, Prefilled, Source, Transfer};

/// What one engine has for the other, by the number of the request within the pair.
enum Message {
    Claim(usize, Claim),
    Deliver(usize, Delivery),
    /// The engine that decodes wants nothing more of it.
    Cancel(usize),
}

type Messages = Arc<Mutex<VecDeque<Message>>>;

fn lock(messages: &Messages) -> MutexGuard<'_, VecDeque<Message>> {
    messages.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Both ends of a request.
struct End {
    number: usize,
    messages: Messages,
}

impl End {
    fn send(&self, delivery: Delivery) {
        lock(&self.messages).push_back(Message::Deliver(self.number, delivery));
    }
}

impl HandOver for End {
    fn rows(&self, rows: KvRows) {
        self.send(Delivery::Rows(rows));
    }

    fn prefilled(&self, prefilled: Prefilled) {
        self.send(Delivery::Prefilled(Box::new(prefilled)));
    }

    fn failed(&self, why: &str) {
        self.send(Delivery::Failed(why.into()));
    }
}

/// The end that brings rows; dropped, it wants nothing more.
struct SourceEnd(End);

impl Source for SourceEnd {
    fn begin(&mut self, _: RequestId, claim: Claim) {
        lock(&self.0.messages).push_back(Message::Claim(self.0.number, claim));
    }
}

impl Drop for SourceEnd {
    fn drop(&mut self) {
        lock(&self.0.messages).push_back(Message::Cancel(self.0.number));
    }
}

/// What is made of a delivery on its way.
pub type Alter = Box<dyn FnMut(usize, Delivery) -> Vec<Delivery> + Send>;

/// Two engines, the requests of which are handed from the first to the second.
pub struct EnginePair {
    /// The one that processes prompts.
    pub prefill: Scheduler,
    /// The one that decodes answers.
    pub decode: Scheduler,
    messages: Messages,
    /// The names of each request in both engines.
    names: HashMap<usize, (RequestId, RequestId)>,
    submitted: usize,
    alter: Option<Alter>,
}

impl EnginePair {
    /// Of these engines.
    pub fn new(prefill: Scheduler, decode: Scheduler) -> Self {
        let (messages, names) = (Messages::default(), HashMap::new());
        Self { prefill, decode, messages, names, submitted: 0, alter: None }
    }

    /// Has `alter` change what goes from the one to the other.
    pub fn altered(mut self, alter: Alter) -> Self {
        self.alter = Some(alter);
        self
    }

    /// Submits a request to both: `prompt` to the engine that processes its prompt, `answer`, the
    /// same with a listener of its own, to the one that decodes it. Answers their names.
    pub fn submit(
        &mut self,
        mut prompt: Request,
        mut answer: Request,
    ) -> Result<(RequestId, RequestId), SubmitError> {
        let number = self.submitted;
        let end = || End { number, messages: self.messages.clone() };
        prompt.transfer = Transfer::HandOver(Arc::new(end()));
        answer.transfer = Transfer::Receive(Box::new(SourceEnd(end())));
        let first = self.prefill.submit(prompt)?;
        let second = self.decode.submit(answer).inspect_err(|_| {
            self.prefill.abort(first);
        })?;
        let names = (first, second);
        self.names.insert(number, names);
        self.submitted += 1;
        Ok(names)
    }

    /// Whether nothing is left to do.
    pub fn is_idle(&self) -> bool {
        self.prefill.is_idle() && self.decode.is_idle() && lock(&self.messages).is_empty()
    }

    /// A step of each engine, and what they have for each other.
    pub fn step(&mut self) {
        self.exchange();
        self.prefill.step();
        self.exchange();
        self.decode.step();
    }

    fn exchange(&mut self) {
        loop {
            // What is delivered may have an engine send a message.
            let next = lock(&self.messages).pop_front();
            let Some(message) = next else { return };
            match message {
                Message::Claim(number, claim) => {
                    let (prompt, answer) = self.names[&number];
                    if !self.prefill.claim(prompt, claim) {
                        let gone = Delivery::Failed("it is gone".into());
                        self.decode.deliver(answer, gone);
                    }
                }
                Message::Cancel(number) => {
                    self.prefill.abort(self.names[&number].0);
                }
                Message::Deliver(number, delivery) => {
                    let deliveries = match &mut self.alter {
                        Some(alter) => alter(number, delivery),
                        None => vec![delivery],
                    };
                    for delivery in deliveries {
                        self.decode.deliver(self.names[&number].1, delivery);
                    }
                }
            }
        }
    }
}
