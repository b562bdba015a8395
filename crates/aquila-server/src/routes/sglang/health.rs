//! Whether the server is well: a glance, and a real token.

use std::time::{Duration, Instant};

use aquila_text::SamplingParams;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use tokio::sync::Mutex;

use crate::refusal::Refusal;
use crate::state::{App, Shared};
use crate::submit::Submission;

/// How long one token may take before the server counts as ill.
const ONE_TOKEN: Duration = Duration::from_secs(20);

/// The last probe of the engine: when it ended, and how. The lock is held while one runs.
pub(crate) type Probe = Mutex<Option<(Instant, Result<(), Refusal>)>>;

pub(crate) async fn health(State(app): State<Shared>) -> Result<Response, Refusal> {
    app.check_serving()?;
    Ok(().into_response())
}

/// Generates one token from one token, which any model can.
pub(crate) async fn health_generate(State(app): State<Shared>) -> Result<Response, Refusal> {
    app.check_serving()?;
    // Anybody may ask, without a key: whoever waits while another's probe runs shares its answer.
    let asked = Instant::now();
    let mut last = app.probe.lock().await;
    let probed = match &*last {
        Some((ended, probed)) if *ended >= asked => probed.clone(),
        _ => {
            let probed = probe(&app).await;
            *last = Some((Instant::now(), probed.clone()));
            probed
        }
    };
    probed.map(IntoResponse::into_response)
}

async fn probe(app: &App) -> Result<(), Refusal> {
    let one = SamplingParams {
        max_tokens: Some(1),
        min_tokens: Some(0),
        n: Some(1),
        temperature: Some(0.0),
        stop: Some(Vec::new()),
        ..SamplingParams::default()
    };
    let params = app.generator.check(one).map_err(|error| Refusal::of(error, "health"))?;
    let name = app.identifiers.next("health-");
    let asking = app.submit_whole(vec![Submission::new(name, vec![0], params)], "health");
    let answered = tokio::time::timeout(ONE_TOKEN, asking).await;
    let answered = answered.map_err(|_| Refusal::busy("no token came in time")).flatten();
    // Where the engine failed meanwhile, that is the reason to tell.
    answered.map(drop).or_else(|refusal| app.check_serving().and(Err(refusal)))
}
