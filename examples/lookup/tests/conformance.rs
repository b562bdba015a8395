//! LOOKUP holds to what every algorithm must hold to.

use aquila::{Algorithms, conformance};
use aquila_lookup::{Lookup, continuation};
use aquila_spec::DraftOptions;

#[test]
fn lookup_conforms() {
    let mut algorithms = Algorithms::built_in();
    algorithms.register(Box::new(Lookup)).unwrap();
    let report = conformance::check(&algorithms, "lookup", &["--device", "cpu"]).unwrap();
    assert_eq!(report.failures, [""; 0]);
    assert!(report.invariant, "it reads the request's own text and nothing else");
    assert!(report.answers > 200 && report.accept_length > 1.05, "{report:?}");
}

#[test]
fn what_followed_the_last_tokens_is_found() {
    assert_eq!(continuation(&[1, 2, 3, 4, 1, 2], 2), [3, 4, 1, 2]);
    assert_eq!(continuation(&[7, 7, 7], 2), [7]);
    assert_eq!(continuation(&[1, 2, 3], 2), [0u32; 0]);
    assert_eq!(continuation(&[9], 2), [0u32; 0]);
}

#[test]
fn an_option_is_taken_and_a_wrong_one_is_refused() {
    let mut algorithms = Algorithms::built_in();
    algorithms.register(Box::new(Lookup)).unwrap();
    let entry = algorithms.find("lookup").unwrap().unwrap();
    let of = |given: &[&str]| {
        let given: Vec<String> = given.iter().map(|&text| text.to_owned()).collect();
        DraftOptions::of(entry, &given)
    };
    assert_eq!(of(&[]).unwrap().get("agree"), "2");
    assert_eq!(of(&["agree=3"]).unwrap().number::<usize>("agree").unwrap(), 3);
    assert!(of(&["agree=x"]).unwrap().number::<usize>("agree").is_err());
    for (given, why) in [
        (&["disagree=1"][..], "tokens that must agree"),
        (&["agree"], "NAME=VALUE"),
        (&["agree=1", "agree=2"], "twice"),
    ] {
        let error = of(given).unwrap_err().to_string();
        assert!(error.contains(why), "{given:?}: {error}");
    }
    assert_eq!(continuation(&[5, 2, 8, 9, 2], 1), [8, 9, 2]);
}
