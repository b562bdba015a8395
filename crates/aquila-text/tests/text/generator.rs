//! Text in, text out: the shipped model behind a generator.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, LazyLock};

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::{KvDtype, WeightFormat};
use aquila_engine::{
    EngineConfig, EngineHandle, FinishReason, Runner, Scheduler, StopCause, SubmitError,
};
use aquila_model::{Checkpoint, Decoder, LoadFormat, Places};
use aquila_text::{
    AnswerSink, Delta, End, GenerateError, Generator, Prompt, SamplingParams, Tokenizer,
};
use serde_json::{Value, json};

const CONTEXT: usize = 256;

static TINY: LazyLock<Generator> = LazyLock::new(|| {
    let places = Places {
        shipped: vec![concat!(env!("CARGO_MANIFEST_DIR"), "/../../models").into()],
        unpacked: Some(env!("CARGO_TARGET_TMPDIR").into()),
        hub: None,
    };
    let location = places.resolve("tiny", None, &mut |_| {}).unwrap();
    let checkpoint = Checkpoint::open(&location, LoadFormat::Auto).unwrap();
    let config = EngineConfig {
        page_size: 1,
        max_total_tokens: 4096,
        max_running_requests: 8,
        max_queued_requests: 64,
        chunked_prefill_size: 64,
        context_length: CONTEXT,
        prefix_cache: true,
        kv_dtype: KvDtype::F32,
        random_seed: 0,
        shape: aquila_spec::Shape::PLAIN,
        verify: Default::default(),
        parked_rows: 0,
        simulate: None,
        returned: Default::default(),
    };
    let backend = Arc::new(CpuBackend::new(IsaChoice::Auto, 1).unwrap());
    let decoder =
        Decoder::load(&*backend, &checkpoint, WeightFormat::Bf16, CONTEXT, &mut |_| {}).unwrap();
    let tokenizer = Tokenizer::load(checkpoint.folder().unwrap()).unwrap();
    let eos = checkpoint.eos_token_ids().to_vec();
    let engine =
        Scheduler::new(Runner::new(backend, decoder, None, &config).unwrap(), config).unwrap();
    let handle = EngineHandle::start(engine).unwrap();
    let defaults = SamplingParams { temperature: Some(0.0), ..SamplingParams::default() };
    Generator::new(handle, tokenizer, eos, defaults)
});

/// What was heard of one answer.
#[derive(Debug, Default, PartialEq)]
struct Heard {
    ids: Vec<u32>,
    /// Pieces of the text as they came, the last with the end.
    pieces: Vec<String>,
}

impl Heard {
    fn text(&self) -> String {
        self.pieces.concat()
    }
}

struct Sink {
    heard: Heard,
    /// How many pieces are listened to.
    patience: usize,
    done: Sender<(Heard, End)>,
}

impl AnswerSink for Sink {
    fn delta(&mut self, delta: Delta) -> bool {
        self.heard.ids.extend(delta.tokens.iter().map(|token| token.id));
        self.heard.pieces.push(delta.text);
        self.heard.pieces.len() < self.patience
    }

    fn end(mut self: Box<Self>, end: End) {
        self.heard.pieces.push(end.text.clone());
        let _ = self.done.send((self.heard, end));
    }
}

fn patient(
    prompt: Prompt,
    sampling: Value,
    patience: usize,
) -> Result<(Heard, End), GenerateError> {
    let params = SamplingParams::from_json(sampling.as_object().unwrap())?;
    let params = TINY.check(params)?;
    let (done, answers) = channel();
    TINY.submit(TINY.tokens(prompt)?, &params, None, |_| {
        Box::new(Sink { heard: Heard::default(), patience, done: done.clone() })
    })?;
    Ok(answers.recv().unwrap())
}

fn answer(prompt: &str, sampling: Value) -> (Heard, End) {
    patient(Prompt::Text(prompt.into()), sampling, usize::MAX).unwrap()
}

fn decoded(ids: &[u32]) -> String {
    TINY.tokenizer().unwrap().decode(ids, true).unwrap()
}

#[test]
fn pieces_of_text_make_up_the_decoded_ids() {
    for seed in 0..6 {
        let sampling =
            json!({ "max_tokens": 40, "ignore_eos": true, "temperature": 4.0, "seed": seed });
        let (heard, end) = answer("Straße 漢字 🦅 fn", sampling);
        assert_eq!(heard.ids.len(), 40);
        assert_eq!(heard.text(), decoded(&heard.ids));
        assert_eq!((end.reason, end.stop), (FinishReason::Length, None));
        assert_eq!(end.usage.completion_tokens, 40);
    }
}

#[test]
fn a_text_and_its_ids_are_the_same_prompt() {
    let sampling = json!({ "max_tokens": 10 });
    let ids = TINY.tokens(Prompt::Text("fn main() {".into())).unwrap();
    let by_ids = patient(Prompt::Ids(ids), sampling.clone(), usize::MAX).unwrap();
    assert_eq!(by_ids.0.text(), answer("fn main() {", sampling).0.text());
}

#[test]
fn a_stop_string_is_found_wherever_tokens_divide_it() {
    let whole = answer("fn main() {", json!({ "max_tokens": 20, "ignore_eos": true })).0;
    let text = whole.text();
    for start in 0..12 {
        for length in [1, 2, 5, 9] {
            let stop = &text[start..start + length];
            let sampling = json!({ "max_tokens": 20, "ignore_eos": true, "stop": stop });
            let (heard, end) = answer("fn main() {", sampling);
            let first = text.find(stop).unwrap();
            assert_eq!(heard.text(), text[..first], "{stop:?}");
            assert_eq!(end.reason, FinishReason::Stop(StopCause::Listener));
            assert_eq!(end.stop.as_deref(), Some(stop));
            assert_eq!(end.usage.completion_tokens, heard.ids.len());
            // No more tokens than it took to complete the stop string.
            assert!(whole.ids.starts_with(&heard.ids));
            let before = &heard.ids[..heard.ids.len() - 1];
            assert!(decoded(&heard.ids).len() >= first + length);
            assert!(decoded(before).len() < first + length);
        }
    }
}

#[test]
fn a_stop_token_ends_the_ids_and_not_the_text() {
    let whole = answer("fn main() {", json!({ "max_tokens": 20, "ignore_eos": true })).0;
    let stop = whole.ids[7];
    let kept = whole.ids.iter().position(|&id| id == stop).unwrap();
    let (heard, end) = answer("fn main() {", json!({ "stop_token_ids": [stop] }));
    assert_eq!(heard.ids, whole.ids[..=kept]);
    assert_eq!(heard.text(), decoded(&whole.ids[..kept]));
    assert_eq!(end.reason, FinishReason::Stop(StopCause::Token(stop)));
}

#[test]
fn nothing_ends_an_answer_before_its_min_tokens() {
    let whole = answer("fn main() {", json!({ "max_tokens": 30, "ignore_eos": true })).0;
    // A character of the first token, so that without min_tokens the answer is over at once.
    let stop: String = whole.text().chars().take(1).collect();
    let sampling = |min| json!({ "max_tokens": 30, "stop": stop, "min_tokens": min });
    assert_eq!(answer("fn main() {", sampling(0)).0.ids.len(), 1);
    let (heard, end) = answer("fn main() {", sampling(12));
    assert!(heard.ids.len() >= 12, "{}", heard.ids.len());
    assert_eq!(end.reason, FinishReason::Stop(StopCause::Listener));
    assert!(decoded(&heard.ids).starts_with(&heard.text()));
}

#[test]
fn an_answer_that_nobody_hears_is_given_up() {
    let prompt = Prompt::Text("fn main() {".into());
    let sampling = json!({ "max_tokens": 100, "ignore_eos": true });
    let (heard, end) = patient(prompt, sampling, 3).unwrap();
    assert!(matches!(end.reason, FinishReason::Abort(_)), "{:?}", end.reason);
    assert_eq!(heard.ids.len(), 3);
}

#[test]
fn what_cannot_be_served_is_refused_with_its_reason() {
    let refused = |prompt: Prompt, sampling: Value| {
        patient(prompt, sampling, usize::MAX).expect_err("it should be refused")
    };
    let error = refused(Prompt::Ids(vec![]), json!({}));
    assert!(matches!(error, GenerateError::Submit(SubmitError::EmptyPrompt)), "{error}");
    let error = refused(Prompt::Ids(vec![1; CONTEXT]), json!({}));
    assert!(error.to_string().contains("at most 255"), "{error}");
    let error = refused(Prompt::Ids(vec![1, 8192]), json!({}));
    assert!(error.to_string().contains("8192"), "{error}");
    let error = refused(Prompt::Text("x".into()), json!({ "temperature": -1 }));
    assert!(matches!(&error, GenerateError::Param(e) if e.name == "temperature"), "{error}");
}

#[test]
fn without_a_tokenizer_text_and_stop_strings_are_refused() {
    let silent = Generator::new(TINY.engine().clone(), None, vec![], SamplingParams::default());
    let text = silent.tokens(Prompt::Text("x".into()));
    assert!(matches!(text, Err(GenerateError::NoTokenizer)));
    let stop = SamplingParams { stop: Some(vec!["x".into()]), ..SamplingParams::default() };
    assert!(matches!(silent.check(stop), Err(GenerateError::NoTokenizer)));
    assert_eq!(silent.tokens(Prompt::Ids(vec![1, 2])).unwrap(), [1, 2]);
}
