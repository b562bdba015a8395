//! Compares models with what transformers made of them: `compare FOLDER...`, each with a
//! checkpoint and a `golden.safetensors` (`tests/architectures.py` makes them). Ends with 1 where
//! one differs.

use std::path::Path;

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::{AttentionSpan, Backend, ForwardPlan, KvDtype, PlanBounds, WeightFormat};
use aquila_model::{Checkpoint, Decoder, LoadFormat, Location, Safetensors, TensorSource};

type Failure = Box<dyn std::error::Error>;

/// What logits may be off, relative to the spread of the reference's.
const TOLERANCE: f32 = 1e-3;

fn main() -> Result<(), Failure> {
    let backend = CpuBackend::new(IsaChoice::Auto, 0)?;
    let mut differ = 0;
    for folder in std::env::args().skip(1) {
        let name =
            Path::new(&folder).file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (verdict, same) = match compare(&backend, Path::new(&folder)) {
            Ok((off, ids)) => (
                format!("logits off by {off:.1e}, ids {}", if ids { "equal" } else { "differ" }),
                off < TOLERANCE && ids,
            ),
            Err(error) => (error.to_string(), false),
        };
        differ += usize::from(!same);
        println!("{} {name}: {verdict}", if same { "ok    " } else { "DIFFER" });
    }
    if differ > 0 {
        return Err(format!("{differ} differ").into());
    }
    Ok(())
}

/// How far logits are off, relative to the reference's spread, and whether greedy ids are equal.
fn compare(backend: &CpuBackend, folder: &Path) -> Result<(f32, bool), Failure> {
    let golden = Safetensors::open_file(&folder.join("golden.safetensors"))?;
    let ids = |name: &str| -> Result<Vec<u32>, Failure> {
        let tensor = golden.get(name)?;
        let id = |b: &[u8]| i64::from_le_bytes(b.try_into().expect("eight bytes")) as u32;
        Ok(tensor.bytes().chunks_exact(8).map(id).collect())
    };
    let (prompt, answer) = (ids("input_ids")?, ids("greedy_ids")?);
    let theirs = golden.get("logits")?.to_f32()?;
    let checkpoint = Checkpoint::open(&Location::Folder(folder.into()), LoadFormat::Auto)?;
    let positions = checkpoint.spec().max_positions;
    let format = WeightFormat::Bf16;
    let decoder = Decoder::load(backend, &checkpoint, format, positions, &mut |_| {})?;
    let room = prompt.len() + answer.len();
    let mut kv = decoder.kv(backend, room, KvDtype::F32)?;
    let bounds = PlanBounds { rows: room, outputs: room, slots: room };
    let mut scratch = decoder.scratch(backend, bounds)?;
    let mut run = |text: &[u32], from: usize| -> Result<Vec<f32>, Failure> {
        let mut plan = ForwardPlan::default();
        let start = plan.add_table(0..text.len() as u32);
        for (row, position) in (from..text.len()).enumerate() {
            plan.outputs.push(row as u32);
            plan.tokens.push(text[position]);
            plan.positions.push(position as u32);
            plan.writes.push(position as u32);
            let prefix = position as u32 + 1;
            plan.spans.push(AttentionSpan { start, prefix, tree_start: 0, tail: 0 });
        }
        decoder.forward(backend, &plan, &mut kv, &mut scratch, &mut [])?;
        Ok(backend.read(scratch.logits(), text.len() - from)?)
    };
    let ours = run(&prompt, 0)?;
    let vocabulary = checkpoint.spec().vocab_size;
    let spread = theirs.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let off = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / spread;
    let mut text = prompt.clone();
    let mut last = ours[ours.len() - vocabulary..].to_vec();
    for _ in 0..answer.len() {
        let best =
            last.iter().enumerate().fold(0, |best, (i, x)| if *x > last[best] { i } else { best });
        text.push(best as u32);
        last = run(&text, text.len() - 1)?;
    }
    Ok((off, text[prompt.len()..] == answer[..]))
}
