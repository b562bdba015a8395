//! What CUDA finds on a machine, and whether a device works.

use std::ffi::c_int;

use cudarc::driver::result;
use cudarc::driver::sys::{CUdevice_attribute, CUresult, cuDriverGetVersion, is_culib_present};

use half::bf16;

use super::device::failed;
use super::{Arithmetic, CudaBackend, contract};
use crate::{Accumulate, Backend, Error, HostTensor, Result, WeightFormat};

/// The oldest version of CUDA whose driver loads the kernels of this build.
pub const NEEDED_CUDA: (u32, u32) = (13, 0);

/// Outputs, inputs and rows of the projection that is tried; none of them whole tiles.
const TRIED: (usize, usize, usize) = (72, 1000, 3);

/// The driver, and the devices that it has.
#[derive(Debug, Clone)]
pub struct FoundDriver {
    /// The newest version of CUDA that it serves: 13.0 is (13, 0).
    pub cuda: (u32, u32),
    /// Its devices, by index.
    pub devices: Vec<FoundDevice>,
}

impl FoundDriver {
    /// The first device that there are kernels for.
    pub fn first_served(&self) -> Option<usize> {
        let served = self.devices.iter().position(FoundDevice::is_served);
        served.filter(|_| self.cuda >= NEEDED_CUDA)
    }
}

/// A device.
#[derive(Debug, Clone)]
pub struct FoundDevice {
    /// What it is called.
    pub name: String,
    /// Its compute capability.
    pub capability: (u32, u32),
    /// Bytes of its memory.
    pub bytes: usize,
}

impl FoundDevice {
    /// Whether there are kernels for it.
    pub fn is_served(&self) -> bool {
        self.capability.0 >= 8
    }
}

/// The driver of this machine; none where its library is not there.
///
/// # Errors
/// If the library is there and the driver is not, or does not answer.
pub fn find_driver() -> Result<Option<FoundDriver>> {
    // SAFETY: loads the library and looks at nothing else; its initializers are NVIDIA's.
    if !unsafe { is_culib_present() } {
        return Ok(None);
    }
    let cuda = driver_version()?;
    let devices = (0..device_count()?).map(find_device).collect::<Result<_>>()?;
    Ok(Some(FoundDriver { cuda, devices }))
}

/// The newest version of CUDA that the driver serves; its library must be there.
fn driver_version() -> Result<(u32, u32)> {
    let mut version: c_int = 0;
    // SAFETY: writes one number.
    unsafe { cuDriverGetVersion(&mut version) }
        .result()
        .map_err(failed("asking for the driver's version"))?;
    let version = version.unsigned_abs();
    Ok((version / 1000, version % 1000 / 10))
}

/// Refuses a driver that is older than what the kernels were compiled for.
pub(super) fn check_driver() -> Result<()> {
    let (major, minor) = driver_version()?;
    if (major, minor) >= NEEDED_CUDA {
        return Ok(());
    }
    let (needed, point) = NEEDED_CUDA;
    Err(Error::Unavailable(format!(
        "the NVIDIA driver serves CUDA {major}.{minor}, and CUDA {needed}.{point} is needed: install \
         driver 580 or newer, or choose the CPU"
    )))
}

/// Starts the driver, whose library must be there, and counts the devices that it shows.
pub(super) fn device_count() -> Result<usize> {
    match result::init() {
        // No GPU, or none that this process may see.
        Err(error) if error.0 == CUresult::CUDA_ERROR_NO_DEVICE => Ok(0),
        started => {
            // Whatever code says so: nothing was there to be lost yet.
            let not_ready = |error| Error::Device(format!("starting the driver: {error}"));
            started.map_err(not_ready)?;
            let count = result::device::get_count().map_err(failed("counting devices"))?;
            Ok(usize::try_from(count).unwrap_or(0))
        }
    }
}

fn find_device(ordinal: usize) -> Result<FoundDevice> {
    let about = failed("asking about a device");
    let device = result::device::get(ordinal as c_int).map_err(&about)?;
    let name = result::device::get_name(device).map_err(&about)?;
    let number = |attribute| {
        // SAFETY: the driver has just given the device.
        unsafe { result::device::get_attribute(device, attribute) }
            .map(c_int::unsigned_abs)
            .map_err(&about)
    };
    let major = number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    // SAFETY: as above.
    let bytes = unsafe { result::device::total_mem(device) }.map_err(&about)?;
    Ok(FoundDevice { name, capability: (major, minor), bytes })
}

/// Runs a small projection: how many values differ from their definition, and how many there are.
///
/// # Errors
/// If the device cannot be used.
pub fn try_device(ordinal: usize) -> Result<(usize, usize)> {
    let (outputs, inputs, rows) = TRIED;
    let backend = CudaBackend::new(ordinal, Arithmetic::Tensor)?;
    let values = |count: usize, step: usize| -> Vec<f32> {
        let value = |i: usize| (i * step % 1009) as f32 / 504.0 - 1.0;
        (0..count).map(|i| bf16::from_f32(value(i)).to_f32()).collect()
    };
    let (weights, x) = (values(outputs * inputs, 7), values(rows * inputs, 31));
    let tensor = HostTensor::from_f32("w", vec![outputs, inputs], &weights)?;
    let weight = backend.pack(&[tensor], WeightFormat::Bf16)?;
    let input = backend.rows_of(inputs, &x)?;
    let mut out = backend.rows_of(outputs, &vec![f32::NAN; rows * outputs])?;
    backend.project(&weight, None, &input, rows, Accumulate::Set, &mut out)?;
    let halves = |values: &[f32]| -> Vec<bf16> {
        values.iter().map(|&value| bf16::from_f32(value)).collect()
    };
    let (weights, x) = (halves(&weights), halves(&x));
    let of_row = |x: &[bf16]| -> Vec<f32> {
        weights.chunks(inputs).map(|w| contract::project(x, w)).collect()
    };
    let want: Vec<f32> = x.chunks(inputs).flat_map(of_row).collect();
    let got = backend.read(&out, rows)?;
    let differing = got.iter().zip(&want).filter(|(got, want)| got.to_bits() != want.to_bits());
    Ok((differing.count(), want.len()))
}
