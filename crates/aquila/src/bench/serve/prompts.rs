//! Prompts to send: those of a file, or random words.
//!
//! The one invariant: the same flags and the same file give the same prompts in every run.

use aquila_text::Tokenizer;
use clap::ValueEnum;
use serde_json::Value;

use super::super::prompts::Random;
use crate::error::{Error, Result};

/// What prompts are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Dataset {
    /// Random words, of --random-input-len
    Random,
    /// A file of conversations; the first question of each is the prompt
    Sharegpt,
    /// A file of questions with "turns", as Spec-Bench and MT-bench have them; the first turn is
    /// the prompt
    #[value(name = "spec_bench", alias = "spec-bench", alias = "mt_bench")]
    SpecBench,
    /// A file of lines with "prompt"
    Custom,
}

/// A prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// The text.
    pub text: String,
    /// What kind of text it is, where the file says so.
    pub category: Option<String>,
    /// The most tokens of the answer, where the file or random lengths say so.
    pub output_len: Option<usize>,
}

/// What a file holds.
#[derive(Debug)]
pub struct File {
    /// Its prompts, in order.
    pub prompts: Vec<Prompt>,
    /// Conversations without a question or without an answer, which are left out.
    pub skipped: usize,
}

/// Reads a file of JSON lines, or of one JSON list, in any of the forms or in the one asked for.
/// With a tokenizer, an answer to a ShareGPT prompt is as long as the one in the file.
pub fn read(text: &str, form: Option<Dataset>, tokenizer: Option<&Tokenizer>) -> Result<File> {
    let mut file = File { prompts: Vec::new(), skipped: 0 };
    let mut take = |value: &Value, place: String| -> Result<()> {
        let wrong = |why: &str| Error::Other(format!("{place}: {why}"));
        let (found, prompt) = prompt(value, tokenizer).map_err(|why| wrong(&why))?;
        if let Some(asked) = form.filter(|&asked| asked != found) {
            let name = |form: Dataset| {
                form.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned())
            };
            return Err(wrong(&format!(
                "this is the form of --dataset-name {}, not of {}",
                name(found),
                name(asked)
            )));
        }
        match prompt {
            Some(prompt) => file.prompts.push(prompt),
            None => file.skipped += 1,
        }
        Ok(())
    };
    if text.trim_start().starts_with('[') {
        let list: Vec<Value> = serde_json::from_str(text)
            .map_err(|e| Error::Other(format!("not a JSON list: {e}")))?;
        for (value, number) in list.iter().zip(1..) {
            take(value, format!("entry {number}"))?;
        }
    } else {
        for (line, number) in text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty()) {
            let place = format!("line {number}");
            let value = serde_json::from_str(line)
                .map_err(|e| Error::Other(format!("{place}: not JSON: {e}")))?;
            take(&value, place)?;
        }
    }
    if file.prompts.is_empty() {
        return Err(Error::Other("there is no prompt in it".into()));
    }
    Ok(file)
}

/// A prompt and the form that it has; none if the conversation is none.
fn prompt(
    value: &Value,
    tokenizer: Option<&Tokenizer>,
) -> std::result::Result<(Dataset, Option<Prompt>), String> {
    let category = || ["category", "kind"].iter().find_map(|key| value[key].as_str());
    let prompt = |text: &str, output_len| Prompt {
        text: text.to_owned(),
        category: category().map(str::to_owned),
        output_len,
    };
    if let Some(turns) = value.get("turns") {
        let first = turns.get(0).and_then(Value::as_str);
        let text = first.ok_or("\"turns\" must be a list of texts, with one at least")?;
        return Ok((Dataset::SpecBench, Some(prompt(text, None))));
    }
    if let Some(messages) = value.get("conversations").or_else(|| value.get("conversation")) {
        let messages = messages.as_array().ok_or("\"conversations\" must be a list")?;
        let content = |at: usize| {
            let message: &Value = messages.get(at)?;
            ["value", "content"].iter().find_map(|key| message[key].as_str())
        };
        let (Some(question), Some(answer)) = (content(0), content(1)) else {
            return Ok((Dataset::Sharegpt, None));
        };
        let tokens = match tokenizer {
            Some(tokenizer) => {
                let ids = tokenizer.encode(answer, false).map_err(|e| e.to_string())?;
                Some(ids.len().max(1))
            }
            None => None,
        };
        return Ok((Dataset::Sharegpt, Some(prompt(question, tokens))));
    }
    let Some(text) = value.get("prompt") else {
        return Err("it has none of \"prompt\", \"turns\" and \"conversations\"".into());
    };
    let text = text.as_str().ok_or("\"prompt\" must be a text")?;
    let tokens = match value.get("output_tokens") {
        None | Some(Value::Null) => None,
        Some(tokens) => {
            let tokens = tokens.as_u64().filter(|&tokens| tokens > 0);
            Some(tokens.ok_or("\"output_tokens\" must be a whole number from 1 up")? as usize)
        }
    };
    Ok((Dataset::Custom, Some(prompt(text, tokens))))
}

/// Lengths of random prompts and of the answers to them.
#[derive(Debug, Clone, Copy)]
pub struct Lengths {
    /// Tokens of a prompt; words where there is no tokenizer.
    pub input: usize,
    /// Tokens of an answer.
    pub output: usize,
    /// How far lengths lie apart: from 1 - ratio to 1 + ratio times these.
    pub ratio: f64,
}

/// Prompts of random words.
pub fn random(
    count: usize,
    lengths: Lengths,
    seed: u64,
    tokenizer: Option<&Tokenizer>,
) -> Result<Vec<Prompt>> {
    // Not the numbers that arrivals come from.
    let mut random = Random { state: !seed };
    let length = |random: &mut Random, mean: usize| {
        let least = ((mean as f64 * (1.0 - lengths.ratio)).floor() as usize).max(1);
        let most = ((mean as f64 * (1.0 + lengths.ratio)).ceil() as usize).max(least);
        least + random.below(most - least + 1)
    };
    (0..count)
        .map(|_| {
            let input = length(&mut random, lengths.input);
            let output = length(&mut random, lengths.output);
            let words = |random: &mut Random| {
                let words: Vec<&str> =
                    (0..input).map(|_| WORDS[random.below(WORDS.len())]).collect();
                words.join(" ")
            };
            let text = words(&mut random);
            let text = match tokenizer {
                Some(tokenizer) => cut(tokenizer, text, input)?,
                None => text,
            };
            Ok(Prompt { text, category: None, output_len: Some(output) })
        })
        .collect()
}

/// A beginning of a text that has this many tokens, or nearly: where a text is cut, its last tokens
/// may become others.
fn cut(tokenizer: &Tokenizer, text: String, tokens: usize) -> Result<String> {
    let ids = tokenizer.encode(&text, false)?;
    let mut length = tokens.min(ids.len());
    let mut text = tokenizer.decode(&ids[..length], true)?;
    for _ in 0..8 {
        let found = tokenizer.encode(&text, false)?.len();
        if found == tokens {
            break;
        }
        length = (length + tokens).saturating_sub(found).clamp(1, ids.len());
        text = tokenizer.decode(&ids[..length], true)?;
    }
    Ok(text)
}

/// Short words that most vocabularies have as one token.
const WORDS: [&str; 64] = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place",
    "case", "week", "company", "system", "program", "question", "work", "number", "night", "point",
    "home", "water", "room", "mother", "area", "money", "story", "fact", "month", "lot", "right",
    "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head", "house",
    "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law", "car",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(file: &File) -> Vec<&str> {
        file.prompts.iter().map(|prompt| prompt.text.as_str()).collect()
    }

    #[test]
    fn the_three_forms_are_read_from_lines_and_lists() {
        let spec_bench = r#"{"question_id": 81, "category": "writing", "turns": ["One", "Two"]}"#;
        let file = read(spec_bench, Some(Dataset::SpecBench), None).unwrap();
        assert_eq!(texts(&file), ["One"]);
        assert_eq!(file.prompts[0].category.as_deref(), Some("writing"));
        let share = r#"[{"id": "a", "conversations": [{"from": "human", "value": "Q"},
            {"from": "gpt", "value": "A"}]}, {"id": "b", "conversations": [{"from": "human",
            "value": "alone"}]}]"#;
        let file = read(share, None, None).unwrap();
        assert_eq!((texts(&file), file.skipped), (vec!["Q"], 1));
        let custom = "{\"prompt\": \"a\", \"output_tokens\": 5}\n\n{\"prompt\": \"b\"}\n";
        let file = read(custom, Some(Dataset::Custom), None).unwrap();
        assert_eq!(texts(&file), ["a", "b"]);
        assert_eq!(file.prompts[0].output_len, Some(5));
    }

    #[test]
    fn a_bad_line_is_named_by_its_number() {
        let message = |text: &str, form| read(text, form, None).unwrap_err().to_string();
        assert!(
            message("{\"prompt\": \"a\"}\n\n{\"prompt\"", None).starts_with("line 3: not JSON")
        );
        assert!(message("{\"text\": 1}", None).starts_with("line 1: it has none of \"prompt\""));
        assert!(message("{\"prompt\": 1}", None).starts_with("line 1: \"prompt\" must be a text"));
        assert!(message("{\"turns\": []}", None).starts_with("line 1: \"turns\" must be"));
        assert!(message("[{\"prompt\": \"a\"}, 3]", None).starts_with("entry 2: it has none"));
        assert!(message("[{]", None).starts_with("not a JSON list"));
        let other = message("{\"turns\": [\"a\"]}", Some(Dataset::Custom));
        assert!(other.contains("--dataset-name spec_bench, not of custom"), "{other}");
        let zero = message("{\"prompt\": \"a\", \"output_tokens\": 0}", None);
        assert!(zero.starts_with("line 1: \"output_tokens\""), "{zero}");
        for empty in ["", "\n \n", "[]"] {
            assert_eq!(message(empty, None), "there is no prompt in it");
        }
    }

    #[test]
    fn random_prompts_have_the_lengths_asked_for() {
        let lengths = Lengths { input: 20, output: 10, ratio: 0.0 };
        let prompts = random(8, lengths, 3, None).unwrap();
        assert!(prompts.iter().all(|prompt| prompt.text.split(' ').count() == 20));
        assert!(prompts.iter().all(|prompt| prompt.output_len == Some(10)));
        assert_eq!(prompts, random(8, lengths, 3, None).unwrap());
        assert_ne!(prompts, random(8, lengths, 4, None).unwrap());
        let spread = Lengths { ratio: 0.5, ..lengths };
        let words: Vec<usize> = random(400, spread, 3, None)
            .unwrap()
            .iter()
            .map(|prompt| prompt.text.split(' ').count())
            .collect();
        assert_eq!((words.iter().min(), words.iter().max()), (Some(&10), Some(&30)));
    }
}
