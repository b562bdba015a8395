//! What requests of all APIs for text may set, beside what they are about.

use std::sync::Arc;
use std::time::Duration;

use aquila_engine::Speculation;
use aquila_text::{CheckedParams, GenerateError, Grammar, GrammarSpec, SamplingParams};
use tokio::sync::Semaphore;

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
        self.check_with(app, usual, param, &mut CompiledGrammars::default()).await
    }

    /// The same, for one of several prompts of a request.
    pub async fn check_with(
        &self,
        app: &App,
        usual: Option<usize>,
        param: &str,
        compiled: &mut CompiledGrammars,
    ) -> Result<CheckedParams, Refusal> {
        let mut params = self.params.clone();
        params.max_tokens = params.max_tokens.or(app.settings.default_max_tokens).or(usual);
        let checked = app.generator.check(params);
        let mut params = checked.map_err(|error| Refusal::of(error, param))?;
        if let Some(constraint) = &self.constraint {
            params.grammar = Some(compiled.of(app, constraint, param).await?);
        }
        params.skip_special_tokens = !self.show_special_tokens;
        params.speculation = self.speculation;
        params.draft_trees = self.draft_trees;
        params.priority = self.priority;
        Ok(params)
    }
}

/// The grammars of a request, each compiled once.
#[derive(Debug, Default)]
pub(crate) struct CompiledGrammars(Vec<(GrammarSpec, Arc<dyn Grammar>)>);

impl CompiledGrammars {
    async fn of(
        &mut self,
        app: &App,
        constraint: &Constraint,
        param: &str,
    ) -> Result<Arc<dyn Grammar>, Refusal> {
        if let Some((_, grammar)) = self.0.iter().find(|(spec, _)| *spec == constraint.spec) {
            return Ok(grammar.clone());
        }
        let (generator, spec) = (app.generator.clone(), constraint.spec.clone());
        let (spec, compiled) = app
            .compile_turns
            .run(app.settings.limits.request_time, move || {
                let compiled = generator.compile(&spec);
                (spec, compiled)
            })
            .await?;
        let grammar = compiled.map_err(|error| match error {
            GenerateError::Param(error) => Refusal::param(constraint.field, error.why),
            error => Refusal::of(error, param),
        })?;
        self.0.push((spec, grammar.clone()));
        Ok(grammar)
    }
}

/// Grammars that are compiled at a time.
const COMPILE_TURNS: usize = 4;

/// Turns to compile grammars. A grammar may take seconds and hundreds of megabytes; one whose client
/// leaves before its turn is not compiled.
#[derive(Debug)]
pub(crate) struct CompileTurns(Arc<Semaphore>);

impl Default for CompileTurns {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(COMPILE_TURNS)))
    }
}

impl CompileTurns {
    /// Compiles when there is a turn, unless there is none for so long, on a thread where it keeps no
    /// other request waiting. The turn ends with the work, also when its client is gone.
    async fn run<T: Send + 'static>(
        &self,
        patience: Option<Duration>,
        compile: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let turn = self.0.clone().acquire_owned();
        let turn = match patience {
            Some(patience) => tokio::time::timeout(patience, turn).await.map_err(|_| {
                Refusal::busy("other grammars were compiled for as long as a request may take")
            })?,
            None => turn.await,
        };
        let turn = turn.expect("nothing closes the semaphore");
        let compiling = tokio::task::spawn_blocking(move || {
            let compiled = compile();
            drop(turn);
            compiled
        });
        compiling.await.map_err(|_| Refusal::failed("the grammar could not be compiled"))
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn grammars_of_clients_that_leave_are_not_compiled() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let _inside = runtime.enter();
        let turns = CompileTurns::default();
        let begun = Arc::new(AtomicUsize::new(0));
        let (ends, ended): (Vec<_>, Vec<_>) = (0..COMPILE_TURNS).map(|_| channel::<()>()).unzip();
        let poll = |future: std::pin::Pin<&mut dyn Future<Output = Result<(), Refusal>>>| {
            future.poll(&mut Context::from_waker(Waker::noop()))
        };
        let work = |end: Option<std::sync::mpsc::Receiver<()>>| {
            let begun = begun.clone();
            move || {
                begun.fetch_add(1, Ordering::SeqCst);
                end.into_iter().for_each(|end| end.recv().unwrap());
            }
        };
        let mut slow: Vec<_> =
            ended.into_iter().map(|end| Box::pin(turns.run(None, work(Some(end))))).collect();
        assert!(slow.iter_mut().all(|slow| poll(slow.as_mut()).is_pending()));
        {
            // One client waits for a turn and leaves.
            let left = pin!(turns.run(None, work(None)));
            assert!(poll(left).is_pending());
        }
        // Others leave while their grammars are compiled, whose turns go on.
        slow.truncate(1);
        let last = pin!(turns.run(None, work(None)));
        let mut last = last;
        assert!(poll(last.as_mut()).is_pending());
        ends.iter().for_each(|end| end.send(()).unwrap());
        runtime.block_on(slow.remove(0)).unwrap();
        runtime.block_on(last).unwrap();
        assert_eq!(begun.load(Ordering::SeqCst), COMPILE_TURNS + 1);
    }

    #[test]
    fn who_waits_too_long_for_a_turn_is_refused() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let turns = CompileTurns::default();
        let _all = turns.0.clone().try_acquire_many_owned(COMPILE_TURNS as u32).unwrap();
        let refused = runtime.block_on(turns.run(Some(Duration::from_millis(1)), || ()));
        assert_eq!(refused.unwrap_err().status(), 503);
    }
}
