//! The kernels, compiled when a backend is opened for the device that it found.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction};
use cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx_with_opts};

use crate::{Error, Result};

const SOURCE: &str = include_str!("kernels.cu");

/// Rows that one launch of a projection takes at most.
pub(super) const PROJECT_ROWS: usize = 8;

/// A kernel over stored elements, once for each way of storing them.
pub(super) struct ByElement {
    pub(super) bf16: CudaFunction,
    pub(super) f32: CudaFunction,
}

impl ByElement {
    /// The kernel for elements that are bfloat16, or are not.
    pub(super) fn of(&self, bf16: bool) -> &CudaFunction {
        if bf16 { &self.bf16 } else { &self.f32 }
    }
}

/// Every kernel of `kernels.cu`.
pub(super) struct Kernels {
    pub(super) embed: ByElement,
    pub(super) rms_norm: CudaFunction,
    /// By rows: 1, 2, 4, 8.
    project_bf16_narrow: [CudaFunction; 4],
    project_bf16_wide: [CudaFunction; 4],
    project_f32: [CudaFunction; 4],
    pub(super) write_kv: ByElement,
    pub(super) attend: ByElement,
    pub(super) attend_merge: CudaFunction,
    pub(super) swiglu: CudaFunction,
    pub(super) gather: CudaFunction,
    pub(super) copy_columns: CudaFunction,
    pub(super) move_slots: ByElement,
}

impl Kernels {
    /// Compiles for compute capability `major.minor` and loads.
    pub(super) fn compile(context: &Arc<CudaContext>, major: i32, minor: i32) -> Result<Self> {
        let options = CompileOptions {
            options: vec![format!("--gpu-architecture=compute_{major}{minor}")],
            name: Some("kernels.cu".into()),
            ..CompileOptions::default()
        };
        let ptx = compile_ptx_with_opts(SOURCE, options).map_err(|error| match error {
            CompileError::CompileError { log, .. } => Error::Unavailable(format!(
                "the kernels do not compile for compute capability {major}.{minor}: {}",
                log.to_string_lossy()
            )),
            other => Error::Unavailable(format!("the CUDA run-time compiler failed: {other}")),
        })?;
        let module = context.load_module(ptx).map_err(|error| {
            Error::Unavailable(format!(
                "the driver cannot load the kernels ({error}); a driver at least as new as the \
                 CUDA run-time compiler (libnvrtc) is needed"
            ))
        })?;
        let load = |name: &str| {
            module
                .load_function(name)
                .map_err(|error| Error::Device(format!("kernel {name} is missing: {error}")))
        };
        let pair = |name: &str| -> Result<ByElement> {
            Ok(ByElement {
                bf16: load(&format!("{name}_bf16"))?,
                f32: load(&format!("{name}_f32"))?,
            })
        };
        let by_rows = |element: &str, outputs: usize| -> Result<[CudaFunction; 4]> {
            let one = |rows: usize| load(&format!("project_{element}_{rows}x{outputs}"));
            Ok([one(1)?, one(2)?, one(4)?, one(8)?])
        };
        Ok(Self {
            embed: pair("embed")?,
            rms_norm: load("rms_norm")?,
            project_bf16_narrow: by_rows("bf16", 2)?,
            project_bf16_wide: by_rows("bf16", 4)?,
            project_f32: by_rows("f32", 2)?,
            write_kv: pair("write_kv")?,
            attend: pair("attend")?,
            attend_merge: load("attend_merge")?,
            swiglu: load("swiglu")?,
            gather: load("gather")?,
            copy_columns: load("copy_columns")?,
            move_slots: pair("move")?,
        })
    }

    /// The projection kernel for up to `rows` rows, and how many outputs one of its warps takes.
    /// Which one it is changes the speed and never the bits.
    pub(super) fn project(
        &self,
        bf16: bool,
        rows: usize,
        outputs: usize,
        multiprocessors: usize,
    ) -> (&CudaFunction, usize) {
        let by_rows = rows.next_power_of_two().trailing_zeros() as usize;
        if !bf16 {
            return (&self.project_f32[by_rows], 2);
        }
        // More outputs per warp read the activations less often; fewer fill more multiprocessors.
        let wide_fills = outputs >= 4 * multiprocessors * 8 * 4;
        if rows > 4 || wide_fills {
            (&self.project_bf16_wide[by_rows], 4)
        } else {
            (&self.project_bf16_narrow[by_rows], 2)
        }
    }
}
