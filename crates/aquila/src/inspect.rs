//! `aquila inspect`: what a checkpoint is, and whether Aquila can serve it or draft with it.

use std::io::{Write, stdout};
use std::process::ExitCode;

use aquila_model::Inspection;
use aquila_spec::policy::CostTable;
use clap::Args;
use clap::builder::Resettable;

use crate::Algorithms;
use crate::after_help::AFTER_HELP;
use crate::error::{Error, Result};
use crate::flags::{EngineFlags, ModelFlags, named};
use crate::start::build;

/// Say what a checkpoint is, and whether Aquila can serve it or draft with it.
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Inspect {
    #[command(flatten)]
    model: ModelFlags,

    /// Print JSON
    #[arg(long, help_heading = Resettable::Reset)]
    json: bool,

    /// Say what rounds cost here, with the model and its draft as the other flags have them; it is
    /// measured now unless an earlier start has
    #[arg(long, help_heading = Resettable::Reset)]
    costs: bool,

    #[command(flatten)]
    engine: EngineFlags,
}

impl Inspect {
    /// Prints the inspection; exit code 1 if it is neither a model to serve nor a head to draft with.
    pub fn run(&self, algorithms: &Algorithms) -> Result<ExitCode> {
        if self.costs {
            return self.print_costs(algorithms);
        }
        let inspection = Inspection::of(&self.model.find(false)?)?;
        let text = if self.json {
            serde_json::to_string_pretty(&inspection).map_err(|e| Error::Other(e.to_string()))?
        } else {
            let setting = inspection.setting.map(named::setting);
            let with = setting.map(|flags| format!("{:<14} {flags}\n", "see"));
            format!("{inspection}{}", with.unwrap_or_default())
        };
        print(&text)?;
        Ok(if inspection.servable || inspection.can_draft {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }

    fn print_costs(&self, algorithms: &Algorithms) -> Result<ExitCode> {
        let built = build(&self.model, &self.engine, algorithms, self.json)?;
        let drafting = built.engine.stats().drafting();
        let Some(costs) = &drafting.costs else {
            return Err(Error::Usage(
                "--costs is about what --speculative-policy auto goes by: it needs something that \
                 drafts and no flag that fixes its trees"
                    .into(),
            ));
        };
        print(&if self.json { costs.to_json() } else { table(costs) })?;
        Ok(ExitCode::SUCCESS)
    }
}

fn print(text: &str) -> Result<()> {
    let printed = writeln!(stdout(), "{}", text.trim_end());
    printed.map_err(|e| Error::output("standard output", e))
}

/// What rounds cost, for people.
fn table(costs: &CostTable) -> String {
    let line = |name: String, seconds: &mut dyn Iterator<Item = f64>| {
        seconds.fold(format!("{name:<24}"), |line, s| format!("{line}{:>10.0}", s * 1e6))
    };
    let head = |name: &str, points: &[usize], unit: &str| {
        let points = points.iter().map(|point| format!("{:>10}", format!("{point} {unit}")));
        format!("{name:<24}{}", points.collect::<String>())
    };
    let mut lines = vec![costs.key.clone(), String::new()];
    lines.push(head("verify, µs", &costs.rows, "rows"));
    lines.push(line("  1 request".into(), &mut costs.verify.iter().copied()));
    lines.push(line("  each request more".into(), &mut std::iter::once(costs.request)));
    lines.extend([String::new(), head("draft, µs", &costs.steps, "steps")]);
    for (batch, row) in costs.batches.iter().zip(&costs.draft) {
        lines.push(line(format!("  {batch} requests"), &mut row.iter().copied()));
    }
    lines.push(format!("\n{:<24}{:>10.1}", "draft, µs a prompt row", costs.draft_row * 1e6));
    lines.join("\n")
}
