//! The blocks of an answer as they grow, and the events that tell of them.
//!
//! The invariant: the blocks are those that the events tell of, so that a streamed answer and a
//! whole one are the same.

use aquila_text::Part;
use serde_json::{Value, json};

use crate::chat::as_object;
use crate::identifier::Identifiers;

/// An event, whose type is its name.
pub(super) type Event = (&'static str, Value);

enum Open {
    Thinking(String),
    Text(String),
    Call { id: String, name: String, input: String },
}

/// The blocks so far.
#[derive(Default)]
pub(super) struct Blocks {
    blocks: Vec<Value>,
    open: Option<Open>,
}

impl Blocks {
    /// The blocks that are complete.
    pub fn into_blocks(self) -> Vec<Value> {
        self.blocks
    }

    /// Takes a part.
    pub fn push(&mut self, identifiers: &Identifiers, part: Part, events: &mut Vec<Event>) {
        match part {
            Part::Reasoning(piece) => {
                if !matches!(self.open, Some(Open::Thinking(_))) {
                    self.open(Open::Thinking(String::new()), events);
                }
                let at = self.blocks.len();
                if let Some(Open::Thinking(text)) = &mut self.open {
                    text.push_str(&piece);
                    let delta = json!({ "type": "thinking_delta", "thinking": piece });
                    events.push(block_delta(at, delta));
                }
            }
            Part::Text(piece) => {
                if !matches!(self.open, Some(Open::Text(_))) {
                    self.open(Open::Text(String::new()), events);
                }
                let at = self.blocks.len();
                if let Some(Open::Text(text)) = &mut self.open {
                    text.push_str(&piece);
                    events.push(block_delta(at, json!({ "type": "text_delta", "text": piece })));
                }
            }
            Part::CallBegin { name, .. } => {
                let id = identifiers.next("toolu_");
                self.open(Open::Call { id, name, input: String::new() }, events);
            }
            Part::Arguments { piece, .. } => {
                let at = self.blocks.len();
                if let Some(Open::Call { input, .. }) = &mut self.open {
                    input.push_str(&piece);
                    let delta = json!({ "type": "input_json_delta", "partial_json": piece });
                    events.push(block_delta(at, delta));
                }
            }
            Part::CallEnd { .. } | Part::CallBroken { .. } => self.close(events),
        }
    }

    /// Ends the answer; an empty one is a text all the same.
    pub fn finish(&mut self, events: &mut Vec<Event>) {
        if self.blocks.is_empty() && self.open.is_none() {
            self.open(Open::Text(String::new()), events);
        }
        self.close(events);
    }

    fn open(&mut self, open: Open, events: &mut Vec<Event>) {
        self.close(events);
        let block = block(&open);
        let event = json!({
            "type": "content_block_start", "index": self.blocks.len(), "content_block": block,
        });
        events.push(("content_block_start", event));
        self.open = Some(open);
    }

    fn close(&mut self, events: &mut Vec<Event>) {
        let Some(open) = self.open.take() else { return };
        let at = self.blocks.len();
        if matches!(open, Open::Thinking(_)) {
            // Clients expect one; nothing here is signed.
            let delta = json!({ "type": "signature_delta", "signature": "" });
            events.push(block_delta(at, delta));
        }
        self.blocks.push(block(&open));
        let event = json!({ "type": "content_block_stop", "index": at });
        events.push(("content_block_stop", event));
    }
}

fn block_delta(at: usize, delta: Value) -> Event {
    let event = json!({ "type": "content_block_delta", "index": at, "delta": delta });
    ("content_block_delta", event)
}

fn block(open: &Open) -> Value {
    match open {
        Open::Thinking(text) => json!({ "type": "thinking", "thinking": text, "signature": "" }),
        Open::Text(text) => json!({ "type": "text", "text": text, "citations": null }),
        Open::Call { id, name, input } => {
            let input = as_object(input.as_str().into());
            json!({
                "type": "tool_use", "id": id, "name": name, "input": input,
                "caller": { "type": "direct" },
            })
        }
    }
}
