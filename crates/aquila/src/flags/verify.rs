//! How drafts are verified.

use aquila_spec::Verify;
use clap::{Args, ValueEnum};

use crate::error::{Error, Result};

/// The flags about that.
#[derive(Args, Debug, Clone, Default)]
pub struct VerifyFlags {
    /// How the drafts of sampled requests are verified [default: match]
    #[arg(long, value_enum, value_name = "HOW")]
    speculative_verify: Option<How>,

    /// target-only: accept drafts that are at least this likely [default: 1]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    speculative_accept_threshold_single: Option<f64>,

    /// target-only: divide coins by this [default: 1]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    speculative_accept_threshold_acc: Option<f64>,

    /// The same as --speculative-verify rejection
    #[arg(long)]
    speculative_use_rejection_sampling: bool,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    /// A draft is right if it is what plain decoding would have chosen: the same text
    Match,
    /// SGLang's way: by the target's probability; lossy where a threshold is below 1
    TargetOnly,
    /// Rejection sampling: the same distribution, another text
    Rejection,
}

impl VerifyFlags {
    /// The first that is given.
    pub fn given(&self) -> Option<&'static str> {
        let given = [
            ("--speculative-verify", self.speculative_verify.is_some()),
            (
                "--speculative-accept-threshold-single",
                self.speculative_accept_threshold_single.is_some(),
            ),
            ("--speculative-accept-threshold-acc", self.speculative_accept_threshold_acc.is_some()),
            ("--speculative-use-rejection-sampling", self.speculative_use_rejection_sampling),
        ];
        given.iter().find_map(|(flag, given)| given.then_some(*flag))
    }

    /// What they come to.
    pub fn resolve(&self) -> Result<Verify> {
        let single = ("single", self.speculative_accept_threshold_single);
        let accumulated = ("acc", self.speculative_accept_threshold_acc);
        for (which, threshold) in [single, accumulated] {
            if threshold.is_some_and(|t| !(0.0..=1.0).contains(&t)) {
                return Err(Error::Usage(format!(
                    "--speculative-accept-threshold-{which} must be from 0 to 1"
                )));
            }
        }
        let thresholds = single.1.or(accumulated.1).is_some();
        let rejection = self.speculative_use_rejection_sampling;
        let how = match (self.speculative_verify, thresholds, rejection) {
            (Some(How::TargetOnly), _, false) | (None, true, false) => How::TargetOnly,
            (Some(How::Rejection), false, _) | (None, false, true) => How::Rejection,
            (Some(How::Match) | None, false, false) => How::Match,
            (_, true, _) => {
                return Err(Error::Usage(
                    "--speculative-accept-threshold-single and -acc are for \
                     --speculative-verify target-only"
                        .into(),
                ));
            }
            (_, false, true) => {
                return Err(Error::Usage(
                    "--speculative-use-rejection-sampling is --speculative-verify rejection: \
                     give one of them"
                        .into(),
                ));
            }
        };
        Ok(match how {
            How::Match => Verify::Match,
            How::Rejection => Verify::Rejection,
            How::TargetOnly => Verify::TargetOnly {
                single: single.1.unwrap_or(1.0),
                accumulated: accumulated.1.unwrap_or(1.0),
            },
        })
    }
}
