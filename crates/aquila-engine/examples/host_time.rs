//! What the scheduler costs: rounds of a simulated executor without and with overlap,
//! the host's time for a round by batch size, and its allocations.
//!
//! `cargo run --release -p aquila-engine --example host_time`

#[path = "../tests/engine/support/mod.rs"]
mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use aquila_engine::{EngineConfig, Scheduler};
use aquila_spec::Shape;
use support::simulated::Simulated;
use support::{config, request};

/// The system's allocator, counting.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ROUNDS: u32 = 200;

/// The time and the allocations of one round of `requests` that decode.
fn measure(requests: usize, pause: Duration, overlapped: bool, shape: Shape) -> (Duration, u64) {
    let config = EngineConfig {
        shape,
        max_total_tokens: requests * 2200,
        max_running_requests: requests,
        chunked_prefill_size: 16 * requests,
        context_length: 2048,
        ..config()
    };
    let mut compute = Simulated::new(&config);
    (compute.pause, compute.remembers) = (pause, false);
    let engine = Scheduler::over(compute, config).unwrap();
    let mut engine = if overlapped { engine.overlapped().unwrap() } else { engine };
    for index in 0..requests {
        let prompt: Vec<u32> = (0..16).map(|at| (index + 7 * at) as u32 % 300).collect();
        engine.submit(request(&prompt, 2000).0).unwrap();
    }
    for _ in 0..20 {
        engine.step();
    }
    let (began, before) = (Instant::now(), ALLOCATIONS.load(Relaxed));
    for _ in 0..ROUNDS {
        engine.step();
    }
    let time = began.elapsed() / ROUNDS;
    let allocations = (ALLOCATIONS.load(Relaxed) - before) / u64::from(ROUNDS);
    assert_eq!(engine.stats().snapshot().running, requests, "everybody still runs");
    engine.abort_all("measured");
    (time, allocations)
}

fn main() {
    let chain = Shape::chain(3);
    println!("rounds of 5 ms, 64 requests:");
    for (overlapped, name) in [(false, "off"), (true, "on ")] {
        for (shape, what) in [(Shape::PLAIN, "plain"), (chain, "chain of 3")] {
            let (time, _) = measure(64, Duration::from_millis(5), overlapped, shape);
            println!("  overlap {name} {what:>10}: {:.3} ms a round", time.as_secs_f64() * 1e3);
        }
    }
    println!("host time of a round, the simulated executor's own work included:");
    for requests in [1, 8, 64, 256] {
        let (time, allocations) = measure(requests, Duration::ZERO, false, chain);
        println!(
            "  {requests:>3} requests: {:>8.1} us, {:>6.2} us each, {allocations} allocations",
            time.as_secs_f64() * 1e6,
            time.as_secs_f64() * 1e6 / requests as f64
        );
    }
}
