//! Compares every operation of the CUDA backend with its definition, bit for bit, then times.
//!
//! `cuda_check [check [small]] [kernels [small]] [rounds [LIVES]] [time] [projections] [compare] [steps]
//! [--kernels FILE] [--seed=N]`: by plain arithmetic against the CPU backend, by tensor cores against
//! `cuda::contract`; fresh random inputs, odd and even sizes, 1 to 1,024 rows, outputs that hold NaN
//! before. `kernels` are those of projections one by one, which `check` has too, and `compare` times them
//! beside each other. Prints tables last; exits with 1 where a bit differs, with 2
//! where there is no CUDA device. Needs neither cargo nor a toolkit: copy the executable.

mod attention;
mod chain;
mod experts;
mod passes;
mod plain;
mod random;
mod random_weights;
mod replays;
mod requests;
mod rounds;
mod step_timing;
mod tensor;
mod timing;

use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use aquila_compute::cuda::{Arithmetic, CudaBackend};
use aquila_compute::{Backend, Error, Result};

use crate::random::Random;

/// What was compared, and what differed.
#[derive(Default)]
struct Findings {
    comparisons: usize,
    values: usize,
    failed: Vec<String>,
}

impl Findings {
    /// Counts one comparison of values with what they should be.
    fn compare(&mut self, what: &str, got: &[f32], want: &[f32]) {
        self.comparisons += 1;
        self.values += want.len();
        let same = |(got, want): (&f32, &f32)| got.to_bits() == want.to_bits();
        let differing = got.iter().zip(want).filter(|&pair| !same(pair)).count();
        if got.len() == want.len() && differing == 0 {
            return;
        }
        let first = got.iter().zip(want).position(|pair| !same(pair));
        let example = first.map(|at| format!("value {at}: {:e}, not {:e}", got[at], want[at]));
        self.failed.push(format!(
            "{what}: {differing} of {} values differ (got {}); {}",
            want.len(),
            got.len(),
            example.unwrap_or_default()
        ));
        eprintln!("FAILED {}", self.failed[self.failed.len() - 1]);
    }

    fn report(&self, name: &str) {
        let (comparisons, values) = (self.comparisons, self.values);
        let failed = self.failed.len();
        println!("{name}: {comparisons} comparisons of {values} values, {failed} failed");
        self.failed.iter().take(12).for_each(|failed| println!("  {failed}"));
    }
}

fn run(words: &[String]) -> Result<bool> {
    let asked = |word: &str| words.iter().any(|w| w == word);
    let parts = ["check", "kernels", "rounds", "time", "projections", "compare", "steps"];
    let all = !parts.iter().any(|part| asked(part));
    let image = words.iter().position(|word| word == "--kernels").and_then(|at| words.get(at + 1));
    let open = |arithmetic| match image {
        None => CudaBackend::new(0, arithmetic),
        Some(file) => {
            let image = std::fs::read(file)
                .map_err(|error| Error::Unavailable(format!("{file}: {error}")))?;
            CudaBackend::with_kernels(0, arithmetic, image)
        }
    };
    // A seed that is printed, so that a failure can be repeated.
    let seed = words.iter().find_map(|word| word.strip_prefix("--seed=")?.parse().ok());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_secs());
    let mut random = Random(seed.unwrap_or(now));
    println!("seed {}", random.0);
    let mut sound = true;
    if all || asked("check") {
        let backend = open(Arithmetic::Plain)?;
        println!("{}", backend.describe());
        let mut findings = Findings::default();
        plain::check(&backend, &mut random, asked("small"), &mut findings)?;
        experts::check_plain(&backend, &mut random, asked("small"), &mut findings)?;
        replays::check(&backend, &mut random, &mut findings)?;
        findings.report("plain arithmetic = CPU backend");
        sound &= findings.failed.is_empty();
        let mut enqueued = Findings::default();
        passes::check(&backend, &mut random, &mut enqueued)?;
        let mut drawn = Findings::default();
        random_weights::check(&backend, &mut random, asked("small"), &mut drawn)?;

        let backend = open(Arithmetic::Tensor)?;
        println!("{}", backend.describe());
        random_weights::check(&backend, &mut random, asked("small"), &mut drawn)?;
        drawn.report("random weights of the device = of the host");
        sound &= drawn.failed.is_empty();
        let mut findings = Findings::default();
        tensor::check(&backend, &mut random, asked("small"), &mut findings)?;
        experts::check_tensor(&backend, &mut random, asked("small"), &mut findings)?;
        let mut bounded = open(Arithmetic::Tensor)?;
        attention::check_room(&mut bounded, &mut random, asked("small"), &mut findings)?;
        findings.report("tensor cores = contract");
        sound &= findings.failed.is_empty();
        passes::check(&backend, &mut random, &mut enqueued)?;
        enqueued.report("passes enqueued at once = passes waited for");
        sound &= enqueued.failed.is_empty();
    }
    if all || asked("check") || asked("kernels") {
        let mut backend = open(Arithmetic::Tensor)?;
        let mut findings = Findings::default();
        tensor::check_kernels(&mut backend, &mut random, asked("small"), &mut findings)?;
        findings.report("every kernel of projections = contract");
        sound &= findings.failed.is_empty();
    }
    if all || asked("rounds") {
        let lives = words.iter().skip_while(|word| *word != "rounds").nth(1);
        let lives = lives.and_then(|lives| lives.parse().ok()).unwrap_or(300);
        let (backend, tensor) = (open(Arithmetic::Plain)?, open(Arithmetic::Tensor)?);
        let mut findings = Findings::default();
        rounds::check(&backend, &tensor, &mut random, lives, &mut findings)?;
        findings.report("rounds on the device = rounds on the CPU");
        sound &= findings.failed.is_empty();
    }
    if all || asked("steps") {
        step_timing::time(&open(Arithmetic::Tensor)?, &mut random)?;
    }
    if all || asked("time") || asked("projections") {
        let mut backend = open(Arithmetic::Tensor)?;
        timing::projections(&mut backend, &mut random)?;
        if !asked("projections") {
            chain::time(&mut backend, &mut random)?;
        }
    }
    if asked("compare") {
        timing::kernels(&mut open(Arithmetic::Tensor)?, &mut random)?;
    }
    Ok(sound)
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match run(&words) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            println!("{error}");
            ExitCode::from(if matches!(error, Error::Unavailable(_)) { 2 } else { 1 })
        }
    }
}
