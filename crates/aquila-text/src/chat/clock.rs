//! `strftime_now`: the date in a prompt.
//!
//! The invariant: the time is UTC and the names are English, so that a prompt depends neither on
//! where nor on which machine it is rendered.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// `datetime.now().strftime(format)` for the directives that have one meaning everywhere.
pub(super) fn strftime(now: SystemTime, format: &str) -> Result<String, Error> {
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, seconds) = ((since.as_secs() / 86_400) as i64, since.as_secs() % 86_400);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let date = Date::of(days);
    let month = MONTHS[date.month - 1];
    let weekday = DAYS[(days + 4).rem_euclid(7) as usize];
    let hour12 = (hour + 11) % 12 + 1;

    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        // `%-d` is the C library's way to leave out the leading zero.
        let bare = directive == Some('-');
        if bare {
            directive = chars.next();
        }
        let number = |value: u64, width: usize| {
            if bare { value.to_string() } else { format!("{value:0width$}") }
        };
        let text = match directive {
            Some('Y') => date.year.to_string(),
            Some('y') => number(date.year as u64 % 100, 2),
            Some('m') => number(date.month as u64, 2),
            Some('d') => number(date.day as u64, 2),
            Some('j') => number(date.day_of_year as u64, 3),
            Some('B') => month.to_owned(),
            Some('b' | 'h') => month[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('H') => number(hour, 2),
            Some('I') => number(hour12, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('F') => format!("{}-{:02}-{:02}", date.year, date.month, date.day),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('%') => "%".to_owned(),
            // A time that knows no zone writes none, in Python too.
            Some('Z' | 'z') => String::new(),
            other => {
                let directive = other.map_or_else(|| "%".to_owned(), |c| format!("%{c}"));
                let reason = format!("strftime_now does not know the directive {directive}");
                return Err(Error::new(ErrorKind::InvalidOperation, reason));
            }
        };
        out.push_str(&text);
    }
    Ok(out)
}

struct Date {
    year: i64,
    month: usize,
    day: i64,
    day_of_year: i64,
}

impl Date {
    /// The Gregorian date of a day counted from 1970-01-01.
    fn of(days_since_1970: i64) -> Self {
        let leap = |year: i64| year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let length = |year| if leap(year) { 366 } else { 365 };
        let mut year = 1970;
        let mut day = days_since_1970;
        while day >= length(year) {
            day -= length(year);
            year += 1;
        }
        let day_of_year = day + 1;
        let february = if leap(year) { 29 } else { 28 };
        let mut month = 1;
        for days in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
            if day < days {
                break;
            }
            day -= days;
            month += 1;
        }
        Self { year, month, day: day + 1, day_of_year }
    }
}
