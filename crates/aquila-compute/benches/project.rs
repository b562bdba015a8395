//! Packed products against what the machine gives.
//!
//! `cargo bench -p aquila-compute --bench project -- [--isa avx512|avx2|portable] [--threads N]
//! [--format bf16|int8|f32] [--rows 1,2,4] [--shape INxOUT] [--repeat N]
//! [--pool MIB]`
//!
//! Weights rotate through a pool larger than the last-level cache. A repetition visits every row
//! count once, so that whatever else the machine does meets all of them; the median counts.

use std::time::Instant;

use aquila_compute::cpu::{CpuBackend, Isa, IsaChoice};
use aquila_compute::{Accumulate, Backend, HostTensor, WeightFormat};

mod machine;
use machine::Machine;

/// Bytes of weights to rotate through, unless `--pool` says otherwise.
const POOL: usize = 192 << 20;

struct Options {
    isas: Vec<Isa>,
    threads: usize,
    formats: Vec<WeightFormat>,
    rows: Vec<usize>,
    shapes: Vec<(usize, usize)>,
    repeat: usize,
    pool: usize,
}

fn options() -> Options {
    let mut options = Options {
        isas: Isa::available().into_iter().filter(|isa| *isa != Isa::Portable).collect(),
        threads: 0,
        formats: vec![WeightFormat::Bf16, WeightFormat::Int8],
        rows: vec![1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32],
        shapes: vec![
            (2048, 2048),
            (1536, 2560),
            (1536, 1536),
            (1536, 8192),
            (4096, 1536),
            (1536, 32000),
        ],
        repeat: 60,
        pool: POOL,
    };
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let mut value = || args.next().unwrap_or_else(|| panic!("{flag} needs a value"));
        match flag.as_str() {
            "--isa" => {
                let name = value();
                options.isas =
                    Isa::available().into_iter().filter(|i| i.to_string() == name).collect();
            }
            "--threads" => options.threads = value().parse().expect("a number"),
            "--pool" => options.pool = value().parse::<usize>().expect("MiB") << 20,
            "--repeat" => options.repeat = value().parse().expect("a number"),
            "--rows" => {
                options.rows = value().split(',').map(|r| r.parse().expect("a number")).collect();
            }
            "--format" => {
                options.formats = vec![match value().as_str() {
                    "bf16" => WeightFormat::Bf16,
                    "f32" => WeightFormat::F32,
                    "int8" => WeightFormat::Int8,
                    other => panic!("no format {other}"),
                }];
            }
            "--shape" => {
                let shape = value();
                let (inputs, outputs) = shape.split_once('x').expect("INxOUT");
                options.shapes =
                    vec![(inputs.parse().expect("a number"), outputs.parse().expect("a number"))];
            }
            _ => {}
        }
    }
    options
}

fn main() {
    let options = options();
    for &isa in &options.isas {
        let backend = CpuBackend::new(IsaChoice::Only(isa), options.threads).expect("available");
        let machine = Machine::measure(isa, backend.threads());
        println!(
            "{}: reads {:.1} GB/s, f32 {:.0} GFLOP/s, int8 {:.0} GOP/s",
            backend.describe(),
            machine.bandwidth / 1e9,
            machine.flops / 1e9,
            machine.int8_ops / 1e9
        );
        for &format in &options.formats {
            for &(inputs, outputs) in &options.shapes {
                shape(&backend, machine, format, inputs, outputs, &options);
            }
        }
    }
}

fn shape(
    backend: &CpuBackend,
    machine: Machine,
    format: WeightFormat,
    inputs: usize,
    outputs: usize,
    options: &Options,
) {
    let bytes = CpuBackend::packed_bytes(outputs, inputs, format);
    let values: Vec<f32> =
        (0..inputs * outputs).map(|i| ((i * 2_654_435_761) % 1009) as f32 / 1009.0 - 0.5).collect();
    let tensor = HostTensor::from_f32_as_bf16("w", vec![outputs, inputs], &values).expect("fits");
    let count = options.pool.div_ceil(bytes).max(1);
    let weights: Vec<_> = (0..count)
        .map(|_| backend.pack(std::slice::from_ref(&tensor), format).expect("memory"))
        .collect();
    let most = options.rows.iter().copied().max().unwrap_or(1);
    let mut input = backend.rows(most, inputs).expect("memory");
    for row in 0..most {
        for (i, x) in input.row_mut(row).iter_mut().enumerate() {
            *x = ((i + row) % 17) as f32 / 17.0 - 0.4;
        }
    }
    let mut out = backend.rows(most, outputs).expect("memory");
    let mut next = 0;
    let mut times = vec![Vec::new(); options.rows.len()];
    for repetition in 0..=options.repeat {
        for (times, &rows) in times.iter_mut().zip(&options.rows) {
            let calls = 1;
            let since = Instant::now();
            for _ in 0..calls {
                backend
                    .project(&weights[next % count], None, &input, rows, Accumulate::Set, &mut out)
                    .expect("fits");
                next += 1;
            }
            if repetition > 0 {
                times.push(since.elapsed().as_secs_f64() / calls as f64);
            }
        }
    }
    println!("\n{format:?} {inputs} -> {outputs}, {:.1} MB", bytes as f64 / 1e6);
    println!("  rows    best µs  median µs   spread     GB/s   GFLOP/s  of bound");
    for (times, &rows) in times.iter_mut().zip(&options.rows) {
        times.sort_by(f64::total_cmp);
        let (best, median) = (times[0], times[times.len() / 2]);
        let spread = times[times.len() * 9 / 10] - times[times.len() / 10];
        let work = 2.0 * (rows * inputs * outputs) as f64;
        let (share, peak, slack) = match format {
            WeightFormat::Int8 => (0.6, machine.int8_ops, 1.3),
            _ => (0.7, machine.flops, 1.2),
        };
        // One row alone must reach the bound; more rows may take `slack` times as long.
        let slack = if rows == 1 { 1.0 } else { slack };
        let bound = (bytes as f64 / (0.8 * machine.bandwidth)).max(work / (share * peak)) * slack;
        println!(
            "  {rows:4} {:10.1} {:10.1} {:7.0} % {:8.1} {:9.1} {:9.2} {}",
            best * 1e6,
            median * 1e6,
            spread / median * 100.0,
            bytes as f64 / median / 1e9,
            work / median / 1e9,
            median / bound,
            if median <= bound {
                "pass"
            } else if best <= bound {
                "pass at best"
            } else {
                "MISS"
            }
        );
    }
}
