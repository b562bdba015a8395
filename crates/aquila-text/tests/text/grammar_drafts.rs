//! Grammars of the library under drafts of the shipped head: the same texts, in fewer rounds where
//! drafts know the grammar.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, LazyLock};

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::round::{Grammar, GrammarState};
use aquila_compute::{KvDtype, WeightFormat};
use aquila_engine::{
    EngineConfig, FinishReason, Listener, Outcome, Request, Runner, Scheduler, StopCause, Token,
    Verdict,
};
use aquila_model::{Checkpoint, Decoder, Eagle3Head, HeadCheckpoint, LoadFormat, Places};
use aquila_spec::{Algorithm, Eagle3, RecurrentDraft, Shape};
use aquila_text::{GrammarCompiler, GrammarSpec, Tokenizer};
use serde_json::json;

const CONTEXT: usize = 256;
const EOS: [u32; 2] = [0, 2];

static PLACES: LazyLock<Places> = LazyLock::new(|| Places {
    shipped: vec![concat!(env!("CARGO_MANIFEST_DIR"), "/../../models").into()],
    unpacked: Some(env!("CARGO_TARGET_TMPDIR").into()),
    hub: None,
});

/// The shipped model, with its head where `shape` has steps.
fn engine(shape: Shape) -> (Scheduler, Tokenizer) {
    let location = |name: &str| PLACES.resolve(name, None, &mut |_| {}).unwrap();
    let checkpoint = Checkpoint::open(&location("tiny"), LoadFormat::Auto).unwrap();
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
        shape,
        verify: Default::default(),
        parked_rows: 0,
        simulate: None,
        returned: Default::default(),
    };
    let backend = Arc::new(CpuBackend::new(IsaChoice::Auto, 1).unwrap());
    let format = WeightFormat::Bf16;
    let target = Decoder::load(&*backend, &checkpoint, format, CONTEXT, &mut |_| {}).unwrap();
    let algorithm = (shape.steps() > 0).then(|| {
        let head = location("tiny-eagle3");
        let head = HeadCheckpoint::open(&head, LoadFormat::Auto, target.spec()).unwrap();
        let embedding = target.embedding();
        let head =
            Eagle3Head::load(&*backend, &head, format, CONTEXT, embedding, &mut |_| ()).unwrap();
        let draft = Box::new(Eagle3::new(&*backend, head, config.draft_bounds()).unwrap());
        let (slots, dtype) = (config.slots(), config.kv_dtype);
        Algorithm::on_device(RecurrentDraft::new(&*backend, draft, slots, dtype).unwrap())
    });
    let tokenizer = Tokenizer::load(checkpoint.folder().unwrap()).unwrap().unwrap();
    let runner = Runner::new(backend, target, algorithm, &config).unwrap();
    (Scheduler::new(runner, config).unwrap(), tokenizer)
}

/// A grammar that drafts do not know.
#[derive(Debug)]
struct Hidden(Arc<dyn Grammar>);

impl Grammar for Hidden {
    fn begin(&self) -> Box<dyn GrammarState> {
        self.0.begin()
    }

    fn guides_drafts(&self) -> bool {
        false
    }
}

struct Heard {
    index: usize,
    ids: Vec<u32>,
    done: Sender<(usize, Vec<u32>, Outcome)>,
}

impl Listener for Heard {
    fn tokens(&mut self, tokens: &[Token]) -> Verdict {
        self.ids.extend(tokens.iter().map(|token| token.id));
        Verdict::Continue
    }

    fn finished(self: Box<Self>, outcome: Outcome) {
        let _ = self.done.send((self.index, self.ids, outcome));
    }
}

/// What requests held by each grammar get, in its order, and how many rounds that took.
fn answers(
    engine: &mut Scheduler,
    grammars: &[Arc<dyn Grammar>],
) -> (Vec<(Vec<u32>, FinishReason)>, u64) {
    let (done, ended) = channel();
    for (index, grammar) in grammars.iter().enumerate() {
        let listener = Box::new(Heard { index, ids: Vec::new(), done: done.clone() });
        let mut request = Request::new(vec![491, 797, 3454], 64, listener);
        request.limits.stop_ids = EOS.into();
        request.grammar = Some(grammar.clone());
        engine.submit(request).unwrap();
    }
    while engine.step() {}
    drop(done);
    let mut all: Vec<_> = ended.iter().collect();
    all.sort_by_key(|(index, ..)| *index);
    let rounds = all.iter().map(|(_, _, outcome)| outcome.usage.spec.verify_ct).sum();
    (all.into_iter().map(|(_, ids, outcome)| (ids, outcome.reason)).collect(), rounds)
}

#[test]
fn drafts_that_know_the_grammar_need_fewer_rounds_for_the_same_texts() {
    let person = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 12 },
            "age": { "type": "integer", "minimum": 0, "maximum": 120 },
            "tags": { "type": "array", "items": { "enum": ["new", "old"] }, "maxItems": 3 }
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": false
    });
    let specs = [
        GrammarSpec::JsonSchema(person),
        GrammarSpec::Regex("(The answer is )?(yes|no), (because|since) [a-z ]{5,20}\\.".into()),
        GrammarSpec::Ebnf("root ::= \"- \" item (\"\\n- \" item){2}\nitem ::= [a-z]{3,8}".into()),
        GrammarSpec::Choice(vec!["A tree of drafts".into(), "A chain of drafts".into()]),
    ];
    let (mut plain, tokenizer) = engine(Shape::PLAIN);
    let compiler = GrammarCompiler::new(&tokenizer, plain.vocabulary(), &EOS).unwrap();
    let grammars: Vec<Arc<dyn Grammar>> =
        specs.iter().map(|spec| compiler.compile(spec).unwrap() as _).collect();
    let hidden: Vec<Arc<dyn Grammar>> =
        grammars.iter().map(|grammar| Arc::new(Hidden(grammar.clone())) as _).collect();
    let (want, _) = answers(&mut plain, &grammars);
    for (_, reason) in &want {
        assert!(matches!(reason, FinishReason::Stop(StopCause::Grammar | StopCause::Token(_))));
    }
    for shape in [Shape::chain(3), Shape::new(4, 3, 10).unwrap()] {
        let (known, fewer) = answers(&mut engine(shape).0, &grammars);
        let (unknown, more) = answers(&mut engine(shape).0, &hidden);
        assert_eq!(known, want, "{shape}");
        assert_eq!(unknown, want, "{shape}");
        assert!(fewer < more, "{shape}: {fewer} rounds against {more}");
    }
}
