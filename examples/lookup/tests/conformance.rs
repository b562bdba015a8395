//! LOOKUP holds to what every algorithm must hold to.

use aquila::{Algorithms, conformance};
use aquila_lookup::{Lookup, continuation};

#[test]
fn lookup_conforms() {
    let mut algorithms = Algorithms::built_in();
    algorithms.register(Box::new(Lookup)).unwrap();
    let report = conformance::check(&algorithms, "lookup", &[]).unwrap();
    assert_eq!(report.failures, [""; 0]);
    assert!(report.invariant, "it reads the request's own text and nothing else");
    assert!(report.answers > 200 && report.accept_length > 1.05, "{report:?}");
}

#[test]
fn what_followed_the_last_tokens_is_found() {
    assert_eq!(continuation(&[1, 2, 3, 4, 1, 2]), [3, 4, 1, 2]);
    assert_eq!(continuation(&[7, 7, 7]), [7]);
    assert_eq!(continuation(&[1, 2, 3]), [0u32; 0]);
    assert_eq!(continuation(&[9]), [0u32; 0]);
}
