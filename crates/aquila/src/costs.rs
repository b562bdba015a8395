//! What rounds cost here: from the file where an earlier start left it, or measured now.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aquila_engine::Scheduler;
use aquila_spec::policy::CostTable;

use crate::error::{Error, Result};

/// A table of costs, and where it is from.
pub struct Costs {
    /// What rounds cost.
    pub table: CostTable,
    /// Whether the table was read or measured, in words.
    pub origin: String,
}

impl Costs {
    /// Reads the table of `key` from `given`, or from where tables are kept; else measures it on
    /// `engine` and leaves it there if there was time to measure all of it. None if the engine has
    /// no room for that.
    ///
    /// # Errors
    /// If a file that was given cannot be read or written, or if rounds fail.
    pub fn find(
        engine: &mut Scheduler,
        key: String,
        given: Option<&Path>,
        limit: Duration,
    ) -> Result<Option<Self>> {
        let path = given.map(Path::to_owned).or_else(|| kept_at(&key));
        if let Some(table) = read(path.as_deref(), given.is_some())?
            && table.key == key
        {
            let origin = path.map_or_else(String::new, |path| path.display().to_string());
            return Ok(Some(Self { table, origin }));
        }
        let began = Instant::now();
        let Some(table) = engine.measure_costs(key, limit)? else { return Ok(None) };
        let took = began.elapsed();
        let mut origin = format!("measured in {:.1} s", took.as_secs_f64());
        if took >= limit {
            // The next start may have more time, or a quieter machine.
            origin += ", not kept: --speculative-cost-seconds left no time for all of it";
        } else if let Some(path) = &path {
            match write(path, &table) {
                Ok(()) => origin += &format!(", kept in {}", path.display()),
                Err(e) if given.is_some() => return Err(unusable(path, &e)),
                Err(e) => tracing::debug!("costs are not kept in {}: {e}", path.display()),
            }
        }
        Ok(Some(Self { table, origin }))
    }
}

/// The machine, as far as it decides what rounds cost.
pub fn machine() -> String {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{}, {cores} cores", name.map_or("unknown", |(_, name)| name))
}

fn kept_at(key: &str) -> Option<PathBuf> {
    let cache = match std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir),
        None => {
            PathBuf::from(std::env::var_os("HOME").filter(|dir| !dir.is_empty())?).join(".cache")
        }
    };
    // FNV-1a: a name that is the same in every build.
    let hash = key.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    Some(cache.join("aquila/costs").join(format!("{hash:016x}.json")))
}

fn read(path: Option<&Path>, given: bool) -> Result<Option<CostTable>> {
    let Some(path) = path else { return Ok(None) };
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) if given => return Err(unusable(path, &e)),
        Err(_) => return Ok(None),
    };
    match CostTable::from_json(&text) {
        Ok(table) => Ok(Some(table)),
        Err(e) if given => Err(unusable(path, &e)),
        Err(_) => Ok(None),
    }
}

/// Writes the whole file or nothing.
fn write(path: &Path, table: &CostTable) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let new = path.with_extension(format!("{}.new", std::process::id()));
    std::fs::write(&new, table.to_json())?;
    std::fs::rename(&new, path).inspect_err(|_| drop(std::fs::remove_file(&new)))
}

fn unusable(path: &Path, why: &dyn std::fmt::Display) -> Error {
    Error::Usage(format!("--speculative-cost-table {}: {why}", path.display()))
}
