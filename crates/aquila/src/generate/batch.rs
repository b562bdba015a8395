//! A file of prompts: as many under way as there is room for, answers in the order of the prompts.

use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::mpsc::channel;
use std::time::Instant;

use aquila_text::Generator;
use indicatif::ProgressBar;
use serde_json::{Value, json};

use super::answer::{self, Answer};
use super::feed::{Awaited, Event, Room, Taken, feed};
use super::input::Lines;
use super::output::Output;
use crate::error::{Error, Result, SOME_FAILED};
use crate::notice::notice;
use crate::start::progress_bar;

/// Answers every line of the input; at most `most` requests are under way.
pub fn answer(
    generator: &Generator,
    lines: Lines,
    output: &mut Output,
    most: usize,
    quiet: bool,
) -> Result<ExitCode> {
    let begun = Instant::now();
    let bar = progress_bar(quiet, "answering");
    if let Some(size) = lines.size() {
        bar.set_length(size);
    }
    let mut batch = Batch {
        has_text: generator.tokenizer().is_some(),
        room: Room::new(most),
        slots: VecDeque::new(),
        written: 0,
        failed: 0,
        first_failure: None,
        bar,
    };
    batch.run(generator, lines, output)?;
    batch.bar.finish_and_clear();
    Error::check(generator.engine())?;
    if !quiet {
        let stats = generator.engine().stats().snapshot();
        let seconds = begun.elapsed().as_secs_f64();
        notice(format_args!(
            "{} requests, {} failed, in {seconds:.1} s; {} prompt tokens read, {} found in the \
             cache, {} answered ({:.0} a second)",
            batch.written,
            batch.failed,
            stats.prompt_tokens,
            stats.cached_tokens,
            stats.completion_tokens,
            stats.completion_tokens as f64 / seconds,
        ));
    }
    let Some(first) = batch.first_failure else { return Ok(ExitCode::SUCCESS) };
    let Batch { failed, written, .. } = batch;
    notice(format_args!("aquila: {failed} of {written} requests failed; the first: {first}"));
    Ok(ExitCode::from(SOME_FAILED))
}

struct Batch {
    has_text: bool,
    room: Room,
    /// Lines that are not written yet, in their order.
    slots: VecDeque<Slot>,
    written: u64,
    failed: u64,
    first_failure: Option<String>,
    bar: ProgressBar,
}

/// A line whose answers are awaited or wait for the lines before it.
enum Slot {
    Waiting { id: Value, bytes: u64, answers: Vec<Option<Answer>>, logprobs: bool },
    Ready(Value),
}

impl Batch {
    fn run(&mut self, generator: &Generator, lines: Lines, output: &mut Output) -> Result<()> {
        let (events, inbox) = channel();
        let (generator, room) = (generator.clone(), self.room.clone());
        // Not joined: it may be waiting for input that never comes when the output has failed.
        std::thread::Builder::new()
            .name("aquila-input".into())
            .spawn(move || feed(&generator, lines, &room, &events))
            .map_err(|e| Error::Other(format!("cannot start a thread for the input: {e}")))?;
        let mut ended = false;
        while !(ended && self.slots.is_empty()) {
            let lost = |_| Error::Other("the engine ended before all answers had come".into());
            match inbox.recv().map_err(lost)? {
                Event::Taken(taken) => self.take(taken),
                Event::Answer(line, choice, answer) => self.collect(line, choice, answer),
                Event::Refused(line, why) => self.refuse(line, why),
                Event::End(result) => {
                    result?;
                    ended = true;
                }
            }
            self.write_ready(output)?;
        }
        Ok(())
    }

    fn take(&mut self, Taken { id, bytes, awaited }: Taken) {
        match awaited {
            Ok(Awaited { answers, logprobs }) => {
                let answers = (0..answers).map(|_| None).collect();
                self.slots.push_back(Slot::Waiting { id, bytes, answers, logprobs });
            }
            Err(why) => {
                let answers = Vec::new();
                self.slots.push_back(Slot::Waiting { id, bytes, answers, logprobs: false });
                self.refuse(self.written + self.slots.len() as u64 - 1, why);
            }
        }
    }

    fn refuse(&mut self, line: u64, why: String) {
        let slot = &mut self.slots[(line - self.written) as usize];
        if let Slot::Waiting { id, bytes, .. } = slot {
            self.bar.inc(*bytes);
            *slot = Slot::Ready(json!({ "id": id, "error": why }));
        }
        self.fail(why);
    }

    fn collect(&mut self, line: u64, choice: u32, answer: Answer) {
        let slot = &mut self.slots[(line - self.written) as usize];
        let Slot::Waiting { id, bytes, answers, logprobs } = slot else { return };
        answers[choice as usize] = Some(answer);
        if answers.iter().any(Option::is_none) {
            return;
        }
        let answers: Vec<Answer> = answers.drain(..).flatten().collect();
        self.bar.inc(*bytes);
        let failure = answers.iter().find_map(|answer| answer.reason.failure());
        let failure = failure.map(|why| format!("id {id}: {why}"));
        *slot = Slot::Ready(answer::line(id, &answers, self.has_text, *logprobs));
        if let Some(why) = failure {
            self.fail(why);
        }
    }

    fn fail(&mut self, why: String) {
        self.failed += 1;
        self.first_failure.get_or_insert(why);
    }

    fn write_ready(&mut self, output: &mut Output) -> Result<()> {
        while let Some(Slot::Ready(value)) = self.slots.front() {
            output.write(value)?;
            self.slots.pop_front();
            self.written += 1;
            self.room.line_written();
        }
        Ok(())
    }
}
