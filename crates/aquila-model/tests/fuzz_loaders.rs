//! Whatever a file holds, a loader answers or refuses: it does not panic, and it takes no more
//! memory than the file is worth.
//!
//! Files that are right are spoiled in many ways, at random but by a seed, and loaded.
//! `AQUILA_FUZZ_FILES` says how many files each loader gets, and `AQUILA_FUZZ_SEED` makes it another
//! run; every run of the same number and seed is the same.

#[path = "model/safetensors_writer.rs"]
mod safetensors_writer;
#[path = "model/torch_writer.rs"]
mod torch_writer;

use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

use aquila_compute::{DType, HostTensor};
use aquila_model::{
    Checkpoint, HeadCheckpoint, Inspection, LoadFormat, Location, ModelSpec, Safetensors,
    TensorSource, TokenMap, TorchTensors,
};
use serde_json::{Value, json};

/// Far above what loading files of some kilobytes takes, far below what a lie can ask for.
const MOST_MEMORY: u64 = 1 << 30;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Random numbers: a splitmix64 sequence.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

/// A file with some of its bytes changed, moved, doubled or cut off.
fn spoiled(file: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = file.to_vec();
    for _ in 0..1 + random.below(4) {
        let at = random.below(bytes.len() + 1);
        let length = random.below(1 + bytes.len() - at).min(1 + random.below(64));
        match random.below(8) {
            0 if !bytes.is_empty() => {
                let at = at.min(bytes.len() - 1);
                bytes[at] = random.next() as u8;
            }
            1 if !bytes.is_empty() => {
                let at = at.min(bytes.len() - 1);
                bytes[at] ^= 1 << random.below(8);
            }
            2 => drop(bytes.drain(at..at + length)),
            3 => {
                let copy = bytes[at..at + length].to_vec();
                let to = random.below(bytes.len() + 1);
                bytes.splice(to..to, copy);
            }
            4 => bytes.truncate(at),
            // Numbers at the edges of their types, as wide as files have them.
            5 | 6 => {
                let edges =
                    [0, 1, 0x7f, 0xff, 0x7fff, 0xffff, 1 << 31, u32::MAX.into(), 1 << 62, u64::MAX];
                let number = random.pick(&edges).wrapping_sub(random.next() % 3);
                let width = *random.pick(&[1, 2, 4, 8]);
                for (place, byte) in bytes.iter_mut().skip(at).zip(number.to_le_bytes()).take(width)
                {
                    *place = byte;
                }
            }
            _ => {
                let noise: Vec<u8> = (0..length).map(|_| random.next() as u8).collect();
                bytes.splice(at..at, noise);
            }
        }
    }
    bytes
}

/// A JSON file with some of its values, at any depth, replaced, doubled or gone.
fn spoiled_json(file: &Value, random: &mut Random) -> Value {
    let mut json = file.clone();
    for _ in 0..1 + random.below(3) {
        spoil_value(&mut json, random);
    }
    json
}

fn spoil_value(value: &mut Value, random: &mut Random) {
    let deeper = random.below(4) > 0;
    match value {
        Value::Object(map) if deeper && !map.is_empty() => {
            let field = map.keys().nth(random.below(map.len())).unwrap().clone();
            match random.below(10) {
                0 => drop(map.remove(&field)),
                _ => spoil_value(&mut map[&field], random),
            }
        }
        Value::Array(list) if deeper && !list.is_empty() => {
            let at = random.below(list.len());
            spoil_value(&mut list[at], random);
        }
        value => *value = any_value(random),
    }
}

fn any_value(random: &mut Random) -> Value {
    match random.below(12) {
        0 => Value::Null,
        1 => json!(random.below(2) == 0),
        2 => json!(random.next()),
        3 => json!(random.next() as i64),
        4 => json!(f64::from_bits(random.next())),
        5 => json!(random.below(400)),
        6 => json!(-1),
        7 => json!([]),
        8 => json!({}),
        9 => json!((0..random.below(4)).map(|_| random.below(8)).collect::<Vec<_>>()),
        10 => json!({ "a": { "b": [1, { "c": null }] } }),
        _ => {
            let texts = ["", "llama", "yarn", "Eagle3Speculator", "é", "../x", "model.safetensors"];
            json!(random.pick(&texts))
        }
    }
}

/// A pickle of instructions in any order, right ones mostly.
fn any_pickle(random: &mut Random) -> Vec<u8> {
    let parts: &[&[u8]] = &[
        b"(", b"0", b"1", b"2", b"N", b"\x88", b"\x89", b"J\xff\xff\xff\x7f", b"K\x03", b"M\0\x04",
        b"\x8a\x08\0\0\0\0\0\0\0\x40", b"\x8a\x00", b"G12345678", b"X\x01\0\0\0w", b"\x8c\x07storage",
        b")", b"\x85", b"\x86", b"\x87", b"t", b"]", b"l", b"a", b"e", b"}", b"d", b"s", b"u",
        b"h\x01", b"q\x01", b"r\xff\xff\xff\xff", b"j\xff\xff\xff\xff", b"\x94", b"Q", b"R", b"b",
        b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n",
        b"ccollections\nOrderedDict\n", b"\x95\0\0\0\0\0\0\0\0", b"\x93", b"X\xff\xff\xff\xff", b".",
        b"(X\x07\0\0\0storagectorch\nHalfStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x08tQ",
        b"(X\x01\0\0\0wctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nHalfStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x08tQK\0K\x02K\x02\x86K\x02K\x01\x86\x89)tRu",
    ];
    let mut pickle = b"\x80\x02}".to_vec();
    for _ in 0..random.below(40) {
        pickle.extend(*random.pick(parts));
    }
    pickle.push(b'.');
    pickle
}

/// How much address space the process has ever had, where the system says so.
fn peak_memory() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmPeak:"))?;
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? << 10)
}

/// What a loader that is fuzzed does with a folder of its own.
struct Scene {
    folder: tempfile::TempDir,
    target: ModelSpec,
}

impl Scene {
    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.at(name);
        // A new file each time: a mapped one must not be rewritten in place.
        let _ = fs::remove_file(&path);
        fs::write(&path, bytes).unwrap();
        path
    }

    fn location(&self) -> Location {
        Location::Folder(self.folder.path().into())
    }
}

/// Reads every tensor; each must be as large as it was said to be. Answers whether there was one.
fn read_all(tensors: &dyn TensorSource) -> bool {
    let names = tensors.names();
    for &name in &names {
        let info = tensors.info(name).unwrap();
        if let Ok(tensor) = tensors.get(name) {
            assert_eq!(tensor.bytes().len() as u64, info.bytes, "{name}");
        }
    }
    !names.is_empty()
}

/// Loads spoiled files; `load` answers whether one was still taken.
fn fuzz(what: &str, load: impl Fn(&Scene, &mut Random) -> bool + std::panic::RefUnwindSafe) {
    let number = |name: &str, default: u64| {
        std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
    };
    let files = number("AQUILA_FUZZ_FILES", 5000);
    let first = number("AQUILA_FUZZ_SEED", 1) << 40;
    let target =
        Checkpoint::open(&Location::Folder(fixture("llama3-rope")), LoadFormat::Dummy { seed: 0 });
    let scene =
        Scene { folder: tempfile::tempdir().unwrap(), target: target.unwrap().spec().clone() };
    let scene = std::panic::AssertUnwindSafe(scene);
    let before = peak_memory();
    let mut taken = 0u64;
    for run in 0..files {
        let seed = first + run;
        match catch_unwind(|| load(&scene, &mut Random(seed))) {
            Ok(was_taken) => taken += u64::from(was_taken),
            Err(_) => panic!("{what}: a panic at file {run} (seed {seed})"),
        }
    }
    if let (Some(before), Some(after)) = (before, peak_memory()) {
        let grown = after - before;
        assert!(grown < MOST_MEMORY, "{what}: memory grew by {grown} bytes");
    }
    assert!(
        taken > 0 && taken < files,
        "{what}: {taken} of {files} were taken: nothing was tested"
    );
    println!("{what}: {files} files, {taken} taken, no finding");
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn configs() {
    let configs = ["llama3-rope", "qwen2-yarn", "qwen3", "llama-bias"]
        .map(|name| read_json(&fixture(name).join("config.json")));
    fuzz("config.json", |scene, random| {
        let config = random.pick(&configs);
        let json = spoiled_json(config, random).to_string();
        let bytes = match random.below(3) {
            0 => spoiled(json.as_bytes(), random),
            _ => json.into_bytes(),
        };
        scene.write("config.json", &bytes);
        if random.below(4) == 0 {
            scene.write("generation_config.json", &spoiled(b"{\"eos_token_id\": [1, 2]}", random));
        } else {
            let _ = fs::remove_file(scene.at("generation_config.json"));
        }
        let opened = Checkpoint::open(&scene.location(), LoadFormat::Dummy { seed: 1 });
        let _ = Inspection::of(&scene.location()).map(|report| report.to_string());
        opened.is_ok_and(|opened| opened.spec().parameters() > 0)
    });
}

/// Some tensors in the form of a safetensors file.
fn safetensors(tensors: &[HostTensor]) -> Vec<u8> {
    safetensors_writer::safetensors_file(tensors.iter().map(|tensor| (tensor.name(), tensor)))
}

fn tensors() -> Vec<HostTensor> {
    let tensor = |name: &str, dtype: DType, shape: Vec<usize>| {
        let bytes = vec![1; shape.iter().product::<usize>() * dtype.size()];
        HostTensor::new(name, dtype, shape, bytes.into()).unwrap()
    };
    vec![
        tensor("fc.weight", DType::F32, vec![2, 3]),
        tensor("t2d", DType::Bool, vec![5]),
        tensor("norm.weight", DType::Bf16, vec![4]),
        tensor("d2t", DType::I64, vec![2]),
        tensor("scalar", DType::F16, vec![]),
    ]
}

#[test]
fn safetensors_headers() {
    let file = safetensors(&tensors());
    let index = json!({"weight_map": {"fc.weight": "a.safetensors", "d2t": "a.safetensors"}});
    fuzz("safetensors", |scene, random| {
        let end = 8 + u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
        let bytes = if random.below(2) == 0 {
            spoiled(&file, random)
        } else {
            // The header alone is spoiled, and its length is right.
            let header: Value = serde_json::from_slice(&file[8..end]).unwrap();
            let header = spoiled_json(&header, random).to_string();
            let length = (header.len() as u64).to_le_bytes();
            [&length[..], header.as_bytes(), &file[end..]].concat()
        };
        let opened = Safetensors::open_file(&scene.write("a.safetensors", &bytes));
        let taken = opened.is_ok_and(|tensors| read_all(&tensors));
        let index = spoiled_json(&index, random).to_string();
        scene.write("model.safetensors.index.json", index.as_bytes());
        let sharded = Safetensors::open_folder(scene.folder.path());
        sharded.is_ok_and(|tensors| read_all(&tensors)) || taken
    });
}

#[test]
fn torch_files() {
    let names = ["every_kind.bin", "protocol_4.pth", "module.bin", "nested.pt", "expanded.bin"];
    let mut files: Vec<Vec<u8>> =
        names.iter().map(|name| fs::read(fixture("torch").join(name)).unwrap()).collect();
    files.push(torch_writer::torch_file(tensors().iter()));
    fuzz("torch files", |scene, random| {
        let bytes = match random.below(3) {
            0 => {
                let pickle = any_pickle(random);
                let storage = ("x/data/0".to_owned(), vec![7; 16]);
                torch_writer::stored_zip(&[("x/data.pkl".to_owned(), pickle), storage])
            }
            _ => {
                let file: &Vec<u8> = random.pick(&files);
                spoiled(file, random)
            }
        };
        let opened = TorchTensors::open_file(&scene.write("a.bin", &bytes));
        opened.is_ok_and(|tensors| read_all(&tensors))
    });
}

#[test]
fn token_maps() {
    let files = [
        fs::read(fixture("torch/ids.pt")).unwrap(),
        fs::read(fixture("torch/id_tensor.pt")).unwrap(),
        b"[5, 3, 300, 1, 70000]".to_vec(),
    ];
    fuzz("token maps", |scene, random| {
        let file: &Vec<u8> = random.pick(&files);
        let bytes = spoiled(file, random);
        let vocabulary = 1 + random.below(100_000);
        let opened = TokenMap::open(&scene.write("map", &bytes), vocabulary);
        opened.is_ok_and(|map| {
            assert!(map.ids().is_sorted_by(|a, b| a < b));
            assert!(map.ids().last().is_some_and(|&id| (id as usize) < vocabulary));
            true
        })
    });
}

#[test]
fn heads() {
    let mut config = read_json(&fixture("llama3-rope").join("config.json"));
    let sizes = config.clone();
    config["architectures"] = json!(["LlamaForCausalLMEagle3"]);
    config["num_hidden_layers"] = json!(1);
    config["draft_vocab_size"] = json!(160);
    config["target_hidden_size"] = json!(64);
    config["norm_before_residual"] = json!(false);
    config["norm_before_fc"] = json!(false);
    config["eagle_config"] = json!({ "eagle_aux_hidden_state_layer_ids": [0, 2] });
    let mut nested = json!({
        "speculators_model_type": "eagle3",
        "speculators_config": {"verifier": {"architectures": ["LlamaForCausalLM"]}},
        "eagle_aux_hidden_state_layer_ids": [1, 3],
        "draft_vocab_size": 160,
        "transformer_layer_config": sizes,
    });
    nested["transformer_layer_config"]["num_hidden_layers"] = json!(1);
    let configs = [config, nested];
    // Tensors of a head that fits, to be left out, renamed or given other shapes.
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), configs[0].to_string()).unwrap();
    let target =
        Checkpoint::open(&Location::Folder(fixture("llama3-rope")), LoadFormat::Dummy { seed: 0 })
            .unwrap();
    let location = Location::Folder(folder.path().into());
    let head = HeadCheckpoint::open(&location, LoadFormat::Dummy { seed: 2 }, target.spec());
    let head = head.unwrap();
    let all: Vec<HostTensor> =
        head.tensors().names().iter().map(|name| head.tensors().get(name).unwrap()).collect();
    fuzz("heads", |scene, random| {
        let config = spoiled_json(random.pick(&configs), random).to_string();
        scene.write("config.json", config.as_bytes());
        let dummy = LoadFormat::Dummy { seed: 1 };
        let _ = HeadCheckpoint::open(&scene.location(), dummy, &scene.target);
        let mut tensors = all.clone();
        for _ in 0..random.below(3) {
            let at = random.below(tensors.len());
            let old = tensors.swap_remove(at);
            let name = match random.below(3) {
                0 => continue,
                1 => old.name().to_owned(),
                _ => random
                    .pick(&["model.fc.weight", "layers.0.x", "t2d", "fc_norm.0.weight"])
                    .to_string(),
            };
            if tensors.iter().any(|t| t.name() == name) {
                continue;
            }
            let (rows, columns) = (random.below(5), random.below(5));
            let dtype = *random.pick(&[DType::Bf16, DType::I64, DType::Bool, DType::F32]);
            let bytes = vec![random.next() as u8; rows * columns * dtype.size()];
            let shape = vec![rows, columns];
            tensors.push(HostTensor::new(name, dtype, shape, bytes.into()).unwrap());
        }
        scene.write("model.safetensors", &safetensors(&tensors));
        let opened = HeadCheckpoint::open(&scene.location(), LoadFormat::Auto, &scene.target);
        let _ = Inspection::of(&scene.location()).map(|report| report.to_string());
        opened.is_ok()
    });
}
