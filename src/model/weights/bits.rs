//! Values read and compared in the bytes of a file, without libtorch.

use half::{bf16, f16};
use sha2::{Digest, Sha256};
use tch::Kind;

use super::tensor_file::StoredType;
use super::{WeightFiles, WeightsError};
use crate::files;

impl WeightFiles {
    /// The values of a tensor of int32 or int64, in the order of a contiguous tensor.
    ///
    /// # Errors
    /// [`WeightsError`] if it is missing or has another dtype.
    pub fn integers(&self, name: &str) -> Result<Vec<i64>, WeightsError> {
        let wanted = if self.kind(name) == Some(Kind::Int) { Kind::Int } else { Kind::Int64 };
        let (tensor, kind) = self.header(name, &self.shape(name)?, Some(wanted))?;
        let elements = tensor.elements(kind);
        Ok(match kind {
            Kind::Int => elements.map(|bytes| i32::from_le_bytes(bytes.try_into().expect("4 bytes")).into()).collect(),
            _ => elements.map(|bytes| i64::from_le_bytes(bytes.try_into().expect("8 bytes"))).collect(),
        })
    }

    /// Whether two weights have the same dtype, shape and bits.
    ///
    /// # Errors
    /// [`WeightsError`] if one is missing, or of a dtype that weights cannot have.
    pub fn same_bits(&self, one: &str, other: &str) -> Result<bool, WeightsError> {
        let ((one, kind), (other, other_kind)) =
            (self.header(one, &self.shape(one)?, None)?, self.header(other, &self.shape(other)?, None)?);
        if kind != other_kind || one.dtype != other.dtype || one.shape != other.shape {
            return Ok(false);
        }
        Ok(match (&one.strides, &other.strides) {
            (None, None) => one.data == other.data && one.conversion == other.conversion,
            _ => one.elements(kind).eq(other.elements(kind)),
        })
    }

    /// A hash of the names and shapes of all weights, and of the first values of each in bfloat16. Fine-tuned weights have another one, and a
    /// copy in other files or another dtype nearly always the same.
    ///
    /// # Errors
    /// [`WeightsError`] for a dtype that weights cannot have.
    pub fn fingerprint(&self) -> Result<String, WeightsError> {
        const VALUES: usize = 16; // on the page that holds the first one
        let mut all = Sha256::new();
        for name in self.names() {
            let (tensor, kind) = self.header(name, &self.shape(name)?, None)?;
            all.update(format!("{name} {:?}\n", tensor.shape));
            match tensor.dtype {
                StoredType::Blocks(_) => {
                    tensor
                        .first_numbers(VALUES)
                        .iter()
                        .for_each(|&number| all.update(bf16::from_f32(number).to_le_bytes()));
                }
                StoredType::Number(_) => {
                    tensor.elements(kind).take(VALUES).for_each(|bytes| all.update(rounded(bytes, kind).to_le_bytes()));
                }
            }
        }
        Ok(files::hex(&all.finalize()))
    }

    /// Whether all elements of a weight are 0 or -0.
    ///
    /// # Errors
    /// [`WeightsError`] if it is missing, or of a dtype that weights cannot have.
    pub fn is_zero(&self, name: &str) -> Result<bool, WeightsError> {
        const SIGN: u8 = 0x80; // in the last byte of a float
        let (tensor, kind) = self.header(name, &self.shape(name)?, None)?;
        if let StoredType::Blocks(_) = tensor.dtype {
            return Ok(tensor.first_numbers(usize::MAX / 2).iter().all(|number| *number == 0.0));
        }
        let is_zero = |bytes: &[u8]| {
            bytes.split_last().is_none_or(|(last, rest)| last & !SIGN == 0 && rest.iter().all(|&byte| byte == 0))
        };
        Ok(tensor.elements(kind).all(is_zero))
    }
}

fn rounded(bytes: &[u8], kind: Kind) -> bf16 {
    match kind {
        Kind::BFloat16 => bf16::from_le_bytes(bytes.try_into().expect("2 bytes")),
        Kind::Half => bf16::from_f32(f16::from_le_bytes(bytes.try_into().expect("2 bytes")).to_f32()),
        Kind::Float => bf16::from_f32(f32::from_le_bytes(bytes.try_into().expect("4 bytes"))),
        _ => bf16::from_f64(f64::from_le_bytes(bytes.try_into().expect("8 bytes"))),
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Tensor};

    use super::*;
    use crate::model::weights::tensor_file::Planned;
    use crate::model::weights::torch_file;

    /// A file of torch keeps strides.
    fn file(folder: &tempfile::TempDir, tensors: &[(&str, Tensor)]) -> WeightFiles {
        let path = folder.path().join("weights.pt");
        let planned: Vec<Planned> =
            tensors.iter().map(|(name, tensor)| Planned::of((*name).to_owned(), tensor)).collect();
        torch_file::save(&path, &planned, &mut |at| Ok(tensors[at].1.shallow_clone())).unwrap();
        WeightFiles::open_file(&path).unwrap()
    }

    /// The tensor under a further name, transposed in place.
    fn transpose(file: &mut WeightFiles, name: &str, again: &str) {
        let tensor = file.find(name).unwrap().1;
        let (dtype, conversion, data, rows) = (tensor.dtype, tensor.conversion, tensor.data, tensor.shape[1]);
        let stored = super::super::StoredTensor {
            dtype,
            conversion,
            data,
            shape: vec![rows, tensor.shape[0]],
            strides: Some(vec![1, rows]),
        };
        file.file_of.insert(again.into(), 0);
        file.files[0].tensors.insert(again.into(), stored);
    }

    #[test]
    fn a_fingerprint_is_of_the_values_whatever_their_dtype() {
        let folder = tempfile::tempdir().unwrap();
        let fingerprint = |values: [f64; 2], kind| {
            file(&folder, &[("w", Tensor::from_slice(&values).to_kind(kind))]).fingerprint().unwrap()
        };
        let one = fingerprint([1.0, 0.5], Kind::Float);
        for kind in [Kind::Double, Kind::BFloat16, Kind::Half] {
            assert_eq!(fingerprint([1.0, 0.5], kind), one);
        }
        assert_ne!(fingerprint([1.0, 0.25], Kind::Float), one);
        assert!(file(&folder, &[("w", Tensor::from_slice(&[1_i64]))]).fingerprint().is_err());
    }

    #[test]
    fn integers_are_those_that_libtorch_reads() {
        let folder = tempfile::tempdir().unwrap();
        let numbers = |kind| (Tensor::arange(6, (Kind::Int64, Device::Cpu)) - 2).view([2, 3]).to_kind(kind);
        let tensors = [("long", numbers(Kind::Int64)), ("int", numbers(Kind::Int)), ("float", numbers(Kind::Float))];
        let mut file = file(&folder, &tensors);
        transpose(&mut file, "long", "transposed");
        for (name, kind, shape) in
            [("long", Kind::Int64, [2, 3]), ("int", Kind::Int, [2, 3]), ("transposed", Kind::Int64, [3, 2])]
        {
            let read = file.mapped_as(name, &shape, kind).unwrap().to_kind(Kind::Int64).view(-1);
            assert_eq!(file.integers(name).unwrap(), Vec::<i64>::try_from(read).unwrap(), "{name}");
        }
        let error = file.integers("float").unwrap_err().to_string();
        assert!(error.contains("F32") && error.contains("I64"), "{error}");
    }

    #[test]
    fn weights_are_the_same_or_zero_where_libtorch_says_so() {
        let folder = tempfile::tempdir().unwrap();
        for kind in [Kind::Double, Kind::Float, Kind::BFloat16, Kind::Half] {
            let matrix = |values: [f64; 4]| Tensor::from_slice(&values).to_kind(kind).view([2, 2]);
            let tensors = [
                ("symmetric", matrix([1.0, 2.0, 2.0, 3.0])),
                ("other", matrix([1.0, 2.0, 4.0, 3.0])),
                ("zero", matrix([0.0; 4])),
                ("minus zero", matrix([-0.0; 4])),
                ("last", matrix([0.0, 0.0, 0.0, 1.0])),
            ];
            let mut file = file(&folder, &tensors);
            for name in ["symmetric", "other"] {
                transpose(&mut file, name, &format!("{name} transposed"));
            }
            let read = |name: &str| file.mapped(name, &[2, 2]).unwrap();
            for one in file.names() {
                assert_eq!(file.is_zero(one).unwrap(), read(one).count_nonzero(None).int64_value(&[]) == 0, "{one}");
                for other in file.names().into_iter().filter(|other| [one, other].concat().find("zero").is_none()) {
                    assert_eq!(file.same_bits(one, other).unwrap(), read(one).equal(&read(other)), "{one} {other}");
                }
            }
        }
    }
}
