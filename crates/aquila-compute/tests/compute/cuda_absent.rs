//! A machine without a CUDA device is told so, and nothing panics.

use aquila_compute::cuda::{Arithmetic, CudaBackend};
use aquila_compute::{Backend, Error};

#[test]
fn without_a_device_the_backend_says_what_is_missing() {
    match CudaBackend::new(0, Arithmetic::Tensor) {
        Err(Error::Unavailable(text)) => {
            assert!(text.contains("CUDA"), "the text names what is missing: {text}");
        }
        Err(other) => panic!("expected Error::Unavailable, got {other}"),
        Ok(backend) => println!("skipped: this machine has {}", backend.describe()),
    }
}

#[test]
fn a_device_that_no_machine_has_is_unavailable() {
    let opened = CudaBackend::new(4096, Arithmetic::Plain);
    let error = opened.err().expect("no machine has so many");
    let counted = matches!(error, Error::NoSuchDevice { ordinal: 4096, count: 1.. });
    assert!(counted || matches!(error, Error::Unavailable(_)), "{error}");
}
