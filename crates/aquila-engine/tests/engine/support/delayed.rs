//! An executor that dawdles: some rounds take longer, as a seeded schedule says.

use std::time::Duration;

use aquila_engine::executor::{BatchOutput, Executor, Profile, ScheduledBatch};

use super::Numbers;

pub struct Delayed<C> {
    pub compute: C,
    pub schedule: Numbers,
}

/// A pause of up to two milliseconds, more often none.
pub fn dawdle(schedule: &mut Numbers) {
    if schedule.below(3) == 0 {
        std::thread::sleep(Duration::from_micros(schedule.below(2000)));
    }
}

impl<C: Executor> Executor for Delayed<C> {
    fn profile(&self) -> Profile {
        self.compute.profile()
    }

    fn runs_ahead(&self, batch: &ScheduledBatch) -> bool {
        self.compute.runs_ahead(batch)
    }

    fn enqueue(&mut self, batch: ScheduledBatch) {
        dawdle(&mut self.schedule);
        self.compute.enqueue(batch);
    }

    fn finish(&mut self) -> BatchOutput {
        let done = self.compute.finish();
        dawdle(&mut self.schedule);
        done
    }
}
