//! The line where the user types, with editing and a history that outlives the program.

use std::io::IsTerminal;
use std::path::PathBuf;

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use crate::error::{Error, Result};

/// What the user did.
pub enum Input {
    /// Typed this.
    Text(String),
    /// Gave the line up.
    Interrupted,
    /// Left.
    End,
}

/// The line.
pub struct Line {
    editor: DefaultEditor,
    history: Option<PathBuf>,
    dim: bool,
}

impl Line {
    /// Opens the line, with the history of former conversations.
    pub fn open() -> Result<Self> {
        let failed = |error| Error::Other(format!("cannot read from the terminal: {error}"));
        let mut editor = DefaultEditor::new().map_err(failed)?;
        let history = history_file();
        if let Some(path) = &history {
            // A first conversation has no history yet.
            let _ = editor.load_history(path);
        }
        let dim = std::io::stderr().is_terminal();
        Ok(Self { editor, history, dim })
    }

    /// Reads what the user types, over several lines where they end in a backslash.
    pub fn read(&mut self) -> Result<Input> {
        let mut text = String::new();
        loop {
            let prompt = if text.is_empty() { "> " } else { ". " };
            match self.editor.readline(prompt) {
                Ok(line) => match line.strip_suffix('\\') {
                    Some(line) => text += &format!("{line}\n"),
                    None => {
                        text += &line;
                        self.remember(&text);
                        return Ok(Input::Text(text));
                    }
                },
                Err(ReadlineError::Interrupted) => return Ok(Input::Interrupted),
                Err(ReadlineError::Eof) => return Ok(Input::End),
                Err(error) => {
                    return Err(Error::Other(format!("cannot read from the terminal: {error}")));
                }
            }
        }
    }

    /// Says something that is no answer.
    pub fn say(&self, text: &str) {
        if self.dim { eprintln!("\x1b[2m{text}\x1b[0m") } else { eprintln!("{text}") }
    }

    fn remember(&mut self, text: &str) {
        // A history that cannot be kept is no reason not to talk.
        let _ = self.editor.add_history_entry(text);
        if let Some(path) = &self.history {
            let _ = path.parent().map(std::fs::create_dir_all);
            let _ = self.editor.append_history(path);
        }
    }
}

/// Where the history is kept: the user's folder for state.
fn history_file() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").filter(|path| !path.is_empty());
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    let folder = state.map(PathBuf::from).or_else(home)?;
    Some(folder.join("aquila/chat-history"))
}
