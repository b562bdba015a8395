//! Whether rounds overlap: said at start, and nowhere to be seen in the text.

use crate::run::{Ran, aquila};

fn generate(args: &[&str], spec_v2: Option<&str>) -> Ran {
    let prompt = ["generate", "--prompt", "pub fn number(", "--max-tokens", "40"];
    let mut command = aquila(&[&prompt[..], args].concat());
    match spec_v2 {
        Some(value) => command.env("SGLANG_ENABLE_SPEC_V2", value),
        None => command.env_remove("SGLANG_ENABLE_SPEC_V2"),
    };
    Ran::of(command.output().unwrap())
}

#[test]
fn the_start_says_whether_rounds_overlap_and_texts_are_equal() {
    let cases = [
        (&[][..], None, "overlap off: the scheduler and the executor share the CPU's cores"),
        (&["--disable-overlap-schedule"], None, "overlap off: --disable-overlap-schedule"),
        (&["--enable-overlap-schedule"], None, "overlap on: --enable-overlap-schedule"),
        (&[], Some("0"), "overlap off: SGLANG_ENABLE_SPEC_V2"),
        (&[], Some("1"), "overlap on: SGLANG_ENABLE_SPEC_V2"),
        (&["--disable-overlap-schedule"], Some("1"), "overlap off: --disable-overlap-schedule"),
    ];
    let wanted = generate(&["--speculative-algorithm", "NONE"], None).stdout;
    assert!(!wanted.is_empty());
    for (args, spec_v2, said) in cases {
        let ran = generate(args, spec_v2);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        assert!(ran.stderr.contains(said), "{said} is not in\n{}", ran.stderr);
        assert_eq!(ran.stdout, wanted, "{said}");
    }
    let both = generate(&["--disable-overlap-schedule", "--enable-overlap-schedule"], None);
    assert_eq!(both.code, Some(2), "{}", both.stderr);
}
