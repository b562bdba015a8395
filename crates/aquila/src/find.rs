//! From the names that users give to models and files on this machine.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use aquila_model::{HubEvent, Location, Places};
use indicatif::{DecimalBytes, ProgressBar, ProgressStyle};

use crate::error::Result;
use crate::notice::notice;
use crate::start::progress_bar;

/// No wider than a terminal of 80 columns.
const TEMPLATE: &str = "{msg:24!} [{bar:14}] {decimal_bytes} of {decimal_total_bytes}, \
                        {decimal_bytes_per_sec}, {eta} left";

/// What was found, by name and revision.
type Found = HashMap<(String, Option<String>), Location>;

/// The model of this name, at this revision if it is one of the hub; a download is shown as it
/// goes. A name means the same place until the process ends, so that the hub is asked once.
pub fn find(name: &str, revision: Option<&str>, quiet: bool) -> Result<Location> {
    static FOUND: Mutex<Option<Found>> = Mutex::new(None);

    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    let found = found.get_or_insert_default();
    let key = (name.to_owned(), revision.map(str::to_owned));
    if let Some(location) = found.get(&key) {
        return Ok(location.clone());
    }
    let shown = Shown::new(name, quiet);
    let location = Places::of_this_machine().resolve(name, revision, &mut |e| shown.event(e))?;
    shown.end();
    found.insert(key, location.clone());
    Ok(location)
}

/// The file of this name: a path, or `org/name/file` of the hub.
pub fn find_file(name: &Path, quiet: bool) -> Result<PathBuf> {
    let shown = Shown::new(&name.display().to_string(), quiet);
    let path = Places::of_this_machine().resolve_file(name, &mut |e| shown.event(e))?;
    shown.end();
    Ok(path)
}

/// What a user sees of the hub.
struct Shown {
    name: String,
    quiet: bool,
    bar: ProgressBar,
}

impl Shown {
    fn new(name: &str, quiet: bool) -> Self {
        let style = ProgressStyle::with_template(TEMPLATE).expect("the template is well formed");
        let bar = progress_bar(quiet, "").with_style(style.progress_chars("=> "));
        Self { name: name.to_owned(), quiet, bar }
    }

    fn event(&self, event: HubEvent<'_>) {
        let Self { name, quiet, bar } = self;
        let say = |text: String| bar.suspend(|| notice(format_args!("{text}")));
        match event {
            HubEvent::Begun { files, total_bytes, into } => {
                if !quiet {
                    let bytes = DecimalBytes(total_bytes);
                    let files = if files == 1 { "1 file".into() } else { format!("{files} files") };
                    say(format!("download  {name}: {files}, {bytes}, into {}", into.display()));
                }
                bar.set_length(total_bytes);
            }
            HubEvent::Arrived { file, done_bytes } => {
                bar.set_message(file.to_owned());
                bar.set_position(done_bytes);
            }
            HubEvent::Waiting { file } if !quiet => {
                say(format!("download  {name}: another process downloads {file}; waiting for it"));
            }
            HubEvent::Waiting { .. } => {}
            HubEvent::CacheOnly { why } => {
                say(format!("warning: {name} is taken from the cache as it is there: {why}"));
            }
        }
    }

    fn end(&self) {
        self.bar.finish_and_clear();
    }
}
