//! Tensors as a checkpoint stores them, before a backend packs them.

use bytes::Bytes;
use half::{bf16, f16};

use crate::random_weights::RandomElements;
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

/// Elements compared at a time.
const PIECE: usize = 1 << 16;

/// A row-major tensor of a checkpoint: bytes, which cloning shares and which may be a mapped file, or
/// random weights, which are drawn where they are read.
#[derive(Debug, Clone)]
pub struct HostTensor {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    contents: Contents,
}

#[derive(Debug, Clone)]
enum Contents {
    Bytes(Bytes),
    Random(RandomElements),
}

/// The bytes that a tensor of this shape has, if there can be so many.
fn byte_len(dtype: DType, shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(dtype.size(), |n, &d| n.checked_mul(d))
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
        if byte_len(dtype, &shape) != Some(bytes.len()) {
            return Err(Error::Tensor(format!(
                "tensor {name}: {} bytes do not hold shape {shape:?} of {dtype}",
                bytes.len()
            )));
        }
        Ok(Self { name, dtype, shape, contents: Contents::Bytes(bytes) })
    }

    /// A bfloat16 tensor of random weights; refused if no memory could hold it.
    pub(crate) fn random(
        name: impl Into<String>,
        shape: Vec<usize>,
        elements: RandomElements,
    ) -> Result<Self> {
        let (name, dtype) = (name.into(), DType::Bf16);
        if byte_len(dtype, &shape).is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return Err(Error::Tensor(format!(
                "tensor {name}: no memory holds shape {shape:?} of {dtype}"
            )));
        }
        Ok(Self { name, dtype, shape, contents: Contents::Random(elements) })
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

    /// All bytes, little-endian; those of random weights are drawn for this call.
    pub fn bytes(&self) -> Bytes {
        match &self.contents {
            Contents::Bytes(bytes) => bytes.clone(),
            Contents::Random(_) => {
                let mut bytes = vec![0; self.byte_len()];
                self.read_bytes(0, &mut bytes);
                bytes.into()
            }
        }
    }

    /// How many bytes it has.
    pub fn byte_len(&self) -> usize {
        self.len() * self.dtype.size()
    }

    /// The random weights that it has, if it has.
    pub(crate) fn random_elements(&self) -> Option<&RandomElements> {
        match &self.contents {
            Contents::Bytes(_) => None,
            Contents::Random(elements) => Some(elements),
        }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the tensor has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether it has the type, the shape and all bits of `other`.
    pub fn equals(&self, other: &Self) -> bool {
        if self.dtype != other.dtype || self.shape != other.shape {
            return false;
        }
        match (&self.contents, &other.contents) {
            (Contents::Bytes(ours), Contents::Bytes(theirs)) => ours == theirs,
            (Contents::Random(ours), Contents::Random(theirs)) if ours == theirs => true,
            _ => (0..self.len()).step_by(PIECE).all(|start| {
                let bytes = PIECE.min(self.len() - start) * self.dtype.size();
                let (mut ours, mut theirs) = (vec![0; bytes], vec![0; bytes]);
                self.read_bytes(start, &mut ours);
                other.read_bytes(start, &mut theirs);
                ours == theirs
            }),
        }
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

    /// The bytes of the elements from `start` on: as many as fill `out`, which holds whole elements.
    ///
    /// # Panics
    /// If the range leaves the tensor.
    pub fn read_bytes(&self, start: usize, out: &mut [u8]) {
        let first = start * self.dtype.size();
        assert!(first + out.len() <= self.byte_len(), "a range beyond tensor {}", self.name);
        match &self.contents {
            Contents::Bytes(bytes) => out.copy_from_slice(&bytes[first..first + out.len()]),
            Contents::Random(elements) => {
                elements.draw(start, out.as_chunks_mut().0, |weight| weight.to_le_bytes());
            }
        }
    }

    /// Elements `start..start + out.len()`, widened to f32.
    ///
    /// # Panics
    /// If the range leaves the tensor.
    pub fn read_f32(&self, start: usize, out: &mut [f32]) -> Result<()> {
        let stored = match &self.contents {
            Contents::Bytes(bytes) => bytes,
            Contents::Random(elements) => {
                assert!(start + out.len() <= self.len(), "a range beyond tensor {}", self.name);
                elements
                    .draw(start, out, |weight| f32::from_bits(u32::from(weight.to_bits()) << 16));
                return Ok(());
            }
        };
        let size = self.dtype.size();
        let bytes = &stored[start * size..(start + out.len()) * size];
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
