//! Torch files: what torch wrote is read as torch meant it; everything else is refused by name and
//! nothing is executed. `fixtures/torch/make.py` says what the files hold.

use std::fs;
use std::path::{Path, PathBuf};

use aquila_compute::DType;
use aquila_model::{TensorSource, TorchTensors};
use half::{bf16, f16};

use crate::sequence::fixture;

fn file(name: &str) -> PathBuf {
    fixture("torch").join(name)
}

fn refusal(path: &Path) -> String {
    match TorchTensors::open_file(path) {
        Ok(_) => panic!("{} was not refused", path.display()),
        Err(e) => e.to_string(),
    }
}

fn floats(tensors: &TorchTensors, name: &str) -> (Vec<usize>, Vec<f32>) {
    let tensor = tensors.get(name).unwrap();
    (tensor.shape().to_vec(), tensor.to_f32().unwrap())
}

#[test]
fn every_protocol_and_type_is_read_as_torch_wrote_it() {
    for name in ["every_kind.bin", "protocol_3.pth", "protocol_4.pth", "protocol_5.pth"] {
        let tensors = TorchTensors::open_file(&file(name)).unwrap();
        assert_eq!(tensors.names().len(), 13, "{name}: {:?}", tensors.names());
        let quarters = vec![0.0, 0.25, 0.5, 0.75, 1.0, 1.25];
        assert_eq!(floats(&tensors, "float"), (vec![2, 3], quarters));
        assert_eq!(floats(&tensors, "scalar"), (vec![], vec![3.5]));
        assert_eq!(floats(&tensors, "empty"), (vec![0, 4], vec![]));
        assert_eq!(floats(&tensors, "parameter"), (vec![2], vec![1.0; 2]));

        let half = tensors.get("half").unwrap();
        assert_eq!(half.dtype(), DType::F16);
        let want: Vec<u8> =
            [0.5, -2.0, 65504.0].iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect();
        assert_eq!(half.bytes()[..], want);
        let bfloat = tensors.get("bfloat").unwrap();
        assert_eq!((bfloat.dtype(), bfloat.shape()), (DType::Bf16, &[1, 2][..]));
        let want: Vec<u8> =
            [1.5, -0.25].iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect();
        assert_eq!(bfloat.bytes()[..], want);

        let long = tensors.get("long").unwrap();
        assert_eq!(long.dtype(), DType::I64);
        let want: Vec<u8> = [-1i64, 1 << 40, 7].iter().flat_map(|n| n.to_le_bytes()).collect();
        assert_eq!(long.bytes()[..], want);
        let bool = tensors.get("bool").unwrap();
        assert_eq!((bool.dtype(), &bool.bytes()[..]), (DType::Bool, &[1, 0, 1, 1][..]));
        for (name, kind) in [("int", "I32"), ("double", "F64")] {
            assert_eq!(tensors.info(name).unwrap().stored_as, kind);
            let text = tensors.get(name).unwrap_err().to_string();
            assert!(text.contains(&format!("tensor {name}: type {kind} is not read")), "{text}");
        }
    }
}

#[test]
fn views_are_put_in_order() {
    let tensors = TorchTensors::open_file(&file("every_kind.bin")).unwrap();
    let whole: Vec<f32> = (0..24).map(|n| n as f32).collect();
    let turned = (0..6).flat_map(|c| (0..4).map(move |r| (6 * r + c) as f32)).collect();
    assert_eq!(floats(&tensors, "shared"), (vec![4, 6], whole));
    assert_eq!(floats(&tensors, "transposed"), (vec![6, 4], turned));
    assert_eq!(floats(&tensors, "part"), (vec![2, 3], vec![8.0, 9.0, 10.0, 14.0, 15.0, 16.0]));
    assert_eq!(tensors.info("transposed").unwrap().bytes, 96);
}

#[test]
fn tensors_of_modules_and_of_wrapped_dictionaries_are_found() {
    let module = TorchTensors::open_file(&file("module.bin")).unwrap();
    assert_eq!(module.names(), ["bias", "weight"]);
    assert_eq!(module.info("weight").unwrap().shape, [2, 3]);
    let nested = TorchTensors::open_file(&file("nested.pt")).unwrap();
    assert_eq!(floats(&nested, "w"), (vec![2], vec![1.0; 2]));
}

#[test]
fn what_a_pickle_would_run_is_refused_by_name() {
    let text = refusal(&file("surprise.bin"));
    assert!(text.contains("names \"posix.system\", which no tensor needs"), "{text}");
    assert!(text.contains("refused, not run"), "{text}");
    let text = refusal(&file("before_1.6.bin"));
    assert!(text.contains("before torch 1.6"), "{text}");
    let text = refusal(&file("expanded.bin"));
    assert!(text.contains("tensor w: shape [1000] with strides [0]"), "{text}");
    let text = refusal(&file("ids.pt"));
    assert!(text.contains("holds no dictionary of tensors"), "{text}");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.bin");
    for (bytes, expected) in [
        (&b""[..], "is no torch file (0 bytes that are no zip)"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"PK\x03\x04 and no more", "no directory at its end"),
    ] {
        fs::write(&path, bytes).unwrap();
        let text = refusal(&path);
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn a_file_cut_off_anywhere_is_refused() {
    let whole = fs::read(file("every_kind.bin")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.bin");
    for length in (0..whole.len()).step_by(97).chain([whole.len() - 1]) {
        fs::write(&path, &whole[..length]).unwrap();
        let text = refusal(&path);
        assert!(text.contains("x.bin: is "), "{length}: {text}");
    }
}

#[test]
fn training_files_are_ignored_and_ambiguous_ones_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for name in ["training_state.pt", "training_args.bin", "optimizer.pt", "rng_state_0.pth"] {
        fs::copy(file("surprise.bin"), at(name)).unwrap();
    }
    assert!(TorchTensors::open_folder(folder.path()).unwrap().is_none());
    fs::copy(file("module.bin"), at("head.pth")).unwrap();
    let found = TorchTensors::open_folder(folder.path()).unwrap().unwrap();
    assert_eq!(found.origin(), at("head.pth").display().to_string());
    fs::copy(file("nested.pt"), at("other.pt")).unwrap();
    let text = TorchTensors::open_folder(folder.path()).err().unwrap().to_string();
    assert!(text.contains("holds head.pth, other.pt; call the one to load pytorch_model.bin"));
    fs::copy(file("every_kind.bin"), at("pytorch_model.bin")).unwrap();
    let found = TorchTensors::open_folder(folder.path()).unwrap().unwrap();
    assert_eq!(found.names().len(), 13);
}

#[test]
fn an_index_names_the_files_of_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::copy(file("module.bin"), at("pytorch_model-00001-of-00002.bin")).unwrap();
    fs::copy(file("nested.pt"), at("pytorch_model-00002-of-00002.bin")).unwrap();
    let index = serde_json::json!({"weight_map": {
        "weight": "pytorch_model-00001-of-00002.bin",
        "w": "pytorch_model-00002-of-00002.bin",
    }});
    fs::write(at("pytorch_model.bin.index.json"), index.to_string()).unwrap();
    let found = TorchTensors::open_folder(folder.path()).unwrap().unwrap();
    assert_eq!(found.names(), ["w", "weight"]);
    fs::copy(file("expanded.bin"), at("pytorch_model-00002-of-00002.bin")).unwrap();
    let text = TorchTensors::open_folder(folder.path()).err().unwrap().to_string();
    assert!(text.contains("00002-of-00002.bin: tensor w: shape [1000]"), "{text}");
}
