//! Answers of `/v1/chat/completions` in chunks.

use aquila_text::{CheckedParams, Delta, Part};
use serde::Serialize;
use serde_json::Value;

use super::chat::logprobs;
use super::completion_object::CompletionHead;
use super::logprobs::ChatLogprobs;
use super::{UsageReport, finish_reason, matched_stop};
use crate::answer::StreamEvent;
use crate::chat::{AnswerFormat, AnswerParts};
use crate::draft_round::{DraftRound, RoundReporter};
use crate::state::{App, Shared};
use crate::stream::{EventWriter, ResponseFormat};
use crate::submit::RequestGuards;

/// A conversation's answers in chunks: for each a role, parts and a finish reason.
pub(super) struct Chunks {
    app: Shared,
    head: CompletionHead,
    params: CheckedParams,
    answers: Vec<Progress>,
    /// Of each answer, where draft trees are asked for.
    rounds: Vec<RoundReporter>,
    usage: UsageReport,
}

/// How far one answer is told.
struct Progress {
    begun: bool,
    parts: AnswerParts,
}

#[derive(Serialize)]
struct ChunkChoice {
    index: usize,
    delta: ChunkDelta,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Value::is_null")]
    matched_stop: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    draft_round: Option<DraftRound>,
}

#[derive(Serialize, Default)]
struct ChunkDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[ChunkCall; 1]>,
}

#[derive(Serialize)]
struct ChunkCall {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: ChunkFunction,
}

#[derive(Serialize)]
struct ChunkFunction {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

impl ChunkDelta {
    /// What a part says; none for the end of a call, which the next part or the end tells.
    fn of(app: &App, part: Part) -> Option<Self> {
        let call = |index, named: Option<(String, String)>, arguments| {
            let (id, name) = named.unzip();
            let r#type = id.is_some().then_some("function");
            let function = ChunkFunction { name, arguments };
            Self {
                tool_calls: Some([ChunkCall { index, id, r#type, function }]),
                ..Self::default()
            }
        };
        match part {
            Part::Text(text) => Some(Self { content: Some(text), ..Self::default() }),
            Part::Reasoning(text) => Some(Self {
                reasoning_content: Some(text.clone()),
                reasoning: Some(text),
                ..Self::default()
            }),
            Part::CallBegin { index, name } => {
                Some(call(index, Some((app.identifiers.call(), name)), String::new()))
            }
            Part::Arguments { index, piece } => Some(call(index, None, piece)),
            Part::CallEnd { .. } | Part::CallBroken { .. } => None,
        }
    }
}

impl ChunkChoice {
    fn new(index: usize, delta: ChunkDelta) -> Self {
        Self {
            index,
            delta,
            logprobs: None,
            finish_reason: None,
            matched_stop: Value::Null,
            draft_round: None,
        }
    }
}

impl Chunks {
    pub fn new(
        app: Shared,
        head: CompletionHead,
        params: CheckedParams,
        format: &AnswerFormat,
    ) -> Self {
        let progress = || Progress {
            begun: false,
            parts: AnswerParts::new(format, app.generator.tokenizer()),
        };
        let answers = params.n as usize;
        Self {
            answers: std::iter::repeat_with(progress).take(answers).collect(),
            rounds: RoundReporter::for_answers(&app, &params, answers),
            usage: UsageReport::default(),
            app,
            head,
            params,
        }
    }

    fn chunk(&self, choice: ChunkChoice, out: &mut EventWriter) {
        out.event(&self.head.chunk(&self.app, &[choice]));
    }

    /// Parts as chunks, the first with what is known of the tokens.
    fn parts(&self, index: usize, parts: Vec<Part>, mut known: Known, out: &mut EventWriter) {
        for delta in parts.into_iter().filter_map(|part| ChunkDelta::of(&self.app, part)) {
            self.chunk(known.take().with(index, delta), out);
        }
        if !known.is_empty() {
            let nothing = ChunkDelta { content: Some(String::new()), ..ChunkDelta::default() };
            self.chunk(known.with(index, nothing), out);
        }
    }

    fn delta(&mut self, index: usize, delta: &Delta, out: &mut EventWriter) {
        let parts = self.answers[index].parts.tokens(&delta.tokens, &delta.text);
        let logprobs = logprobs(self.app.generator.tokenizer(), &self.params, &delta.tokens);
        let known = Known {
            logprobs: logprobs.filter(|logprobs| !logprobs.is_empty()),
            draft_round: self.rounds.get_mut(index).map(|rounds| rounds.report(delta)),
        };
        self.parts(index, parts, known, out);
    }
}

/// What is known of the tokens of a piece, beside its text.
#[derive(Default)]
struct Known {
    logprobs: Option<ChatLogprobs>,
    draft_round: Option<DraftRound>,
}

impl Known {
    fn is_empty(&self) -> bool {
        self.logprobs.is_none() && self.draft_round.is_none()
    }

    fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    fn with(self, index: usize, delta: ChunkDelta) -> ChunkChoice {
        let Self { logprobs, draft_round } = self;
        ChunkChoice { logprobs, draft_round, ..ChunkChoice::new(index, delta) }
    }
}

impl ResponseFormat for Chunks {
    fn write(
        &mut self,
        index: usize,
        event: StreamEvent,
        _: &RequestGuards,
        out: &mut EventWriter,
    ) {
        if !std::mem::replace(&mut self.answers[index].begun, true) {
            let role = Some("assistant");
            let role = ChunkDelta { role, content: Some(String::new()), ..ChunkDelta::default() };
            self.chunk(ChunkChoice::new(index, role), out);
        }
        match event {
            StreamEvent::Prompt(_) => (),
            StreamEvent::Delta(delta) => self.delta(index, &delta, out),
            StreamEvent::End(end) => {
                let parts = self.answers[index].parts.finish(&end.text);
                self.parts(index, parts, Known::default(), out);
                let answer = &self.answers[index].parts;
                let calls = answer.calls_tools(&end.reason);
                let reasoning = answer.reasoning_tokens();
                let reason = if calls { "tool_calls" } else { finish_reason(&end.reason) };
                let last = ChunkChoice {
                    finish_reason: Some(reason),
                    matched_stop: matched_stop(&end.reason, end.stop.as_ref()),
                    ..ChunkChoice::new(index, ChunkDelta::default())
                };
                self.chunk(last, out);
                self.usage.add(&end.usage, index == 0);
                self.usage.completion_tokens_details.reasoning_tokens += reasoning;
            }
        }
    }

    fn close(&mut self, out: &mut EventWriter) {
        if let Some(last) = self.head.last_chunk(&self.app, self.answers.len(), &self.usage) {
            out.event(&last);
        }
    }
}
