//! Random rounds: the same batches with the same logits on the CPU and on the device. What comes of
//! each request must be equal, and so must what attention gives for every planned row, which depends
//! on tokens, positions, slots and what earlier rounds have moved.

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::cuda::CudaBackend;
use aquila_compute::round::{
    BatchRow, ExtendRows, Extent, KeptLayout, PassRows, RequestOutput, ReturnedRows, RowWork,
    Shape, StateBounds,
};
use aquila_compute::{
    AttentionParams, Backend, DraftIds, HeadShape, HostTensor, KvDtype, KvShape, PlanBounds,
    Result, RopeTable,
};

use crate::Findings;
use crate::random::{Kind, Random};
use crate::requests::{Draft, Life, Script, Setting};

const HEADS: HeadShape = HeadShape { heads: 2, kv_heads: 1, head_dim: 8 };
const PARAMS: AttentionParams = AttentionParams { heads: HEADS, scale: 0.3, window: None };
/// Width of hidden rows.
const HIDDEN: usize = 5;

/// What came out of the operations of a round, by name.
type Trace = Vec<(String, Vec<f32>)>;

/// Makes rows of so many columns from values.
type MakeRows<'a, B> = &'a dyn Fn(usize, &[f32]) -> Result<<B as Backend>::Rows>;

/// One backend with a state, and a model of one layer of attention whose logits are made up.
struct Player<'a, B: Backend> {
    backend: &'a B,
    setting: &'a Setting,
    table: B::Table,
    rope: B::Rope,
    state: B::State,
    plan: B::Plan,
    draft_plan: B::Plan,
    /// One of the target, then one of each group of the draft.
    kv: Vec<B::Kv>,
    hidden: B::Rows,
    states: B::Rows,
    /// Rows with values, as this backend keeps them.
    rows_of: MakeRows<'a, B>,
    trace: Trace,
    /// Rows of each pass that are compared: what the first player found.
    extents: Vec<Extent>,
    leads: bool,
    pass: usize,
    /// Rows of the target's pass at most.
    most_rows: usize,
}

impl<'a, B: Backend> Player<'a, B> {
    fn new(
        backend: &'a B,
        setting: &'a Setting,
        dtype: KvDtype,
        leads: bool,
        rows_of: MakeRows<'a, B>,
    ) -> Result<Self> {
        let mut random = Random(setting.seed);
        let values = random.values(setting.vocabulary * HEADS.qkv_width(), Kind::Even);
        let shape = vec![setting.vocabulary, HEADS.qkv_width()];
        let table = backend.table(&HostTensor::from_f32("table", shape, &values)?)?;
        let frequencies: Vec<f64> = (0..4).map(|i| 0.6f64.powi(i)).collect();
        let rope = backend.rope(&RopeTable::new(4096, &frequencies, 1.0))?;
        let groups = setting.groups();
        let outputs = setting.outputs();
        let slots = setting.places * (setting.table + 64) * (1 + groups.len());
        let bounds = PlanBounds { rows: setting.rows(), outputs, slots };
        let kv = (0..=groups.len())
            .map(|_| {
                backend.kv(KvShape {
                    layers: 1,
                    slots: setting.slots(),
                    kv_heads: HEADS.kv_heads,
                    head_dim: HEADS.head_dim,
                    dtype,
                })
            })
            .collect::<Result<_>>()?;
        let state = backend.state(StateBounds {
            places: setting.places,
            stride: setting.longest,
            drafts: setting.draft != Draft::None,
            groups,
            hidden: setting.hidden,
            first_parked: setting.rows(),
            parked_rows: setting.parked_rows,
            chunk: setting.chunk,
            shape: setting.shape,
            verify: setting.verify,
            vocabulary: setting.vocabulary,
            outputs,
            logits: setting.piece(),
            simulate: setting.simulate.clone(),
        })?;
        let kept = setting.kept();
        Ok(Self {
            backend,
            setting,
            table,
            rope,
            state,
            plan: backend.plan(bounds)?,
            draft_plan: backend.plan(bounds)?,
            kv,
            hidden: backend.rows(setting.rows() + setting.places * setting.parked_rows, HIDDEN)?,
            states: backend.rows(kept.passes + setting.places * kept.depth, HIDDEN)?,
            rows_of,
            trace: Vec::new(),
            extents: Vec::new(),
            leads,
            pass: 0,
            most_rows: setting.rows(),
        })
    }

    /// Runs the pass that was planned and notes what its rows see.
    fn attend(&mut self, what: &str, group: usize) -> Result<()> {
        let backend = self.backend;
        let plan = if group == 0 { &self.plan } else { &self.draft_plan };
        let bound = backend.extent(plan);
        if self.leads {
            self.extents.push(bound);
        }
        let Extent { rows, outputs } = self.extents[self.pass];
        self.pass += 1;
        let mut qkv = backend.rows(bound.rows.max(1), HEADS.qkv_width())?;
        let mut out = backend.rows(bound.rows.max(1), HEADS.q_width())?;
        let mut gathered = backend.rows(bound.outputs.max(1), HEADS.q_width())?;
        if bound.rows == 0 {
            return Ok(());
        }
        backend.embed(&self.table, 1.0, plan, &mut qkv)?;
        let kv = &mut self.kv[group];
        backend.write_kv(&mut qkv, HEADS, None, &self.rope, plan, kv, 0)?;
        backend.attend(&qkv, PARAMS, plan, kv, 0, &mut out)?;
        backend.gather_outputs(&out, plan, 0, &mut gathered)?;
        if rows > 0 {
            self.trace.push((format!("{what}: attention"), backend.read(&out, rows)?));
            self.trace.push((format!("{what}: outputs"), backend.read(&gathered, outputs)?));
        }
        Ok(())
    }

    /// What the rows of the draft's pass take.
    fn note_sources(&mut self, what: &str, from: usize) -> Result<()> {
        let backend = self.backend;
        let bound = backend.extent(&self.draft_plan);
        let rows = self.extents[self.pass - 1].rows;
        if bound.rows == 0 {
            return Ok(());
        }
        let numbers: Vec<f32> = (0..from).map(|i| i as f32).collect();
        let numbered = (self.rows_of)(1, &numbers)?;
        let mut out = backend.rows(bound.rows, 1)?;
        backend.gather_sources(&numbered, &self.draft_plan, &mut out)?;
        if rows > 0 {
            self.trace.push((format!("{what}: sources"), backend.read(&out, rows)?));
        }
        Ok(())
    }

    fn logits(&self, script: &Script, pass: usize, width: usize) -> Result<B::Rows> {
        let values = script.logits(pass, self.setting.outputs(), width);
        (self.rows_of)(width, &values)
    }

    fn extend(&mut self, script: &Script, rows: ExtendRows, number: usize) -> Result<()> {
        let (backend, setting) = (self.backend, self.setting);
        let ids = setting.ids.as_ref();
        let width = ids.map_or(setting.vocabulary, Vec::len);
        let logits = self.logits(script, 10 + number, width)?;
        backend.begin_extend(&mut self.state, rows)?;
        let kept = setting.kept();
        let layers = match setting.draft {
            Draft::None => return Ok(()),
            Draft::Recurrent { .. } => 1,
            Draft::Layers { layers, .. } => layers,
        };
        for layer in 0..layers {
            let pass = match setting.draft {
                Draft::Layers { .. } => PassRows::LayerExtend { layer, kept },
                _ => PassRows::RecurrentExtend { hidden: setting.hidden },
            };
            let outputs = if layer == 0 { setting.places } else { 0 };
            let bound = Extent { rows: setting.rows(), outputs };
            backend.plan_rows(&mut self.state, pass, bound, &mut self.draft_plan)?;
            let what = format!("extend {number}, layer {layer}");
            self.attend(&what, 1 + layer)?;
            if layer > 0 || setting.hidden {
                self.note_sources(&what, setting.rows() + 4096)?;
            }
            // Each layer leaves other states of its rows.
            let made: Vec<f32> =
                (0..kept.passes * HIDDEN).map(|i| (i + 7 * layer) as f32).collect();
            let made = (self.rows_of)(HIDDEN, &made)?;
            if layer == 0 {
                backend.copy_columns(&made, kept.passes, 0, &mut self.states)?;
            }
        }
        if let Draft::Layers { .. } = setting.draft {
            backend.keep_states(&self.state, 0, kept, &mut self.states)?;
            let rows = kept.passes + setting.places * kept.depth;
            self.trace.push(("kept states".into(), backend.read(&self.states, rows)?));
        }
        let ids = ids.map(|ids| DraftIds { ids, vocabulary: setting.vocabulary });
        backend.seed_trees(&mut self.state, &logits, ids)
    }

    fn round(&mut self, script: &Script) -> Result<Vec<Option<RequestOutput>>> {
        let (backend, setting) = (self.backend, self.setting);
        self.trace.clear();
        self.pass = 0;
        if self.leads {
            self.extents.clear();
        }
        backend.begin_round(&mut self.state, script.batch.clone())?;
        if script.batch.rows.is_empty() {
            return Ok(Vec::new());
        }
        for pass in 0..script.catch_up {
            self.extend(script, ExtendRows::CatchUp(pass), 1 + pass)?;
        }
        backend.start_trees(&mut self.state, script.given.clone())?;
        if setting.draft != Draft::None {
            for depth in 1..setting.shape.steps() {
                let beam = setting.places * setting.shape.topk();
                let (pass, group, rows) = match setting.draft {
                    Draft::Layers { .. } => {
                        let pass = PassRows::LayerLevel { depth, kept: setting.kept() };
                        (pass, 1 + depth, beam * depth)
                    }
                    _ => (PassRows::RecurrentLevel { first: depth == 1 }, 1, beam),
                };
                let bound = Extent { rows, outputs: beam };
                backend.plan_rows(&mut self.state, pass, bound, &mut self.draft_plan)?;
                self.attend(&format!("level {depth}"), group)?;
                self.note_sources(&format!("level {depth}"), setting.rows() + 4096)?;
                let ids = setting.ids.as_ref();
                let width = ids.map_or(setting.vocabulary, Vec::len);
                let logits = self.logits(script, depth, width)?;
                let ids = ids.map(|ids| DraftIds { ids, vocabulary: setting.vocabulary });
                backend.propose(&mut self.state, &logits, ids)?;
            }
        }
        backend.build_trees(&mut self.state)?;
        let bound = Extent { rows: self.most_rows, outputs: setting.outputs() };
        backend.plan_rows(&mut self.state, PassRows::Target, bound, &mut self.plan)?;
        self.attend("target", 0)?;
        let (width, piece) = (setting.vocabulary, setting.piece());
        let values = script.logits(0, setting.outputs(), width);
        for first in (0..setting.outputs()).step_by(piece) {
            let end = setting.outputs().min(first + piece);
            let logits = (self.rows_of)(width, &values[first * width..end * width])?;
            backend.sample(&mut self.state, &logits, first)?;
        }
        backend.accept(&mut self.state)?;
        // Hidden rows of the pass, then what is parked, which stays.
        let rows = setting.rows();
        let fresh: Vec<f32> = (0..rows * HIDDEN).map(|i| (script.number * 31 + i) as f32).collect();
        backend.copy_columns(&(self.rows_of)(HIDDEN, &fresh)?, rows, 0, &mut self.hidden)?;
        backend.compact_slots(&self.state, &mut self.kv[0])?;
        backend.compact_rows(&self.state, &mut self.hidden)?;
        backend.publish(&mut self.state)?;
        if setting.hidden {
            backend.park_rows(&self.state, &mut self.hidden)?;
        }
        let all = rows + setting.places * setting.parked_rows;
        self.trace.push(("hidden rows".into(), backend.read(&self.hidden, all)?));
        if setting.draft != Draft::None {
            self.extend(script, ExtendRows::Round, 0)?;
        }
        let returned = ReturnedRows { hidden_states: Some(&self.hidden), routed_experts: None };
        backend.copy_outputs(&mut self.state, returned)?;
        backend.outputs(&mut self.state)
    }
}

impl Setting {
    /// Where hidden states of layers are kept.
    fn kept(&self) -> KeptLayout {
        let (chained, layers) = match self.draft {
            Draft::Layers { layers, chained } => (chained, layers),
            _ => (true, 1),
        };
        let depth = if chained { 1 } else { layers.saturating_sub(1).max(1) };
        KeptLayout { chained, passes: self.rows(), depth }
    }
}

/// A pass of more rows than were bounded ends its round, with nothing else out of bounds.
fn refuse_more_rows(
    cuda: &CudaBackend,
    dtype: KvDtype,
    setting: &Setting,
    random: &mut Random,
    findings: &mut Findings,
) -> Result<()> {
    let on_cuda = |width: usize, values: &[f32]| cuda.rows_of(width, values);
    let mut player = Player::new(cuda, setting, dtype, true, &on_cuda)?;
    let mut requests = Life::new(setting);
    player.round(&requests.script(random, 0))?;
    let script = requests.script(random, 1);
    let most_rows = 1 + random.below(3);
    player.most_rows = most_rows;
    let refused = player.round(&script).is_err();
    let exceeds = |row: &BatchRow| match &row.work {
        RowWork::Prefill { rows, .. } => rows.len() > most_rows,
        RowWork::Decode { .. } => false,
    };
    if script.batch.rows.iter().any(exceeds) {
        findings.comparisons += 1;
        if !refused {
            findings.failed.push(format!("more rows than were bounded went on: {setting:?}"));
        }
    }
    Ok(())
}

/// Plays `lives` lives of random requests on the CPU and on `cuda`, and too large passes on `tensor`, too.
pub fn check(
    cuda: &CudaBackend,
    tensor: &CudaBackend,
    random: &mut Random,
    lives: usize,
    findings: &mut Findings,
) -> Result<()> {
    let cpu = CpuBackend::new(IsaChoice::Auto, 1)?;
    let on_cpu = |width: usize, values: &[f32]| {
        let mut rows = cpu.rows(values.len() / width, width)?;
        for (at, row) in values.chunks_exact(width).enumerate() {
            rows.row_mut(at).copy_from_slice(row);
        }
        Ok(rows)
    };
    let on_cuda = |width: usize, values: &[f32]| cuda.rows_of(width, values);
    for life in 0..lives {
        let setting = Setting::random(random, life);
        let failed = findings.failed.len();
        let mut first = Player::new(&cpu, &setting, KvDtype::F32, true, &on_cpu)?;
        let mut second = Player::new(cuda, &setting, KvDtype::F32, false, &on_cuda)?;
        let mut requests = Life::new(&setting);
        for number in 0..setting.rounds {
            let script = requests.script(random, number);
            let want = first.round(&script)?;
            second.extents = first.extents.clone();
            let got = second.round(&script)?;
            for ((what, want), (_, got)) in first.trace.iter().zip(&second.trace) {
                findings.compare(&format!("life {life}, round {number}, {what}"), got, want);
            }
            for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                let same = format!("{got:?}") == format!("{want:?}");
                findings.comparisons += 1;
                if !same {
                    let row = &script.batch.rows[at];
                    findings.failed.push(format!(
                        "life {life}, round {number}, row {at} ({row:?}):\n  {got:?}\n  not {want:?}"
                    ));
                    eprintln!("FAILED {}", findings.failed[findings.failed.len() - 1]);
                }
            }
            if findings.failed.len() > failed {
                println!("{setting:?}");
                break;
            }
            requests.hear(&script, &want);
        }
        refuse_more_rows(cuda, KvDtype::F32, &setting, random, findings)?;
        refuse_more_rows(tensor, KvDtype::Bf16, &setting, random, findings)?;
    }
    Ok(())
}

/// The shape of trees that a setting may have.
pub fn random_shape(random: &mut Random, steps: usize) -> Shape {
    match random.below(3) {
        0 => Shape::chain(1 + random.below(steps)),
        _ => {
            let widest = if random.below(8) == 0 { 48 } else { 5 };
            let (steps, topk) = (1 + random.below(steps), 1 + random.below(widest));
            let most = Shape::most_nodes(steps, topk);
            Shape::new(steps, topk, 2 + random.below((most - 1).min(24))).expect("it is possible")
        }
    }
}
