//! What the server says about itself, its model and its load.

use aquila_engine::{DraftingState, Priorities};
use aquila_spec::Shape;
use aquila_spec::policy::SlotState;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::disaggregation::Role;
use crate::routes::json as respond;
use crate::state::Shared;

/// Settings and state. SGLang's router drops all of it if one number is not an unsigned integer.
pub(crate) async fn server(State(app): State<Shared>) -> Response {
    let config = app.generator.engine().config();
    let engine = app.generator.engine().stats().snapshot();
    let spec = app.generator.engine().stats().speculation();
    let drafting = app.generator.engine().stats().drafting();
    let shape = drafting.setting.map_or(Shape::PLAIN, |setting| setting.shape);
    let model = &app.settings.model;
    let (ranked, low_first, threshold) = match app.generator.engine().priorities() {
        Priorities::Ranked { low_values_first, preemption_threshold } => {
            (true, low_values_first, Some(preemption_threshold))
        }
        Priorities::Ignored | Priorities::Refused => (false, false, None),
    };
    let state = json!({
        "last_gen_throughput": app.metrics.throughput(),
        "num_running_reqs": engine.running,
        "num_waiting_reqs": engine.waiting,
        "num_used_tokens": engine.used_slots,
        "num_cached_tokens": engine.cached_tokens,
        "avg_spec_accept_length": spec.accept_length(),
        "speculative_num_steps": shape.steps(),
        "speculative_num_draft_tokens": shape.nodes(),
        "speculative_policy": policy(&drafting),
    });
    let info = json!({
        "model_path": model.path,
        "tokenizer_path": model.path,
        "served_model_name": model.served_name,
        "version": env!("CARGO_PKG_VERSION"),
        "tp_size": 1,
        "dp_size": 1,
        "load_balance_method": "round_robin",
        "disaggregation_mode": app.settings.role.as_ref().map_or("null", Role::name),
        "speculative_algorithm": app.generator.engine().algorithm(),
        "speculative_num_steps": config.shape.steps(),
        "speculative_eagle_topk": config.shape.topk(),
        "speculative_num_draft_tokens": config.shape.nodes(),
        "context_length": config.context_length,
        "page_size": config.page_size,
        "chunked_prefill_size": config.chunked_prefill_size,
        "max_prefill_tokens": config.chunked_prefill_size,
        "max_running_requests": config.max_running_requests,
        "max_queued_requests": config.max_queued_requests,
        "max_total_tokens": config.pages() * config.page_size,
        "disable_radix_cache": !config.prefix_cache,
        "disable_overlap_schedule": !app.generator.engine().overlaps(),
        "overlap_schedule_reason": app.settings.overlap_reason,
        "device": app.settings.device,
        "disable_cuda_graph": app.settings.captured_batches.is_empty(),
        "cuda_graph_bs": app.settings.captured_batches,
        "enable_priority_scheduling": ranked,
        "schedule_low_priority_values_first": low_first,
        "priority_scheduling_preemption_threshold": threshold,
        "enable_return_hidden_states": config.returned.hidden_states,
        "enable_return_routed_experts": config.returned.routed_experts,
        "random_seed": config.random_seed,
        "internal_states": [state],
    });
    respond(&info, None)
}

/// Who decides how large trees are, and where that stands.
fn policy(drafting: &DraftingState) -> Value {
    let slot = |slot: &SlotState| {
        json!({
            "batch_size": slot.batch,
            "num_steps": slot.shape.steps(),
            "topk": slot.shape.topk(),
            "num_draft_tokens": slot.shape.nodes(),
            "expected_correct_drafts": slot.expected_drafts,
            "rounds": slot.rounds,
        })
    };
    let per_round = |tokens: f64| tokens / drafting.rounds.max(1) as f64;
    json!({
        "name": drafting.policy.name,
        "slots": drafting.policy.slots.iter().map(slot).collect::<Vec<_>>(),
        "switches": drafting.policy.switches,
        "probes": drafting.policy.probes,
        "requests_left_plain": drafting.left_plain,
        "expected_tokens_per_round": per_round(drafting.expected_tokens),
        "tokens_per_round": per_round(drafting.real_tokens as f64),
        "costs": drafting.costs.as_deref(),
    })
}

pub(crate) async fn model(State(app): State<Shared>) -> Response {
    let model = &app.settings.model;
    let info = json!({
        "model_path": model.path,
        "tokenizer_path": model.path,
        "served_model_name": model.served_name,
        "is_generation": true,
        "model_type": model.model_type,
        "architectures": model.architectures,
        "preferred_sampling_params": null,
        "vocab_size": app.generator.engine().vocabulary(),
        "max_model_len": app.generator.engine().config().context_length,
    });
    respond(&info, None)
}

pub(crate) async fn load(State(app): State<Shared>) -> Response {
    let engine = app.generator.engine().stats().snapshot();
    let load = json!([{
        "dp_rank": 0,
        "num_reqs": engine.running + engine.waiting,
        "num_waiting_reqs": engine.waiting,
        "num_tokens": engine.used_slots,
    }]);
    respond(&load, None)
}

pub(crate) async fn metrics(State(app): State<Shared>) -> Response {
    let engine = app.generator.engine().stats().snapshot();
    let spec = app.generator.engine().stats().speculation();
    let drafting = app.generator.engine().stats().drafting();
    let (name, role) = (&app.settings.model.served_name, app.settings.role.as_ref());
    let page = app.metrics.page(name, &engine, &spec, &drafting, &app.grammars, role);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response()
}
