//! Tensors as a checkpoint stores them, before a backend packs them.

use bytes::Bytes;
use half::{bf16, f16};

use crate::{Error, Result};

/// The element type of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
    /// 64-bit signed integers.
    I64,
    /// One byte per truth value.
    Bool,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::Bf16 | DType::F16 => 2,
            DType::F32 => 4,
            DType::I64 => 8,
            DType::Bool => 1,
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DType::Bf16 => "bfloat16",
            DType::F16 => "float16",
            DType::F32 => "float32",
            DType::I64 => "int64",
            DType::Bool => "bool",
        })
    }
}

/// A row-major tensor in host memory. Cloning shares the bytes, which may be a mapped file.
#[derive(Debug, Clone)]
pub struct HostTensor {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    bytes: Bytes,
}

impl HostTensor {
    /// A tensor over `bytes`; refused if the size does not follow from the shape.
    pub fn new(
        name: impl Into<String>,
        dtype: DType,
        shape: Vec<usize>,
        bytes: Bytes,
    ) -> Result<Self> {
        let name = name.into();
        let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        let expected = elements.and_then(|n| n.checked_mul(dtype.size()));
        if expected != Some(bytes.len()) {
            return Err(Error::Tensor(format!(
                "tensor {name}: {} bytes do not hold shape {shape:?} of {dtype}",
                bytes.len()
            )));
        }
        Ok(Self { name, dtype, shape, bytes })
    }

    /// A float32 tensor that owns its values.
    pub fn from_f32(name: impl Into<String>, shape: Vec<usize>, values: &[f32]) -> Result<Self> {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        Self::new(name, DType::F32, shape, bytes.into())
    }

    /// A bfloat16 tensor that owns its values, rounded half to even.
    pub fn from_f32_as_bf16(
        name: impl Into<String>,
        shape: Vec<usize>,
        values: &[f32],
    ) -> Result<Self> {
        let bytes =
            values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect::<Vec<u8>>();
        Self::new(name, DType::Bf16, shape, bytes.into())
    }

    /// The tensor's name in its checkpoint.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape, outermost dimension first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The raw little-endian bytes.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// Whether the tensor has no element.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Rows and columns of a matrix.
    pub fn matrix(&self) -> Result<(usize, usize)> {
        match self.shape[..] {
            [rows, columns] => Ok((rows, columns)),
            _ => Err(Error::Tensor(format!(
                "tensor {}: a matrix is needed, found shape {:?}",
                self.name, self.shape
            ))),
        }
    }

    /// Elements `start..start + out.len()`, widened to f32.
    ///
    /// # Panics
    /// If the range leaves the tensor.
    pub fn read_f32(&self, start: usize, out: &mut [f32]) -> Result<()> {
        let size = self.dtype.size();
        let bytes = &self.bytes[start * size..(start + out.len()) * size];
        match self.dtype {
            DType::Bf16 => {
                for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *o = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
                }
            }
            DType::F16 => {
                for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *o = f16::from_le_bytes([b[0], b[1]]).to_f32();
                }
            }
            DType::F32 => {
                for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
            DType::I64 | DType::Bool => {
                return Err(Error::Tensor(format!(
                    "tensor {}: {} where floating-point values are needed",
                    self.name, self.dtype
                )));
            }
        }
        Ok(())
    }

    /// All elements, widened to f32.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let mut values = vec![0.0; self.len()];
        self.read_f32(0, &mut values)?;
        Ok(values)
    }
}
