//! What requests of all APIs for text may set, beside what they are about.

use aquila_engine::Speculation;
use aquila_text::{CheckedParams, SamplingParams};

use crate::constraint::Constraint;
use crate::disaggregation::Bootstrap;
use crate::refusal::Refusal;
use crate::state::App;

/// How an answer is to be made.
#[derive(Debug, Default)]
pub(crate) struct GenerationSettings {
    pub model: Option<String>,
    pub stream: bool,
    pub show_special_tokens: bool,
    pub speculation: Speculation,
    /// Whether a stream comes with the tree of each round.
    pub draft_trees: bool,
    pub priority: Option<i64>,
    /// The name by which the client may abort the request.
    pub name: Option<String>,
    pub params: SamplingParams,
    /// What the answer must be, and as which field that came.
    pub constraint: Option<Constraint>,
    pub bootstrap: Bootstrap,
}

impl GenerationSettings {
    /// The settings as the engine needs them. `usual` is the most tokens of an answer where neither
    /// the request nor the server says, if the API has a number of its own; the prompt came as
    /// `param`.
    pub async fn check(
        &self,
        app: &App,
        usual: Option<usize>,
        param: &str,
    ) -> Result<CheckedParams, Refusal> {
        let mut params = self.params.clone();
        params.max_tokens = params.max_tokens.or(app.settings.default_max_tokens).or(usual);
        let checked = app.generator.check(params);
        let mut params = checked.map_err(|error| Refusal::of(error, param))?;
        if let Some(constraint) = &self.constraint {
            params.grammar = Some(app.grammars.get(app, constraint, param).await?);
        }
        params.skip_special_tokens = !self.show_special_tokens;
        params.speculation = self.speculation;
        params.draft_trees = self.draft_trees;
        params.priority = self.priority;
        Ok(params)
    }
}
