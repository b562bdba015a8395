//! What the next tree of a request begins with, on its way from and to other machines.

use std::sync::Arc;

use super::layout::{SEEDED, SEEDED_WITH_NOTHING, Sequence};
use super::state::CudaState;
use crate::cuda::device::Device;
use crate::round::{Candidates, Verify};
use crate::sampling::{Candidate, Weights};
use crate::{Error, Result};

impl CudaState {
    /// Waits for the device and answers what the next tree of the request at `place` begins with.
    pub(in crate::cuda) fn read_seed(
        &self,
        device: &Device,
        place: usize,
    ) -> Result<Option<Candidates>> {
        let sequence = self.sequence(device, place)?;
        if sequence.seeded != SEEDED {
            return Ok(None);
        }
        let most = self.parts.candidates as usize;
        let count = (sequence.seed_count as usize).min(most);
        let at = 4 * (place * most) as u64;
        let (mut tokens, mut probabilities) = (vec![0u32; count], vec![0f32; count]);
        // SAFETY: the state has room for as many candidates of each place.
        unsafe {
            device.read_at(self.parts.seed_tokens + at, &mut tokens)?;
            device.read_at(self.parts.seed_probabilities + at, &mut probabilities)?;
        }
        let pairs = tokens.into_iter().zip(probabilities);
        let candidates = pairs.map(|(token, probability)| Candidate { token, probability });
        let drawn_from = match sequence.seed_drawn != 0 {
            true => Some(Arc::new(self.read_drawn(device, place)?)),
            false => None,
        };
        Ok(Some(Candidates { candidates: candidates.collect(), drawn_from }))
    }

    /// Replaces it.
    pub(in crate::cuda) fn write_seed(
        &self,
        device: &Device,
        place: usize,
        seed: Option<&Candidates>,
    ) -> Result<()> {
        let mut sequence = self.sequence(device, place)?;
        sequence.seeded = SEEDED_WITH_NOTHING;
        if let Some(Candidates { candidates, drawn_from }) = seed {
            let most = self.parts.candidates as usize;
            let kept = &candidates[..candidates.len().min(most)];
            let tokens: Vec<u32> = kept.iter().map(|candidate| candidate.token).collect();
            let probabilities: Vec<f32> = kept.iter().map(|c| c.probability).collect();
            let at = 4 * (place * most) as u64;
            // SAFETY: the state has room for as many candidates of each place.
            unsafe {
                device.write_at(self.parts.seed_tokens + at, &tokens)?;
                device.write_at(self.parts.seed_probabilities + at, &probabilities)?;
            }
            if let Some(weights) = drawn_from {
                self.write_drawn(device, place, weights)?;
            }
            sequence.seeded = SEEDED;
            sequence.seed_count = kept.len() as u32;
            sequence.seed_drawn = u32::from(drawn_from.is_some());
        }
        // SAFETY: the place is one of the state's.
        unsafe { device.write_at(self.sequence_at(place), &[sequence]) }
    }

    fn sequence_at(&self, place: usize) -> u64 {
        self.parts.sequences + (place * size_of::<Sequence>()) as u64
    }

    fn sequence(&self, device: &Device, place: usize) -> Result<Sequence> {
        if place >= self.bounds.places {
            return Err(Error::Device(format!("place {place} of {}", self.bounds.places)));
        }
        let mut sequence = [Sequence::default()];
        // SAFETY: the place is one of the state's.
        unsafe { device.read_at(self.sequence_at(place), &mut sequence)? };
        let [sequence] = sequence;
        Ok(sequence)
    }

    /// Where the distribution is that the seed of a place was drawn from: `drawn_of_seed` in
    /// `state.cuh`.
    fn drawn_at(&self) -> Result<impl Fn(usize) -> usize> {
        if self.bounds.verify != Verify::Rejection {
            return Err(Error::Device("a draw where nothing is drawn".into()));
        }
        let (steps, topk) = (self.bounds.shape.steps(), self.bounds.shape.topk());
        Ok(move |place| place * (1 + (steps.max(1) - 1) * topk))
    }

    fn read_drawn(&self, device: &Device, place: usize) -> Result<Weights> {
        let at = self.drawn_at()?(place);
        let vocabulary = self.bounds.vocabulary;
        let mut weights = vec![0f32; vocabulary];
        let address = self.parts.drawn + 4 * (at * vocabulary) as u64;
        // SAFETY: the state has room for the distribution of each place's seed.
        unsafe { device.read_at(address, &mut weights)? };
        let tokens = weights.iter().zip(0..).map(|(&weight, token)| (token, f64::from(weight)));
        Ok(Weights::new(tokens.collect()))
    }

    fn write_drawn(&self, device: &Device, place: usize, weights: &Weights) -> Result<()> {
        let at = self.drawn_at()?(place);
        let vocabulary = self.bounds.vocabulary;
        let mut row = vec![0f32; vocabulary];
        for &(token, weight) in &weights.tokens {
            let to = row.get_mut(token as usize);
            *to.ok_or_else(|| Error::Device(format!("token {token} of {vocabulary}")))? =
                weight as f32;
        }
        let address = self.parts.drawn + 4 * (at * vocabulary) as u64;
        // SAFETY: as above.
        unsafe {
            device.write_at(address, &row)?;
            device.write_at(self.parts.drawn_totals + 8 * at as u64, &[weights.total])
        }
    }
}
