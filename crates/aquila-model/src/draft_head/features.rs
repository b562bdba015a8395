//! Hidden states of a target on their way into an EAGLE-3 head: normed, if at all, and joined.

use aquila_compute::{Accumulate, Backend};

use super::{Eagle3Spec, FeatureNorm};
use crate::Result;
use crate::block::Linear;
use crate::loading::Loading;

/// How hidden states of the target become one of the head.
pub(super) struct Features<B: Backend> {
    norm: FeatureNorm,
    /// Width of one hidden state, and of all that are joined.
    width: usize,
    inputs: usize,
    epsilon: f32,
    /// As many as `norm` says.
    norms: Vec<B::Vector>,
    fc: Linear<B>,
}

/// The target's hidden states of a pass, and where they are normed.
pub(super) struct FeatureRows<B: Backend> {
    /// The hidden states, side by side.
    pub given: B::Rows,
    /// One of them before its norm, or all of them after theirs.
    room: Option<B::Rows>,
}

impl<B: Backend> Features<B> {
    /// Loads them; none where the head has no `fc`.
    pub fn load(loading: &mut Loading<'_, B>, spec: &Eagle3Spec) -> Result<Option<Self>> {
        let Some(fc) = spec.fc() else { return Ok(None) };
        let norms = spec.feature_norms();
        let norms = norms.iter().map(|norm| loading.norm(norm, &spec.layer));
        Ok(Some(Self {
            norm: spec.feature_norm,
            width: spec.target_hidden_size,
            inputs: spec.fc_inputs(),
            epsilon: spec.layer.norm.epsilon,
            norms: norms.collect::<Result<_>>()?,
            fc: loading.linear(&fc)?,
        }))
    }

    /// Buffers for passes up to `rows` rows.
    pub fn rows(&self, backend: &B, rows: usize) -> Result<FeatureRows<B>> {
        let width = match self.norm {
            FeatureNorm::None => None,
            FeatureNorm::Whole => Some(self.inputs),
            FeatureNorm::Each => Some(self.width),
        };
        let room = |width: usize| backend.rows(rows, width);
        Ok(FeatureRows { given: room(self.inputs)?, room: width.map(room).transpose()? })
    }

    /// Joins the first `rows` rows of what was given into `out`.
    pub fn join(
        &self,
        backend: &B,
        rows: usize,
        there: &mut FeatureRows<B>,
        out: &mut B::Rows,
    ) -> Result<()> {
        let FeatureRows { given, room } = there;
        let input = match (self.norm, room) {
            (FeatureNorm::Each, Some(part)) => {
                for (index, norm) in self.norms.iter().enumerate() {
                    let column = index * self.width;
                    backend.take_columns(given, rows, column, part)?;
                    backend.rms_norm_columns(part, norm, self.epsilon, rows, column, given)?;
                }
                given
            }
            (FeatureNorm::Whole, Some(normed)) => {
                for norm in &self.norms {
                    backend.rms_norm(given, norm, self.epsilon, rows, normed)?;
                }
                normed
            }
            _ => given,
        };
        self.fc.project(backend, input, rows, Accumulate::Set, out)
    }
}
