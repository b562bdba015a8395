//! A compute lane that dawdles: some rounds take longer, as a seeded schedule says.

use std::time::Duration;

use aquila_engine::lanes::{Compute, Done, Job, Profile};

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

impl<C: Compute> Compute for Delayed<C> {
    fn profile(&self) -> Profile {
        self.compute.profile()
    }

    fn run(&mut self, job: Job) -> Done {
        dawdle(&mut self.schedule);
        let done = self.compute.run(job);
        dawdle(&mut self.schedule);
        done
    }
}
