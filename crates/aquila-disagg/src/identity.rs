//! What must be equal on two workers for one to go on where the other stopped.

use aquila_spec::bytes::{Reader, Writer};

/// Names and values: model, dtypes, algorithm, kernel family, shapes of the KV groups.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity(Vec<(String, String)>);

impl Identity {
    /// Adds a value that must be equal.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.0.push((name.to_owned(), value.to_string()));
        self
    }

    /// The first thing in which `other` differs, in words.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let value = |of: &Self, name: &str| {
            of.0.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone())
        };
        let names = self.0.iter().chain(&other.0).map(|(name, _)| name);
        for name in names {
            let (here, there) = (value(self, name), value(other, name));
            if here != there {
                let said = |value: Option<String>| value.unwrap_or_else(|| "none".to_owned());
                return Some(format!(
                    "the {name} is {} here and {} there",
                    said(here),
                    said(there)
                ));
            }
        }
        None
    }

    pub(crate) fn write(&self, writer: &mut Writer) {
        writer.list(&self.0, |writer, (name, value)| {
            writer.text(name);
            writer.text(value);
        });
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Option<Self> {
        reader.list(16, |reader| Some((reader.text()?, reader.text()?))).map(Self)
    }
}
