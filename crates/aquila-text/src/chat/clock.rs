//! `strftime_now`: the date in a prompt.
//!
//! The invariant: the time is UTC and the names are English, so that a prompt depends neither on
//! where nor on which machine it is rendered.

use std::time::SystemTime;

use jiff::Timestamp;
use jiff::fmt::strtime;
use jiff::tz::TimeZone;
use minijinja::{Error, ErrorKind};

/// `datetime.now().strftime(format)`.
pub(super) fn strftime(now: SystemTime, format: &str) -> Result<String, Error> {
    let refused = |error: jiff::Error| {
        let reason = format!("strftime_now({format:?}): {error}");
        Error::new(ErrorKind::InvalidOperation, reason)
    };
    let now = Timestamp::try_from(now).map_err(refused)?.to_zoned(TimeZone::UTC).datetime();
    // A time that knows no zone writes none, in Python too.
    let zoneless = |text: &str| text.replace("%Z", "").replace("%z", "");
    let format = format.split("%%").map(zoneless).collect::<Vec<_>>().join("%%");
    strtime::format(format, now).map_err(refused)
}
