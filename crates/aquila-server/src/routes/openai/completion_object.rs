//! What stands around the choices of both kinds of completions, in whole answers and in chunks.

use aquila_spec::SpecStats;
use aquila_text::spec_fields;
use serde::Serialize;
use serde_json::{Value, json};

use super::UsageReport;
use crate::state::{App, unix_time};

/// What identifies this build to clients that compare seeded answers.
const FINGERPRINT: &str = concat!("aquila-", env!("CARGO_PKG_VERSION"));

/// What all chunks of an answer begin with.
pub(super) struct CompletionHead {
    pub id: String,
    object: &'static str,
    created: u64,
    reported: Reported,
}

/// What a request asks to be told beside the choices.
#[derive(Clone, Copy)]
pub(super) struct Reported {
    /// Whether a stream ends with what the request took.
    pub usage: bool,
    /// Whether answers come with what speculation did, as in SGLang.
    pub spec_details: bool,
}

/// A completion, or a chunk of one, with choices of type `C`.
#[derive(Serialize)]
pub(super) struct CompletionObject<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'static str,
    choices: &'a [C],
    /// In chunks, null until the last; left out where it was not asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageReport>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sglext: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<Value>,
}

impl CompletionHead {
    /// Of the answer called `id`, as an `object` of OpenAI's.
    pub fn new(id: String, object: &'static str, reported: Reported) -> Self {
        Self { id, object, created: unix_time(), reported }
    }

    /// A chunk that is not the last.
    pub fn chunk<'a, C>(&'a self, app: &'a App, choices: &'a [C]) -> CompletionObject<'a, C> {
        CompletionObject {
            id: &self.id,
            object: self.object,
            created: self.created,
            model: &app.settings.model.served_name,
            system_fingerprint: FINGERPRINT,
            choices,
            usage: self.reported.usage.then_some(None),
            sglext: None,
            metrics: None,
        }
    }

    /// All answers at once, a choice for each.
    pub fn whole<'a, C>(
        &'a self,
        app: &'a App,
        choices: &'a [C],
        usage: UsageReport,
    ) -> CompletionObject<'a, C> {
        CompletionObject {
            sglext: sglext(self.reported.spec_details, &usage.spec),
            metrics: metrics(app, choices.len(), &usage.spec),
            usage: Some(Some(usage)),
            ..self.chunk(app, choices)
        }
    }

    /// The chunk after the last choice of `answers` answers, where what it says was asked for.
    pub fn last_chunk<'a>(
        &'a self,
        app: &'a App,
        answers: usize,
        usage: &UsageReport,
    ) -> Option<CompletionObject<'a, ()>> {
        let sglext = sglext(self.reported.spec_details, &usage.spec);
        (self.reported.usage || sglext.is_some()).then(|| CompletionObject {
            usage: self.reported.usage.then(|| Some(usage.clone())),
            sglext,
            metrics: metrics(app, answers, &usage.spec),
            ..self.chunk(app, &[])
        })
    }
}

/// What speculation did, as SGLang's `sglext` has it.
fn sglext(wanted: bool, spec: &SpecStats) -> Option<Value> {
    let details = spec_fields(spec).filter(|_| wanted)?;
    Some(json!({ "spec_tokens_details": details }))
}

/// What speculation did, as vLLM's `metrics` have it: for requests with a single answer.
pub(super) fn metrics(app: &App, answers: usize, spec: &SpecStats) -> Option<Value> {
    if answers != 1 || spec.verify_ct == 0 {
        return None;
    }
    let most = app.generator.engine().config().shape.steps();
    let mut histogram = spec.histogram.clone();
    histogram.resize(histogram.len().max(most + 1), 0);
    Some(json!({ "speculative_decoding": {
        "mean_acceptance_length": spec.accept_length(),
        "draft_acceptance_rate": spec.accept_rate(),
        "num_spec_steps": spec.verify_ct,
        "num_accepted_draft_tokens": spec.correct_drafts,
        "num_draft_tokens": spec.proposed_drafts,
        "num_spec_tokens": histogram.len() - 1,
        "acceptance_histogram": histogram,
    } }))
}
