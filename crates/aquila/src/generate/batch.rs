//! A file of prompts: as many under way as may wait, answers in the order of the prompts.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, Sender, channel};

use aquila_engine::FinishReason;
use aquila_text::{GenerateError, Generator};
use serde_json::{Value, json};

use super::answer::{self, Answer, Collector};
use super::input::{Ask, Line, Lines};
use super::output::Output;
use crate::error::{Error, Result, SOME_FAILED};
use crate::start::progress_bar;

/// A line whose answer is awaited or waits for the lines before it.
enum Slot {
    Waiting { id: Value, answers: Vec<Option<Answer>>, logprobs: bool },
    Ready(Value),
}

/// Answers every line of the input.
pub fn answer(
    generator: &Generator,
    lines: Lines,
    output: &mut Output,
    quiet: bool,
) -> Result<ExitCode> {
    let (done, answers) = channel();
    let bar = progress_bar(quiet, "answering");
    bar.set_length(lines.size().unwrap_or(0));
    let mut batch = Batch {
        generator,
        done,
        answers,
        slots: BTreeMap::new(),
        under_way: 0,
        next_line: 0,
        next_output: 0,
        failed: 0,
    };
    batch.run(lines, output, &bar)?;
    bar.finish_and_clear();
    if !quiet {
        let stats = generator.engine().stats().snapshot();
        eprintln!(
            "{} requests, {} failed; {} prompt tokens read, {} found in the cache, {} answered",
            batch.next_output,
            batch.failed,
            stats.prompt_tokens,
            stats.cached_tokens,
            stats.completion_tokens,
        );
    }
    Ok(if batch.failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(SOME_FAILED) })
}

struct Batch<'a> {
    generator: &'a Generator,
    done: Sender<(u64, u32, Answer)>,
    answers: Receiver<(u64, u32, Answer)>,
    slots: BTreeMap<u64, Slot>,
    under_way: usize,
    next_line: u64,
    next_output: u64,
    failed: u64,
}

impl Batch<'_> {
    fn run(
        &mut self,
        mut lines: Lines,
        output: &mut Output,
        bar: &indicatif::ProgressBar,
    ) -> Result<()> {
        let most = self.generator.engine().config().max_queued_requests.max(1);
        while let Some(line) = lines.next()? {
            bar.set_position(lines.position());
            self.take(line);
            self.write_ready(output)?;
            while self.under_way >= most {
                self.receive()?;
                self.write_ready(output)?;
            }
        }
        while self.under_way > 0 {
            self.receive()?;
            self.write_ready(output)?;
        }
        Ok(())
    }

    fn take(&mut self, line: Line) {
        let number = self.next_line;
        self.next_line += 1;
        let id = line.id;
        let slot =
            match line.ask.and_then(|ask| self.submit(number, ask).map_err(|e| e.to_string())) {
                Ok((n, logprobs)) => {
                    self.under_way += n;
                    Slot::Waiting { id, answers: (0..n).map(|_| None).collect(), logprobs }
                }
                Err(error) => {
                    self.failed += 1;
                    Slot::Ready(json!({ "id": id, "error": error }))
                }
            };
        self.slots.insert(number, slot);
    }

    fn submit(&self, line: u64, ask: Ask) -> std::result::Result<(usize, bool), GenerateError> {
        let params = self.generator.check(ask.params)?;
        let prompt = self.generator.tokens(ask.prompt)?;
        self.generator.submit(prompt, &params, None, |choice| {
            let answer = Answer::default();
            Box::new(Collector { line, choice, answer, done: self.done.clone() })
        })?;
        Ok((params.n as usize, params.logprobs.is_some()))
    }

    fn receive(&mut self) -> Result<()> {
        let lost = |_| Error::Other("the engine ended before all answers had come".into());
        let (line, choice, answer) = self.answers.recv().map_err(lost)?;
        // An answer of a line that was refused as a whole is not wanted.
        let Some(slot) = self.slots.get_mut(&line) else { return Ok(()) };
        let Slot::Waiting { id, answers, logprobs } = slot else { return Ok(()) };
        self.under_way -= 1;
        answers[choice as usize] = Some(answer);
        if answers.iter().all(Option::is_some) {
            let answers: Vec<Answer> = answers.drain(..).flatten().collect();
            let aborted = |answer: &Answer| matches!(answer.end, Some((FinishReason::Abort(_), _)));
            self.failed += u64::from(answers.iter().any(aborted));
            let has_text = self.generator.tokenizer().is_some();
            *slot = Slot::Ready(answer::line(id, &answers, has_text, *logprobs));
        }
        Ok(())
    }

    fn write_ready(&mut self, output: &mut Output) -> Result<()> {
        while let Some(Slot::Ready(_)) = self.slots.get(&self.next_output) {
            if let Some(Slot::Ready(value)) = self.slots.remove(&self.next_output) {
                output.write(&value)?;
            }
            self.next_output += 1;
        }
        Ok(())
    }
}
