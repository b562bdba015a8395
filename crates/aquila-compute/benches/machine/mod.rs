//! What the machine gives, measured with the instruction set in use and all threads: read
//! bandwidth beyond the last-level cache, f32 multiply-adds and int8 products from registers.
#![allow(dead_code)]

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use aquila_compute::cpu::Isa;

/// The figures of one instruction set, for all threads together.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    /// Bytes read per second.
    pub bandwidth: f64,
    /// f32 operations per second; a multiply-add is two.
    pub flops: f64,
    /// int8 operations per second; a multiply-add is two.
    pub int8_ops: f64,
}

/// Runs `work` on every thread at once and answers the wall time of the slowest.
fn together(threads: usize, work: &(dyn Fn(usize) + Sync)) -> Duration {
    let barrier = Barrier::new(threads);
    std::thread::scope(|scope| {
        let spawned: Vec<_> = (0..threads)
            .map(|index| {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    let since = Instant::now();
                    work(index);
                    (since, Instant::now())
                })
            })
            .collect();
        let times: Vec<_> = spawned.into_iter().map(|t| t.join().expect("no panic")).collect();
        let first = times.iter().map(|t| t.0).min().expect("a thread");
        let last = times.iter().map(|t| t.1).max().expect("a thread");
        last - first
    })
}

/// Measures one figure `times` times and keeps the best, since other work can only slow it down.
fn best(times: usize, mut measure: impl FnMut() -> f64) -> f64 {
    (0..times).map(|_| measure()).fold(0.0, f64::max)
}

impl Machine {
    /// Measures this machine.
    pub fn measure(isa: Isa, threads: usize) -> Self {
        let words = (256usize << 20) / 8;
        let memory: Vec<Vec<u64>> = (0..threads).map(|i| vec![i as u64 + 1; words]).collect();
        // Short windows over memory that rotates: a busy machine leaves some of them alone.
        let window = words / 32;
        let mut turn = 0;
        let bandwidth = best(160, || {
            turn = (turn + 1) % 32;
            let time = together(threads, &|index| {
                // SAFETY: the machine has the instructions of an available set.
                unsafe { read(isa, &memory[index][turn * window..(turn + 1) * window]) }
            });
            (threads * window * 8) as f64 / time.as_secs_f64()
        });
        let rounds = 100_000u64;
        let flops = best(200, || {
            // SAFETY: as above.
            let time = together(threads, &|_| unsafe { multiply_add(isa, rounds) });
            (threads as u64 * rounds * FMA_PER_ROUND * 2 * 16) as f64 / time.as_secs_f64()
        });
        let int8_ops = best(200, || {
            // SAFETY: as above.
            let time = together(threads, &|_| unsafe { int8_products(isa, rounds) });
            (threads as u64 * rounds * FMA_PER_ROUND * 2 * 64) as f64 / time.as_secs_f64()
        });
        Self { bandwidth, flops, int8_ops }
    }
}

/// Operations on 16 lanes in one round of the loops below.
const FMA_PER_ROUND: u64 = 6;

unsafe fn read(isa: Isa, words: &[u64]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::*;
        #[target_feature(enable = "avx512f")]
        unsafe fn avx512(words: &[u64]) {
            let mut sums = [_mm512_setzero_si512(); 4];
            for chunk in words.chunks_exact(32) {
                for (i, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: a chunk has 32 words.
                    let x = unsafe { _mm512_loadu_si512(chunk.as_ptr().add(i * 8).cast()) };
                    *sum = _mm512_xor_si512(*sum, x);
                }
            }
            black_box(sums);
        }
        #[target_feature(enable = "avx2")]
        unsafe fn avx2(words: &[u64]) {
            let mut sums = [_mm256_setzero_si256(); 8];
            for chunk in words.chunks_exact(32) {
                for (i, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: a chunk has 32 words.
                    let x = unsafe { _mm256_loadu_si256(chunk.as_ptr().add(i * 4).cast()) };
                    *sum = _mm256_xor_si256(*sum, x);
                }
            }
            black_box(sums);
        }
        match isa {
            // SAFETY: the caller says that the machine has the instructions.
            Isa::Avx512 => return unsafe { avx512(words) },
            // SAFETY: the caller says that the machine has the instructions.
            Isa::Avx2 => return unsafe { avx2(words) },
            Isa::Portable => {}
        }
    }
    let _ = isa;
    black_box(words.iter().fold(0, |a, b| a ^ b));
}

unsafe fn multiply_add(isa: Isa, rounds: u64) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::*;
        #[target_feature(enable = "avx512f")]
        unsafe fn avx512(rounds: u64) {
            let mut sums = [_mm512_set1_ps(1.0); 12];
            let (a, b) = black_box((_mm512_set1_ps(0.999), _mm512_set1_ps(0.001)));
            for _ in 0..rounds / 2 {
                for sum in &mut sums {
                    *sum = _mm512_fmadd_ps(*sum, a, b);
                }
            }
            black_box(sums);
        }
        #[target_feature(enable = "avx2,fma")]
        unsafe fn avx2(rounds: u64) {
            let mut sums = [_mm256_set1_ps(1.0); 12];
            let (a, b) = black_box((_mm256_set1_ps(0.999), _mm256_set1_ps(0.001)));
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = _mm256_fmadd_ps(*sum, a, b);
                }
            }
            black_box(sums);
        }
        match isa {
            // SAFETY: the caller says that the machine has the instructions.
            Isa::Avx512 => return unsafe { avx512(rounds) },
            // SAFETY: the caller says that the machine has the instructions.
            Isa::Avx2 => return unsafe { avx2(rounds) },
            Isa::Portable => {}
        }
    }
    let _ = isa;
    let mut sums = [1.0f32; 16 * FMA_PER_ROUND as usize];
    let (a, b) = black_box((0.999, 0.001));
    for _ in 0..rounds / 64 {
        for sum in &mut sums {
            *sum = aquila_compute::math::fma(*sum, a, b);
        }
    }
    black_box(sums);
}

unsafe fn int8_products(isa: Isa, rounds: u64) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::*;
        #[target_feature(enable = "avx512f,avx512vnni")]
        unsafe fn vnni(rounds: u64) {
            let mut sums = [_mm512_set1_epi32(1); 12];
            let (a, b) = black_box((_mm512_set1_epi8(3), _mm512_set1_epi8(-2)));
            for _ in 0..rounds / 2 {
                for sum in &mut sums {
                    *sum = _mm512_dpbusd_epi32(*sum, a, b);
                }
            }
            black_box(sums);
        }
        #[target_feature(enable = "avx2")]
        unsafe fn avx2(rounds: u64) {
            let mut sums = [_mm256_set1_epi32(1); 12];
            let (mut a, b) = black_box((_mm256_set1_epi8(3), _mm256_set1_epi8(-2)));
            let ones = _mm256_set1_epi16(1);
            for _ in 0..rounds {
                for sum in &mut sums {
                    let pairs = _mm256_maddubs_epi16(a, b);
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
                    // Keeps the products of one round from being shared by the sums.
                    // SAFETY: an empty statement that claims to change `a`.
                    unsafe {
                        std::arch::asm!("/* {0} */", inout(ymm_reg) a, options(nomem, nostack));
                    }
                }
            }
            black_box(sums);
        }
        let has_vnni = is_x86_feature_detected!("avx512vnni");
        match isa {
            // SAFETY: the caller says that the machine has the instructions.
            Isa::Avx512 if has_vnni => return unsafe { vnni(rounds) },
            // SAFETY: the caller says that the machine has the instructions.
            Isa::Avx512 | Isa::Avx2 => return unsafe { avx2(rounds) },
            Isa::Portable => {}
        }
    }
    let _ = (isa, rounds);
}
