//! Rotary embedding: by which angle each pair of a head is rotated, per position.
//!
//! The formulas are those of transformers' `modeling_rope_utils`, whose outputs our tests compare
//! with; all powers and logarithms are our own, so a table is the same on every machine.

use aquila_compute::RopeTable;
use aquila_compute::math::{ln, powf};

use crate::Result;
use crate::config::Settings;

/// How positions become angles.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSpec {
    /// The base of the frequencies.
    pub theta: f64,
    /// How the frequencies are stretched.
    pub kind: RopeKind,
}

/// How frequencies are stretched for contexts longer than those of the first training.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeKind {
    /// Not at all.
    Default,
    /// All frequencies are divided by one factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Low frequencies by a factor, high ones not, with a ramp between (Llama 3.1).
    Llama3 {
        /// Low frequencies are divided by this.
        factor: f64,
        /// Waves longer than the original context over this are low.
        low_freq_factor: f64,
        /// Waves shorter than the original context over this are high.
        high_freq_factor: f64,
        /// The context of the first training.
        original_positions: f64,
    },
    /// YaRN: a ramp over dimensions, and cosines and sines scaled.
    Yarn {
        /// Low frequencies are divided by this.
        factor: f64,
        /// Rotations over the original context above which a dimension is left alone.
        beta_fast: f64,
        /// Rotations over the original context below which a dimension is stretched fully.
        beta_slow: f64,
        /// The context of the first training.
        original_positions: f64,
        /// What cosines and sines are multiplied by.
        attention_factor: f64,
        /// Whether the ramp begins and ends at whole dimensions.
        truncate: bool,
    },
}

impl RopeSpec {
    /// Reads `rope_parameters` (or `rope_scaling` and a top-level `rope_theta`, its older form).
    pub(crate) fn read(config: &Settings<'_>, max_positions: usize) -> Result<Self> {
        let rope = config.object("rope_parameters")?.or(config.object("rope_scaling")?);
        let theta = base(config, "rope_theta")?.unwrap_or(10_000.0);
        Self::scaled(config, rope, theta, max_positions)
    }

    /// Frequencies of base `theta`, unless `rope` says another, stretched as `rope` says.
    pub(crate) fn scaled(
        config: &Settings<'_>,
        rope: Option<Settings<'_>>,
        theta: f64,
        max_positions: usize,
    ) -> Result<Self> {
        for settings in [Some(*config), rope].into_iter().flatten() {
            if settings.positive("partial_rotary_factor")?.is_some_and(|f| f != 1.0) {
                return Err(config.unsupported("partial_rotary_factor below 1 is not supported"));
            }
        }
        let Some(rope) = rope else { return Ok(Self { theta, kind: RopeKind::Default }) };
        let theta = base(&rope, "rope_theta")?.unwrap_or(theta);
        let name = match rope.text("rope_type")? {
            Some(name) => name,
            None => rope.text("type")?.unwrap_or("default"),
        };
        let factor = || match rope.positive("factor")? {
            Some(f) if f >= 1.0 => Ok(f),
            Some(f) => Err(rope.wrong("factor", format!("must be at least 1, found {f}"))),
            None => Err(rope.wrong("factor", format!("is missing, and {name} needs it"))),
        };
        let original = || -> Result<f64> {
            let own = rope.size_if_any("original_max_position_embeddings")?;
            let top = config.size_if_any("original_max_position_embeddings")?;
            Ok(own.or(top).unwrap_or(max_positions) as f64)
        };
        let kind = match name {
            "default" => RopeKind::Default,
            "linear" => RopeKind::Linear { factor: factor()? },
            "llama3" => {
                let needed =
                    |field| rope.positive(field)?.ok_or_else(|| rope.wrong(field, "is missing"));
                let low_freq_factor = needed("low_freq_factor")?;
                let high_freq_factor = needed("high_freq_factor")?;
                if high_freq_factor <= low_freq_factor {
                    return Err(rope.wrong(
                        "high_freq_factor",
                        format!("must be above low_freq_factor, found {high_freq_factor}"),
                    ));
                }
                RopeKind::Llama3 {
                    factor: factor()?,
                    low_freq_factor,
                    high_freq_factor,
                    original_positions: original()?,
                }
            }
            "yarn" => {
                let factor = factor()?;
                let spread = |scale: f64| 0.1 * scale * ln(factor) + 1.0;
                let mscale = rope.positive("mscale")?;
                let mscale_all = rope.positive("mscale_all_dim")?;
                let attention_factor =
                    match (rope.positive("attention_factor")?, mscale, mscale_all) {
                        (Some(given), ..) => given,
                        (None, Some(one), Some(all)) => spread(one) / spread(all),
                        _ => spread(1.0),
                    };
                let beta_fast = rope.positive("beta_fast")?.unwrap_or(32.0);
                let beta_slow = rope.positive("beta_slow")?.unwrap_or(1.0);
                if theta <= 1.0 {
                    return Err(rope.wrong("rope_theta", format!("must be above 1, found {theta}")));
                }
                RopeKind::Yarn {
                    factor,
                    beta_fast,
                    beta_slow,
                    original_positions: original()?,
                    attention_factor,
                    truncate: rope.flag("truncate", true)?,
                }
            }
            other => {
                return Err(config.unsupported(format!("rope type {other:?} is not supported")));
            }
        };
        Ok(Self { theta, kind })
    }

    /// One frequency per pair of a head of width `head_dim`.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f64> {
        let dim = head_dim as f64;
        let plain = |i: usize| 1.0 / powf(self.theta, 2.0 * i as f64 / dim);
        (0..head_dim / 2).map(|i| self.stretch(plain(i), i as f64, dim)).collect()
    }

    fn stretch(&self, frequency: f64, index: f64, dim: f64) -> f64 {
        match self.kind {
            RopeKind::Default => frequency,
            RopeKind::Linear { factor } => frequency / factor,
            RopeKind::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
                let wave = std::f64::consts::TAU / frequency;
                if wave < original_positions / high_freq_factor {
                    frequency
                } else if wave > original_positions / low_freq_factor {
                    frequency / factor
                } else {
                    let smooth = (original_positions / wave - low_freq_factor)
                        / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
            RopeKind::Yarn {
                factor, beta_fast, beta_slow, original_positions, truncate, ..
            } => {
                let dimension_of = |rotations: f64| {
                    dim * ln(original_positions / (rotations * std::f64::consts::TAU))
                        / (2.0 * ln(self.theta))
                };
                let (mut low, mut high) = (dimension_of(beta_fast), dimension_of(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let low = low.max(0.0);
                let mut high = high.min(dim - 1.0);
                if low == high {
                    high += 0.001;
                }
                let ramp = ((index - low) / (high - low)).clamp(0.0, 1.0);
                frequency / factor * ramp + frequency * (1.0 - ramp)
            }
        }
    }

    /// The table for `positions` positions of heads of width `head_dim`.
    pub fn table(&self, head_dim: usize, positions: usize) -> RopeTable {
        let scale = match self.kind {
            RopeKind::Yarn { attention_factor, .. } => attention_factor,
            _ => 1.0,
        };
        RopeTable::new(positions, &self.frequencies(head_dim), scale)
    }
}

/// A base of frequencies, if `field` has one.
pub(crate) fn base(settings: &Settings<'_>, field: &str) -> Result<Option<f64>> {
    match settings.positive(field)? {
        Some(given) if given < 1.0 => {
            Err(settings.wrong(field, format!("must be at least 1, found {given}")))
        }
        given => Ok(given),
    }
}

impl std::fmt::Display for RopeSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "theta {}", self.theta)?;
        match &self.kind {
            RopeKind::Default => Ok(()),
            RopeKind::Linear { factor } => write!(f, ", linear × {factor}"),
            RopeKind::Llama3 { factor, original_positions, .. } => {
                write!(f, ", llama3 × {factor} from {original_positions}")
            }
            RopeKind::Yarn { factor, original_positions, .. } => {
                write!(f, ", yarn × {factor} from {original_positions}")
            }
        }
    }
}
