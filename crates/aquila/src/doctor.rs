//! `aquila doctor`: what this machine has to run models on, what is missing, and whether it works.

use std::fmt::Write as _;
use std::io::{Write, stdout};
use std::process::ExitCode;

use aquila_compute::Backend;
use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::cuda::{FoundDevice, FoundDriver, NEEDED_CUDA, find_driver, try_device};
use aquila_engine::available_memory;
use aquila_model::memory::ByteSize;
use clap::Args;

use crate::after_help::AFTER_HELP;
use crate::error::{Error, Result};

const INSTALL: &str = "install NVIDIA's driver, 580 or newer: nothing else of CUDA is needed";

/// Say what this machine has to run models on, and what is missing.
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Doctor {}

impl Doctor {
    /// Prints what was found; exit code 1 if a device is there and cannot be used.
    pub fn run(&self) -> Result<ExitCode> {
        let mut report = Report::default();
        report.line("aquila", env!("AQUILA_VERSION"));
        report.line("CPU", CpuBackend::new(IsaChoice::Auto, 0)?.describe());
        report.line("memory", format_args!("{} available", ByteSize(available_memory())));
        match find_driver() {
            Ok(None) => {
                report.line("CUDA", "no driver: its library, libcuda.so, was not found");
                report.line("", format_args!("to use an NVIDIA GPU, {INSTALL}"));
            }
            Ok(Some(driver)) => report.driver(&driver),
            Err(error) => {
                report.broken("CUDA", format_args!("the driver does not work: {error}"));
                report.line(
                    "",
                    "is a GPU there, its kernel module loaded (nvidia-smi), and the container",
                );
                report.line("", "started with access to it (docker run --gpus all)?");
            }
        }
        let printed = stdout().write_all(report.text.as_bytes());
        printed.map_err(|error| Error::output("standard output", error))?;
        Ok(if report.broken { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }
}

/// What is printed, and whether something is there that does not work.
#[derive(Default)]
struct Report {
    text: String,
    broken: bool,
}

impl Report {
    fn line(&mut self, name: &str, what: impl std::fmt::Display) {
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "{name:<10}{what}");
    }

    fn broken(&mut self, name: &str, what: impl std::fmt::Display) {
        self.broken = true;
        self.line(name, what);
    }

    fn driver(&mut self, driver: &FoundDriver) {
        let (major, minor) = driver.cuda;
        self.line("CUDA", format_args!("a driver for CUDA {major}.{minor}"));
        if driver.cuda < NEEDED_CUDA {
            let (major, minor) = NEEDED_CUDA;
            self.broken("", format_args!("too old, CUDA {major}.{minor} is needed: {INSTALL}"));
            return;
        }
        if driver.devices.is_empty() {
            self.line("", "no GPU that this process may see: CUDA_VISIBLE_DEVICES, a container's");
            self.line("", "access to GPUs and PrivateDevices of a systemd unit hide them");
        }
        for (ordinal, device) in driver.devices.iter().enumerate() {
            self.device(ordinal, device);
        }
    }

    fn device(&mut self, ordinal: usize, device: &FoundDevice) {
        let name = format!("cuda:{ordinal}");
        let (major, minor) = device.capability;
        let memory = ByteSize(device.bytes as u64);
        self.line(&name, format_args!("{}, capability {major}.{minor}, {memory}", device.name));
        if !device.is_served() {
            self.line("", "cannot be used: compute capability 8.0 (Ampere) is needed");
            return;
        }
        match try_device(ordinal) {
            Ok((0, _)) => self.line("", "the kernels give the bits of their definition"),
            // The definition of a step of a tensor core is Hopper's.
            Ok((differing, values)) if device.capability != (9, 0) => {
                self.line(
                    "",
                    format_args!("{differing} of {values} values are not those of a Hopper;"),
                );
                self.line("", "texts are still the same with and without drafts");
            }
            Ok((differing, values)) => {
                let wrong = format_args!("the kernels are wrong: {differing} of {values} differ");
                self.broken("", wrong);
            }
            Err(error) => self.broken("", format_args!("cannot be used: {error}")),
        }
    }
}
