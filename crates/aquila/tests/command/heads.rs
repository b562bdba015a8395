//! Heads that have fewer layers than the usual chain has steps.

use aquila_model::{Location, resolve};
use safetensors::SafeTensors;
use tempfile::TempDir;

use crate::run::{Ran, run};

/// The first two of the shipped MTP layers, in a folder of their own.
fn two_layers() -> TempDir {
    without("tiny-mtp", "mtp_layers.2.")
}

/// A shipped head in a folder of its own, without the tensors whose names contain `lost`.
fn without(name: &str, lost: &str) -> TempDir {
    let Location::Folder(shipped) = resolve(name).unwrap() else { unreachable!() };
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(shipped.join("config.json"), folder.path().join("config.json")).unwrap();
    let bytes = std::fs::read(shipped.join("model.safetensors")).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let kept = all.tensors().into_iter().filter(|(name, _)| !name.contains(lost));
    let file = safetensors::serialize(kept, None).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
    folder
}

#[test]
fn heads_that_can_draft_are_inspected_without_failure() {
    for (name, algorithm) in
        [("tiny-eagle", "EAGLE"), ("tiny-eagle3", "EAGLE3"), ("tiny-mtp", "MTP")]
    {
        let ran = run(&["inspect", "--json", name]);
        assert_eq!(ran.code, Some(0), "{name}: {}", ran.stdout);
        let report: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
        assert_eq!(report["can_draft"], true, "{report}");
        assert_eq!(report["servable"], false, "{report}");
        assert_eq!(report["draft_head"]["algorithm"], algorithm, "{report}");
        let ran = run(&["inspect", name]);
        assert!(
            ran.stdout.contains(&format!("draft head     {algorithm} for models")),
            "{}",
            ran.stdout
        );
        let see = format!(
            "see            --speculative-algorithm {algorithm} with --speculative-draft-model-path"
        );
        assert!(ran.stdout.contains(&see), "{}", ran.stdout);
    }
    let report = run(&["inspect", "--json", "tiny"]).stdout;
    assert!(report.contains("\"can_draft\": false"), "{report}");
}

#[test]
fn a_head_that_lacks_a_tensor_fails_inspection() {
    for (name, lost) in [
        ("tiny-eagle", "self_attn.o_proj"),
        ("tiny-eagle3", "self_attn.o_proj"),
        ("tiny-mtp", "mtp_layers.1.self_attn.o_proj"),
    ] {
        let folder = without(name, lost);
        let ran = run(&["inspect", folder.path().to_str().unwrap()]);
        assert_eq!(ran.code, Some(1), "{name}: {}", ran.stdout);
        assert!(ran.stdout.contains(lost), "{name}: {}", ran.stdout);
    }
}

fn generate(draft: &TempDir, flags: &[&str]) -> Ran {
    let prompt = ["generate", "--prompt", "fn main() {", "--max-tokens", "12"];
    let draft = draft.path().to_str().unwrap();
    let drafts = ["--speculative-algorithm", "MTP", "--speculative-draft-model-path", draft];
    run(&[&prompt[..], &drafts, flags].concat())
}

#[test]
fn default_steps_are_at_most_the_heads_layers() {
    let head = two_layers();
    let plain = run(&[
        "generate",
        "--prompt",
        "fn main() {",
        "--max-tokens",
        "12",
        "--speculative-algorithm",
        "NONE",
    ]);
    for (flags, trees) in [
        (&[][..], "up to a chain of 2, auto"),
        (&["--speculative-policy", "fixed"], "a chain of 2"),
        (&["--speculative-num-steps", "1"], "a chain of 1"),
        (&["--speculative-eagle-topk", "4"], "trees of 2 steps, topk 4, 12 nodes"),
        (&["--speculative-num-draft-tokens", "9"], "a chain of 2"),
    ] {
        let ran = generate(&head, flags);
        assert_eq!(ran.code, Some(0), "{flags:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(trees), "{flags:?}: {}", ran.stderr);
        assert_eq!(ran.stdout, plain.stdout, "{flags:?}");
        // A tree that is not what was asked for is said with the size that it has.
        let becomes = "--speculative-num-draft-tokens 9 becomes 3: a chain of 2 steps";
        let given = flags.contains(&"--speculative-num-draft-tokens");
        assert_eq!(ran.stderr.contains(becomes), given, "{}", ran.stderr);
    }
}

#[test]
fn flags_beyond_the_heads_layers_are_refused_by_name() {
    let head = two_layers();
    for (flags, code, refusal) in [
        (
            &["--speculative-num-steps", "3"][..],
            2,
            "--speculative-num-steps 3: what drafts has 2 layers, one for each step",
        ),
        (
            // As many as three steps could have.
            &["--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "11"],
            2,
            "--speculative-num-draft-tokens 11 does not suit 2 steps of topk 2: it must be from 2 \
             to 7",
        ),
    ] {
        let ran = generate(&head, flags);
        assert_eq!(ran.code, Some(code), "{flags:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(refusal), "{flags:?}: {}", ran.stderr);
    }
}
