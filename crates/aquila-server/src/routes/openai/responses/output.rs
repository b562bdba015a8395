//! The items of a response's output, as they grow, and the events that tell of them.
//!
//! The invariant: the items are those that the events tell of, so that a streamed response and a
//! whole one are the same.

use aquila_text::Part;
use serde_json::{Value, json};

use crate::identifier::Identifiers;

/// An event: its type and what it says, but for the number.
pub(super) type Event = (&'static str, Value);

/// What is being written.
enum Open {
    Reasoning { id: String, text: String },
    Message { id: String, text: String, logprobs: Vec<Value> },
    Call { id: String, call_id: String, name: String, arguments: String },
}

/// The output of a response so far.
#[derive(Default)]
pub(super) struct Output {
    items: Vec<Value>,
    open: Option<Open>,
    /// Log-probabilities of tokens whose text is not out yet.
    logprobs: Vec<Value>,
}

impl Output {
    /// The items that are complete.
    pub fn items(&self) -> &[Value] {
        &self.items
    }

    /// Takes log-probabilities, which go out with the next text.
    pub fn add_logprobs(&mut self, logprobs: Vec<Value>) {
        self.logprobs.extend(logprobs);
    }

    /// Takes a part.
    pub fn push(&mut self, identifiers: &Identifiers, part: Part, events: &mut Vec<Event>) {
        match part {
            Part::Reasoning(delta) => {
                if !matches!(self.open, Some(Open::Reasoning { .. })) {
                    let id = identifiers.next("rs_");
                    self.open(Open::Reasoning { id, text: String::new() }, events);
                }
                let at = self.items.len();
                if let Some(Open::Reasoning { id, text }) = &mut self.open {
                    text.push_str(&delta);
                    let event = json!({
                        "item_id": id, "output_index": at, "content_index": 0, "delta": delta,
                    });
                    events.push(("response.reasoning.delta", event));
                }
            }
            Part::Text(delta) => {
                if !matches!(self.open, Some(Open::Message { .. })) {
                    let id = identifiers.next("msg_");
                    let message = Open::Message { id, text: String::new(), logprobs: Vec::new() };
                    self.open(message, events);
                }
                let at = self.items.len();
                let known = std::mem::take(&mut self.logprobs);
                if let Some(Open::Message { id, text, logprobs }) = &mut self.open {
                    text.push_str(&delta);
                    let event = json!({
                        "item_id": id, "output_index": at, "content_index": 0, "delta": delta,
                        "logprobs": known,
                    });
                    logprobs.extend(known);
                    events.push(("response.output_text.delta", event));
                }
            }
            Part::CallBegin { name, .. } => {
                let (id, call_id) = (identifiers.next("fc_"), identifiers.call());
                self.open(Open::Call { id, call_id, name, arguments: String::new() }, events);
            }
            Part::Arguments { piece, .. } => {
                let at = self.items.len();
                if let Some(Open::Call { id, arguments, .. }) = &mut self.open {
                    arguments.push_str(&piece);
                    let event = json!({ "item_id": id, "output_index": at, "delta": piece });
                    events.push(("response.function_call_arguments.delta", event));
                }
            }
            Part::CallEnd { .. } => self.close("completed", events),
            Part::CallBroken { .. } => self.close("incomplete", events),
        }
    }

    /// Ends the output; `status` is that of an item that is still open.
    pub fn finish(&mut self, identifiers: &Identifiers, status: &str, events: &mut Vec<Event>) {
        if self.items.is_empty() && self.open.is_none() {
            // An answer that is empty is a message all the same.
            let id = identifiers.next("msg_");
            self.open(Open::Message { id, text: String::new(), logprobs: Vec::new() }, events);
        }
        self.close(status, events);
    }

    fn open(&mut self, open: Open, events: &mut Vec<Event>) {
        self.close("completed", events);
        let at = self.items.len();
        let added = json!({ "output_index": at, "item": item(&open, "in_progress", false) });
        events.push(("response.output_item.added", added));
        let part = match &open {
            Open::Message { id, .. } => {
                let part = json!({
                    "type": "output_text", "text": "", "annotations": [], "logprobs": [],
                });
                Some((id, part))
            }
            Open::Reasoning { id, .. } => {
                Some((id, json!({ "type": "reasoning_text", "text": "" })))
            }
            Open::Call { .. } => None,
        };
        if let Some((id, part)) = part {
            let event = json!({
                "item_id": id, "output_index": at, "content_index": 0, "part": part,
            });
            events.push(("response.content_part.added", event));
        }
        self.open = Some(open);
    }

    fn close(&mut self, status: &str, events: &mut Vec<Event>) {
        let Some(mut open) = self.open.take() else { return };
        let at = self.items.len();
        let rest = std::mem::take(&mut self.logprobs);
        match &mut open {
            Open::Message { logprobs, .. } => logprobs.extend(rest),
            _ => self.logprobs = rest,
        }
        let item = item(&open, status, true);
        match &open {
            Open::Reasoning { id, text } => {
                let done = json!({
                    "item_id": id, "output_index": at, "content_index": 0, "text": text,
                });
                events.push(("response.reasoning.done", done));
                events.push(("response.content_part.done", part_done(id, at, &item)));
            }
            Open::Message { id, text, logprobs } => {
                let done = json!({
                    "item_id": id, "output_index": at, "content_index": 0, "text": text,
                    "logprobs": logprobs,
                });
                events.push(("response.output_text.done", done));
                events.push(("response.content_part.done", part_done(id, at, &item)));
            }
            Open::Call { id, name, arguments, .. } => {
                let done = json!({
                    "item_id": id, "output_index": at, "name": name, "arguments": arguments,
                });
                events.push(("response.function_call_arguments.done", done));
            }
        }
        let done = json!({ "output_index": at, "item": item });
        events.push(("response.output_item.done", done));
        self.items.push(item);
    }
}

fn part_done(id: &str, at: usize, item: &Value) -> Value {
    json!({
        "item_id": id, "output_index": at, "content_index": 0, "part": item["content"][0],
    })
}

/// An item as it is written; without its content while that is still to come.
fn item(open: &Open, status: &str, with_content: bool) -> Value {
    match open {
        Open::Reasoning { id, text } => {
            let content = json!({ "type": "reasoning_text", "text": text });
            json!({
                "type": "reasoning", "id": id, "status": status, "summary": [],
                "content": if with_content { json!([content]) } else { json!([]) },
            })
        }
        Open::Message { id, text, logprobs } => {
            let content = json!({
                "type": "output_text", "text": text, "annotations": [], "logprobs": logprobs,
            });
            json!({
                "type": "message", "id": id, "status": status, "role": "assistant",
                "content": if with_content { json!([content]) } else { json!([]) },
            })
        }
        Open::Call { id, call_id, name, arguments } => json!({
            "type": "function_call", "id": id, "call_id": call_id, "name": name,
            "arguments": arguments, "status": status,
        }),
    }
}
