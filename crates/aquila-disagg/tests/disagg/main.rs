//! Two workers and what is between them.

mod messages;
mod support;
mod workers;
