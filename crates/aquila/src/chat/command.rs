//! Lines that begin with a slash: what the user wants besides an answer.

use std::path::PathBuf;

/// The commands, as `/help` lists them.
pub const HELP: &str = "\
/set                 list the sampling settings that were given
/set KEY VALUE       change one: /set temperature 0.7, /set stop [\"END\"]
/set KEY default     forget it again
/system TEXT         what the model is told first; /system alone takes it away
/save FILE           write the conversation to a new file, as JSON
/reset, /clear       begin a new conversation, with the same settings
/undo                take the last question and its answer back
/help                these lines
/exit, /quit         leave, as Ctrl-D does
Ctrl-C stops an answer. A line that ends in \\ goes on in the next.";

/// What a line asks for.
#[derive(Debug, PartialEq)]
pub enum Command<'a> {
    /// Nothing was typed.
    Nothing,
    /// An answer to this.
    Ask(&'a str),
    /// The list of commands.
    Help,
    /// The settings.
    ShowSettings,
    /// Another value for a setting.
    Set(&'a str, &'a str),
    /// Another system prompt, or none.
    System(Option<&'a str>),
    /// A file with the conversation.
    Save(PathBuf),
    /// A new conversation.
    Reset,
    /// The conversation without its last question.
    Undo,
    /// The end.
    Exit,
    /// No command: why.
    Wrong(String),
}

impl<'a> Command<'a> {
    /// Reads a line. Paths, such as `/etc/hosts is what?`, are questions.
    pub fn read(line: &'a str) -> Self {
        let line = line.trim();
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let alone = |command: Self| match rest {
            "" => command,
            _ => Command::Wrong(format!("{name} takes nothing more")),
        };
        match name {
            "" => Command::Nothing,
            "/help" => alone(Command::Help),
            "/reset" | "/clear" => alone(Command::Reset),
            "/undo" => alone(Command::Undo),
            "/exit" | "/quit" => alone(Command::Exit),
            "/system" => Command::System((!rest.is_empty()).then_some(rest)),
            "/save" if rest.is_empty() => Command::Wrong("/save needs the name of a file".into()),
            "/save" => Command::Save(rest.into()),
            "/set" if rest.is_empty() => Command::ShowSettings,
            "/set" => match rest.split_once(|c: char| c.is_whitespace() || c == '=') {
                Some((key, value)) => Command::Set(key, value.trim().trim_start_matches("= ")),
                None => Command::Wrong(format!("/set {rest} needs a value: /set {rest} VALUE")),
            },
            _ if name.starts_with('/') && !name[1..].contains('/') => {
                Command::Wrong(format!("{name} is no command; /help lists them"))
            }
            _ => Command::Ask(line),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_commands_or_questions() {
        for (line, command) in [
            ("  ", Command::Nothing),
            ("What is /help?", Command::Ask("What is /help?")),
            ("/etc/hosts is what?", Command::Ask("/etc/hosts is what?")),
            ("/help ", Command::Help),
            ("/set", Command::ShowSettings),
            ("/set top_p 0.5", Command::Set("top_p", "0.5")),
            ("/set top_p=0.5", Command::Set("top_p", "0.5")),
            ("/set top_p = 0.5", Command::Set("top_p", "0.5")),
            ("/set stop [\"a b\"]", Command::Set("stop", "[\"a b\"]")),
            ("/system Be  brief.", Command::System(Some("Be  brief."))),
            ("/system", Command::System(None)),
            ("/save my chat.json", Command::Save("my chat.json".into())),
            ("/clear", Command::Reset),
            ("/quit", Command::Exit),
        ] {
            assert_eq!(Command::read(line), command, "{line:?}");
        }
        for (line, why) in [
            ("/sett top_p 1", "/sett is no command"),
            ("/set top_p", "needs a value"),
            ("/save", "the name of a file"),
            ("/exit now", "/exit takes nothing more"),
        ] {
            let Command::Wrong(said) = Command::read(line) else { panic!("{line}") };
            assert!(said.contains(why), "{said}");
        }
    }
}
