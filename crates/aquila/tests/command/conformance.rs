//! A head, n-grams and a mix hold to what every algorithm must hold to, and one that declares less than
//! it keeps does not. The other built-in algorithms hold to it, too (`aquila conformance NAME`); that
//! takes minutes, and the engine's tests compare their texts and drafts.

use std::collections::HashMap;

use aquila::{Algorithms, conformance};
use aquila_compute::Backend;
use aquila_model::{Decoder, Needs};
use aquila_spec::{
    Algorithm, Allowance, Candidate, DraftFor, DraftRequest, Entry, HostProposer, LoadOn, Opened,
    Opening, Result, Tree, TreeBuilder,
};

/// Tests share a machine whose GPU has room for one engine.
const ON_CPU: &[&str] = &["--device", "cpu", "--threads", "1"];

fn conforms(name: &str, flags: &[&str]) -> conformance::Report {
    let flags = [ON_CPU, flags].concat();
    let report = conformance::check(&Algorithms::built_in(), name, &flags).unwrap();
    assert_eq!(report.failures, [""; 0], "{name}");
    assert!(report.answers > 200, "{report:?}");
    report
}

#[test]
fn a_head_conforms_and_its_drafts_are_invariant() {
    let report = conforms("EAGLE3", &[]);
    assert!(report.invariant && report.accept_length > 1.2, "{report:?}");
}

#[test]
fn a_mix_conforms_and_that_of_a_request_is_invariant() {
    let report = conforms("STANDALONE+NGRAM", &["--speculative-ngram-scope", "request"]);
    assert!(report.invariant && report.accept_length > 1.2, "{report:?}");
}

#[test]
fn n_grams_conform_and_those_of_a_request_are_invariant() {
    let report = conforms("ngram", &["--speculative-ngram-scope", "request"]);
    assert!(report.invariant && report.accept_length > 1.1, "{report:?}");
}

/// Drafts the number of times that it heard of a request, which another machine knows only if it is
/// packed.
#[derive(Default)]
struct Counting {
    heard: HashMap<u64, u32>,
    packs: bool,
}

#[derive(Clone, Copy)]
struct CountingEntry {
    packs: bool,
}

impl Entry for CountingEntry {
    fn name(&self) -> &'static str {
        "COUNTING"
    }

    fn draft_for(&self, _model: &str) -> DraftFor {
        DraftFor::Nothing
    }

    fn open(&self, _opening: &Opening<'_>) -> Result<Box<dyn Opened>> {
        Ok(Box::new(*self))
    }
}

impl Opened for CountingEntry {
    fn needs(&self, _allowance: &Allowance) -> Needs {
        Needs::default()
    }
}

impl<B: Backend> LoadOn<B> for CountingEntry {
    fn load(&self, _: &B, _: &Decoder<B>, _: &Allowance) -> Result<Algorithm<B>> {
        let counting = Counting { packs: self.packs, ..Counting::default() };
        Ok(Algorithm::on_host("COUNTING", counting))
    }
}

impl HostProposer for Counting {
    fn draft(&mut self, request: &DraftRequest<'_>) -> Option<Tree> {
        let token = self.heard.get(&request.request).copied().unwrap_or(0);
        let mut builder =
            TreeBuilder::start(request.shape, &[Candidate { token, probability: 1.0 }]);
        while builder.goes_on() {
            builder.grow(&[Vec::new()]);
        }
        Some(builder.finish(request.bonus()))
    }

    fn read(&mut self, request: u64, _: &[u32]) {
        *self.heard.entry(request).or_default() += 1;
    }

    fn pack(&mut self, request: u64) -> Vec<u8> {
        let heard = self.heard.get(&request).copied().unwrap_or(0);
        if self.packs { heard.to_le_bytes().to_vec() } else { Vec::new() }
    }

    fn unpack(&mut self, request: u64, _: &[u32], packed: &[u8]) -> bool {
        let heard = packed.try_into().map(u32::from_le_bytes);
        self.heard.insert(request, heard.unwrap_or(1));
        heard.is_ok() == self.packs
    }
}

#[test]
fn state_that_is_not_packed_is_found_out() {
    for packs in [false, true] {
        let mut algorithms = Algorithms::built_in();
        algorithms.register(Box::new(CountingEntry { packs })).unwrap();
        let failures = conformance::check_packed(&algorithms, "counting", ON_CPU, false).unwrap();
        assert_eq!(failures.is_empty(), packs, "{failures:?}");
        for failure in &failures {
            assert!(failure.contains("the tokens and what was packed"), "{failure}");
        }
    }
}
