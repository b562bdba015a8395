//! What a code of the driver means: a call that failed, or a device that is lost.
//!
//! The one invariant: a code that every later call of the process answers, too, becomes
//! [`Error::DeviceLost`], wherever it came up.

use std::fmt::Display;

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

use crate::Error;

/// A failure that the driver reported while doing `what`.
pub(super) fn failed(what: &str) -> impl Fn(DriverError) -> Error + '_ {
    move |error| error_of(error.0, what, error)
}

/// A failure of the driver to find `bytes` bytes for `what`.
pub(super) fn lacking(what: impl Into<String>, bytes: usize) -> impl FnOnce(DriverError) -> Error {
    move |error| match is_lost(error.0) {
        true => error_of(error.0, "making room for memory", error),
        false => Error::OutOfMemory { what: what.into(), bytes },
    }
}

fn error_of(code: CUresult, what: &str, said: impl Display) -> Error {
    let told = format!("{what}: {said}");
    if is_lost(code) { Error::DeviceLost(told) } else { Error::Device(told) }
}

/// Whether the context serves no more after this code. The driver's documentation says so of all but
/// the last, which is what a device answers that left the bus.
fn is_lost(code: CUresult) -> bool {
    matches!(
        code,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUresult::CUDA_ERROR_CONTAINED
            | CUresult::CUDA_ERROR_EXTERNAL_DEVICE
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_DEINITIALIZED
            | CUresult::CUDA_ERROR_MPS_CONNECTION_FAILED
            | CUresult::CUDA_ERROR_MPS_RPC_FAILURE
            | CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED
            | CUresult::CUDA_ERROR_UNKNOWN
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_that_stick_lose_the_device() {
        for code in [
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            CUresult::CUDA_ERROR_LAUNCH_FAILED,
            CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
            CUresult::CUDA_ERROR_ASSERT,
            CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED,
            CUresult::CUDA_ERROR_UNKNOWN,
        ] {
            let error = error_of(code, "waiting", "the driver's words");
            assert!(matches!(&error, Error::DeviceLost(_)), "{code:?}: {error:?}");
            assert_eq!(error.to_string(), "the device is lost: waiting: the driver's words");
        }
    }

    #[test]
    fn codes_of_one_call_do_not() {
        for code in [
            CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            CUresult::CUDA_ERROR_INVALID_VALUE,
            CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
            CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            CUresult::CUDA_ERROR_NOT_SUPPORTED,
            CUresult::CUDA_ERROR_SYSTEM_NOT_READY,
        ] {
            let error = error_of(code, "launching", "no");
            assert!(matches!(error, Error::Device(_)), "{code:?}: {error:?}");
        }
    }

    #[test]
    fn memory_that_a_lost_device_refuses_is_not_short() {
        let full = DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        assert!(matches!(lacking("rows", 8)(full), Error::OutOfMemory { bytes: 8, .. }));
    }
}
