//! Output files: complete under their name, or whole lines beside it.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};

use serde_json::{Value, json};

use crate::run::{Ran, aquila, aquila_after, json_lines, jsonl, run, without_tokenizer};

fn requests(count: usize) -> Vec<Value> {
    let sampling = json!({ "max_tokens": 60, "ignore_eos": true });
    (0..count).map(|at| json!({ "id": at, "prompt_ids": [1 + at], "sampling": sampling })).collect()
}

/// A folder with an input of so many prompts.
fn folder(count: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("in.jsonl"), jsonl(&requests(count))).unwrap();
    folder
}

fn path(folder: &tempfile::TempDir, name: &str) -> String {
    folder.path().join(name).to_str().unwrap().to_owned()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_complete_output_replaces_the_old_and_leaves_nothing_else() {
    let folder = folder(3);
    let (input, output) = (path(&folder, "in.jsonl"), path(&folder, "out.jsonl"));
    std::fs::write(&output, "old").unwrap();
    std::fs::write(output.clone() + ".partial", "left behind ".repeat(1000)).unwrap();
    let ran = run(&["generate", &without_tokenizer(), "--input", &input, "--output", &output]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert_eq!(json_lines(&std::fs::read_to_string(&output).unwrap()).len(), 3);
    assert_eq!(names(folder.path()), ["in.jsonl", "out.jsonl"]);
}

#[test]
fn files_are_opened_before_the_model_is_looked_for() {
    let folder = folder(1);
    let input = path(&folder, "in.jsonl");
    let missing = path(&folder, "missing/out.jsonl");
    let here = folder.path().to_str().unwrap();
    let cases = [
        (["nowhere.jsonl", "-"], 1, "nowhere.jsonl"),
        ([here, "-"], 1, here),
        ([&input, &missing], 1, &missing),
        ([&input, here], 1, here),
        ([&input, ""], 2, "--output \"\""),
        ([&input, &input], 2, "overwrite --input"),
    ];
    for ([input, output], code, word) in cases {
        let ran = run(&["generate", "no/model", "--input", input, "--output", output]);
        assert_eq!(ran.code, Some(code), "{input} {output}: {}", ran.stderr);
        assert!(ran.stderr.contains(word), "{:?} lacks {word:?}", ran.stderr);
        assert!(!ran.stderr.contains("no/model"), "{}", ran.stderr);
    }
    assert_eq!(names(folder.path()), ["in.jsonl"]);
}

#[test]
fn an_output_that_is_its_input_is_refused() {
    let folder = folder(1);
    let input = path(&folder, "in.jsonl");
    std::os::unix::fs::symlink(&input, path(&folder, "link.jsonl")).unwrap();
    std::fs::rename(&input, path(&folder, "in.jsonl.partial")).unwrap();
    let partial = path(&folder, "in.jsonl.partial");
    let before = std::fs::read(&partial).unwrap();
    let ran = run(&["generate", "--input", &partial, "--output", &input]);
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert_eq!(std::fs::read(&partial).unwrap(), before);
    std::fs::rename(&partial, &input).unwrap();
    let link = path(&folder, "link.jsonl");
    let ran = run(&["generate", "--input", &input, "--output", &link]);
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert_eq!(std::fs::read(&input).unwrap(), before);
}

#[test]
fn a_model_that_cannot_be_loaded_leaves_no_output_behind() {
    let folder = folder(1);
    let (input, output) = (path(&folder, "in.jsonl"), path(&folder, "out.jsonl"));
    let ran = run(&["generate", "no/model", "--input", &input, "--output", &output]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("no model \"no/model\""), "{}", ran.stderr);
    assert_eq!(names(folder.path()), ["in.jsonl"]);
}

#[test]
fn a_device_that_takes_nothing_is_named() {
    let folder = folder(1);
    let input = path(&folder, "in.jsonl");
    let ran = run(&["generate", &without_tokenizer(), "--input", &input, "--output", "/dev/full"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("/dev/full: No space left"), "{}", ran.stderr);
}

#[test]
fn a_full_disk_leaves_whole_lines_and_says_so() {
    let folder = folder(30);
    let (input, output) = (path(&folder, "in.jsonl"), path(&folder, "out.jsonl"));
    std::fs::write(&output, "of an earlier run\n").unwrap();
    let model = without_tokenizer();
    let args = ["generate", "-q", &model, "--input", &input, "--output", &output];
    // A limit on the size of files fails a write in the middle of a line, as a full disk does.
    let limited = aquila_after("ulimit -f 4; trap '' XFSZ", &args).output();
    let ran = Ran::of(limited.unwrap());
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
    assert_eq!(std::fs::read_to_string(&output).unwrap(), "of an earlier run\n");
    let partial = format!("{output}.partial");
    let lines = json_lines(&std::fs::read_to_string(&partial).unwrap());
    assert!(!lines.is_empty() && lines.len() < 30);
    assert!(lines.iter().enumerate().all(|(at, line)| line["id"] == at));
    let said = format!("the {} lines before that are in {partial}", lines.len());
    assert!(ran.stderr.contains(&said), "{:?} lacks {said:?}", ran.stderr);
}

/// A command that has answered two requests and waits for more, as its input stays open.
struct Waiting {
    child: Child,
    stdin: ChildStdin,
}

impl Waiting {
    /// Starts `generate --input -` and waits for its answers in `partial`.
    fn start(mut command: Command, partial: &str) -> Self {
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        std::io::Write::write_all(&mut stdin, jsonl(&requests(2)).as_bytes()).unwrap();
        while std::fs::read_to_string(partial).unwrap_or_default().lines().count() < 2 {
            assert!(child.try_wait().unwrap().is_none(), "it ended early");
            std::thread::yield_now();
        }
        Self { child, stdin }
    }

    /// Sends SIGINT, then ends the input: a command that the signal does not end ends by that.
    fn interrupt(mut self) -> ExitStatus {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
        drop(self.stdin);
        self.child.wait().unwrap()
    }
}

#[test]
fn an_interrupt_leaves_whole_lines_that_others_keep_off() {
    let folder = folder(2);
    let output = path(&folder, "out.jsonl");
    let partial = format!("{output}.partial");
    let model = without_tokenizer();
    let mut command = aquila(&["generate", "-q", &model, "--input", "-", "--output", &output]);
    // What runs the tests may ignore the signal, as a script's background job does.
    // SAFETY: `signal` may be called between fork and exec, and touches no memory of ours.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        });
    }
    let first = Waiting::start(command, &partial);
    let input = path(&folder, "in.jsonl");
    let second = run(&["generate", &model, "--input", &input, "--output", &output]);
    assert_eq!(second.code, Some(1));
    assert!(second.stderr.contains("another process is writing it"), "{}", second.stderr);

    assert_eq!(first.interrupt().signal(), Some(libc::SIGINT));
    assert_eq!(json_lines(&std::fs::read_to_string(&partial).unwrap()).len(), 2);
    assert_eq!(names(folder.path()), ["in.jsonl", "out.jsonl.partial"]);
}

#[test]
fn a_command_started_to_ignore_interrupts_completes_its_output() {
    let folder = folder(2);
    let output = path(&folder, "out.jsonl");
    let model = without_tokenizer();
    let args = ["generate", "-q", &model, "--input", "-", "--output", &output];
    // As background jobs of scripts are started.
    let command = aquila_after("trap '' INT", &args);
    let status = Waiting::start(command, &format!("{output}.partial")).interrupt();
    assert_eq!(status.code(), Some(0));
    assert_eq!(json_lines(&std::fs::read_to_string(&output).unwrap()).len(), 2);
    assert_eq!(names(folder.path()), ["in.jsonl", "out.jsonl"]);
}
