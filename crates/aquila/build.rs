//! Writes what `--version` says: the version and the commit.
//!
//! The commit is `AQUILA_COMMIT` where that is set, as packagers do who build without a
//! repository; else the one that is checked out; else unknown, which is no error.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=AQUILA_COMMIT");
    let given = env::var("AQUILA_COMMIT").ok().filter(|commit| !commit.trim().is_empty());
    let commit = given.or_else(checked_out).unwrap_or_else(|| "unknown".into());
    let version = env!("CARGO_PKG_VERSION");
    println!("cargo::rustc-env=AQUILA_VERSION={version} (commit {})", commit.trim());
}

/// The commit of the repository that this package is part of.
fn checked_out() -> Option<String> {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let git = |args: &[&str]| {
        let output = Command::new("git").current_dir(package).args(args).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    // A source archive may have been unpacked inside of another repository.
    let workspace = package.join("../..").canonicalize().ok()?;
    let root = git(&["rev-parse", "--show-toplevel"])?;
    if Path::new(&root).canonicalize().ok()? != workspace {
        return None;
    }
    // It changes whenever another commit is checked out or made.
    let log = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"])?;
    if Path::new(&log).exists() {
        println!("cargo::rerun-if-changed={log}");
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}
