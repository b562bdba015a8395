//! Torch files from tensors in memory, the way `torch.save` lays them out.

use aquila_compute::{DType, HostTensor};

/// A file as `torch.save` writes it of a dictionary of tensors.
pub fn torch_file<'a>(tensors: impl Iterator<Item = &'a HostTensor>) -> Vec<u8> {
    let mut pickle = b"\x80\x02}(".to_vec();
    let text = |pickle: &mut Vec<u8>, text: &str| {
        pickle.push(b'X');
        pickle.extend((text.len() as u32).to_le_bytes());
        pickle.extend(text.bytes());
    };
    let int = |pickle: &mut Vec<u8>, n: usize| {
        pickle.push(b'J');
        pickle.extend((n as i32).to_le_bytes());
    };
    let mut members = Vec::new();
    for (number, tensor) in tensors.enumerate() {
        let storage = match tensor.dtype() {
            DType::Bf16 => "BFloat16Storage",
            DType::F16 => "HalfStorage",
            DType::F32 => "FloatStorage",
            DType::I64 => "LongStorage",
            DType::Bool => "BoolStorage",
        };
        text(&mut pickle, tensor.name());
        pickle.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        text(&mut pickle, "storage");
        pickle.extend(format!("ctorch\n{storage}\n").bytes());
        text(&mut pickle, &number.to_string());
        text(&mut pickle, "cpu");
        int(&mut pickle, tensor.len());
        pickle.extend(b"tQ");
        int(&mut pickle, 0);
        pickle.push(b'(');
        tensor.shape().iter().for_each(|&d| int(&mut pickle, d));
        pickle.extend(b"t(");
        for axis in 0..tensor.shape().len() {
            int(&mut pickle, tensor.shape()[axis + 1..].iter().product());
        }
        pickle.extend(b"t\x89ccollections\nOrderedDict\n)RtR");
        members.push((format!("head/data/{number}"), tensor.bytes().to_vec()));
    }
    pickle.extend(b"u.");
    members.insert(0, ("head/data.pkl".to_owned(), pickle));
    stored_zip(&members)
}

/// A zip file whose members are stored as they are.
pub fn stored_zip(members: &[(String, Vec<u8>)]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, bytes) in members {
        let (at, size) = (file.len() as u32, bytes.len() as u32);
        // Version, flags, method, time, date, checksum, both sizes, and lengths of name and extra.
        let mut fields = [0u8; 26];
        fields[14..18].copy_from_slice(&size.to_le_bytes());
        fields[18..22].copy_from_slice(&size.to_le_bytes());
        fields[22..24].copy_from_slice(&(name.len() as u16).to_le_bytes());
        file.extend(b"PK\x03\x04");
        file.extend(fields);
        file.extend(name.bytes());
        file.extend(bytes);
        directory.extend(b"PK\x01\x02\0\0");
        directory.extend(fields);
        // Comment, disk, attributes.
        directory.extend([0; 10]);
        directory.extend(at.to_le_bytes());
        directory.extend(name.bytes());
    }
    let (start, size) = (file.len() as u32, directory.len() as u32);
    file.extend(directory);
    file.extend(b"PK\x05\x06\0\0\0\0");
    file.extend([(members.len() as u16).to_le_bytes(); 2].concat());
    file.extend(size.to_le_bytes());
    file.extend(start.to_le_bytes());
    file.extend([0; 2]);
    file
}
