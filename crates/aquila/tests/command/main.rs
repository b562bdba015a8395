//! The command as its users meet it: the real binary, the shipped model, files and pipes; and the
//! conformance checks that the crate offers to algorithms of others.

mod access;
mod bench;
mod bench_serve;
mod chat;
mod checkpoints;
mod combinations;
mod conformance;
mod disaggregation;
mod flags;
mod golden;
mod heads;
mod hub;
#[path = "../../../aquila-model/tests/model/hub_server.rs"]
mod hub_server;
mod launch_lines;
mod lines;
mod log;
mod metrics_page;
mod output;
mod overlap;
mod policies;
mod priorities;
mod run;
mod sampling;
mod scripted_server;
mod seeds;
mod server;
mod serving;
mod shell;
mod speculation;
mod streams;
