//! The command as its users meet it: the real binary, the shipped model, files and pipes.

mod access;
mod bench;
mod checkpoints;
mod flags;
mod golden;
mod heads;
mod launch_lines;
mod lines;
mod log;
mod output;
mod overlap;
mod policies;
mod priorities;
mod run;
mod sampling;
mod seeds;
mod server;
mod serving;
mod speculation;
mod streams;
