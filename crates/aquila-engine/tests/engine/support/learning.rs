//! Policies that learn while they decide.

use aquila_spec::Shape;
use aquila_spec::policy::{
    Adaptive, AdaptiveTable, Auto, AutoSettings, CostTable, Policy, Timed, Timing,
};

/// One of each kind; what a round costs is made up, so that they switch.
pub fn live_policies() -> [Box<dyn Policy>; 2] {
    let time = |timing| -> Result<Option<Timed>, ()> {
        Ok(Some(match timing {
            Timing::Round { batch, steps } => {
                let rows = batch * (steps + 1);
                let verify = 1e-3 * (1.0 + 0.12 * rows as f64);
                Timed { rows, verify, draft: 6e-5 * steps as f64 }
            }
            Timing::DraftRow => Timed { rows: 0, verify: 0.0, draft: 1e-5 },
        }))
    };
    let table = CostTable::measure("made up".into(), &[1, 8, 32], 7, time).unwrap();
    let adaptive = Adaptive::new(AdaptiveTable::default(), Some(7), Vec::new()).unwrap();
    [Box::new(adaptive), Box::new(Auto::new(AutoSettings::new(Shape::chain(7)), table))]
}
