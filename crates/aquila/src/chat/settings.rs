//! The sampling settings of a conversation, which `/set` changes.

use aquila_text::SamplingParams;
use serde_json::{Map, Value};

/// Settings that one answer on a terminal has no place for.
const ELSEWHERE: [&str; 4] = ["n", "logprobs", "top_logprobs", "prompt_logprobs"];

/// What was set, by key, in the order in which it was.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    given: Map<String, Value>,
}

impl Settings {
    /// Sets a key to a value, as JSON or as plain text; `default` forgets what was set. Says why
    /// not, otherwise, and changes nothing then.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        if ELSEWHERE.contains(&key) {
            return Err(format!("{key} has no place in a chat: use `aquila generate`"));
        }
        let mut given = self.given.clone();
        let json = || serde_json::from_str(value).unwrap_or_else(|_| value.into());
        match value {
            "default" if is_setting(key) => given.shift_remove(key),
            _ => given.insert(key.to_owned(), json()),
        };
        if given.get(key).is_some_and(Value::is_null) {
            return Err(format!("{key}: to forget it, /set {key} default"));
        }
        let mut params = SamplingParams::from_json(&given).map_err(|error| error.to_string())?;
        if params.max_tokens.is_none() {
            // A flag or the context says how many an answer may have.
            params.min_tokens = None;
        }
        params.check(&[]).map_err(|error| error.to_string())?;
        self.given = given;
        Ok(())
    }

    /// The settings, to which those of flags and model are added.
    pub fn params(&self) -> Result<SamplingParams, aquila_text::ParamError> {
        SamplingParams::from_json(&self.given)
    }

    /// What was set, by key.
    pub fn given(&self) -> &Map<String, Value> {
        &self.given
    }

    /// What was set, for people.
    pub fn list(&self) -> String {
        if self.given.is_empty() {
            return "nothing was set: flags and the model decide".into();
        }
        let lines: Vec<String> =
            self.given.iter().map(|(key, value)| format!("{key} = {value}")).collect();
        lines.join("\n")
    }
}

/// Whether there is a setting of this name.
fn is_setting(key: &str) -> bool {
    // No setting is null: an error is about the value, and false about the name.
    SamplingParams::default().set(key, &Value::Null) != Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_json_or_plain_text() {
        let mut settings = Settings::default();
        settings.set("temperature", "0.7").unwrap();
        settings.set("stop", "END").unwrap();
        settings.set("ignore_eos", "true").unwrap();
        let params = settings.params().unwrap();
        assert_eq!(params.temperature, Some(0.7));
        assert_eq!(params.stop, Some(vec!["END".to_owned()]));
        assert_eq!(params.ignore_eos, Some(true));
        settings.set("temperature", "default").unwrap();
        assert_eq!(settings.params().unwrap().temperature, None);
        assert_eq!(settings.list(), "stop = \"END\"\nignore_eos = true");
    }

    #[test]
    fn what_cannot_be_set_is_said_and_changes_nothing() {
        let mut settings = Settings::default();
        settings.set("top_p", "0.9").unwrap();
        for (key, value, why) in [
            ("heat", "1", "heat: no such setting; there are max_tokens, temperature"),
            ("heat", "default", "heat: no such setting"),
            ("temperature", "warm", "temperature: expected a number, found \"warm\""),
            ("temperature", "-1", "temperature: must be a number from 0 up"),
            ("top_p", "2", "top_p: must be above 0 and at most 1"),
            ("top_p", "null", "/set top_p default"),
            ("n", "2", "n has no place in a chat"),
        ] {
            let said = settings.set(key, value).unwrap_err();
            assert!(said.contains(why), "{key} {value}: {said}");
        }
        assert_eq!(settings.list(), "top_p = 0.9");
    }
}
