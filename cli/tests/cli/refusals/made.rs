//! Files that the command lines of the refusals name.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use kyklos_transport::Rank;
use kyklos_transport::quic::{ClusterAuthority, Subject, Validity};
use safetensors::{Dtype, tensor::TensorView};

use crate::support::{command, succeeds};

type Shape<'a> = (&'a str, Dtype, &'a [usize]);

const Q: Shape<'_> = ("q", Dtype::F32, &[1, 4, 2, 8]);
const K: Shape<'_> = ("k", Dtype::F32, &[1, 4, 1, 8]);
const V: Shape<'_> = ("v", Dtype::F32, &[1, 4, 1, 8]);

/// Fills `folder`.
pub(super) fn make(folder: &Path) {
    tensors(folder);
    cluster_files(folder);
    descriptions(folder);
    fs::create_dir(folder.join("folder")).unwrap();
    cells(folder);
    identities(folder);
    // A driver that cannot be loaded, also on a machine that has one.
    fs::create_dir(folder.join("no-driver")).unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        fs::write(folder.join("no-driver").join(name), "").unwrap();
    }
}

fn identities(folder: &Path) {
    for arguments in [
        "init",
        "init --authority other-authority",
        "issue --ranks 0-1 --output ids",
        "issue --ranks 1 --authority other-authority --output other",
        "invite --coordinator 127.0.0.1:29600 --world 2 --output invitation",
    ] {
        let words: Vec<&str> = ["certs"].into_iter().chain(arguments.split(' ')).collect();
        succeeds(&command(&words).current_dir(folder).output().unwrap());
    }
    let authority = ClusterAuthority::read(&folder.join("authority"), "cluster").unwrap();
    let [from, until] = [1, 2].map(|days| UNIX_EPOCH + Duration::from_secs(days * 24 * 3600));
    let expired = authority.issue_to(&Subject::Rank(Rank(1)), Validity { from, until }).unwrap();
    expired.write_file(&folder.join("expired.pem")).unwrap();
    fs::copy(folder.join("authority/issued"), folder.join("revoked")).unwrap();
    fs::write(folder.join("revoked-wrong"), "rank 1").unwrap();
}

/// Folders of a bench: of another group, and with something else in the file of the cells.
fn cells(folder: &Path) {
    let header = r#"{"header":{"release":"0","ranks":7,"processes":false,"transport":"quic","devices":[],"repeat":1}}"#;
    for (name, line) in [("cells", header), ("no-cells", "my notes")] {
        fs::create_dir(folder.join(name)).unwrap();
        fs::write(folder.join(name).join("cells.jsonl"), format!("{line}\n")).unwrap();
    }
}

fn safetensors(folder: &Path, name: &str, tensors: &[Shape<'_>], value: f32) {
    let zeros: HashMap<&str, Vec<u8>> = tensors
        .iter()
        .map(|(name, dtype, shape)| {
            let elements: usize = shape.iter().product();
            let bytes = match dtype {
                Dtype::F32 => (0..elements).flat_map(|_| value.to_le_bytes()).collect(),
                _ => vec![0; elements * dtype.bitsize() / 8],
            };
            (*name, bytes)
        })
        .collect();
    let views = tensors
        .iter()
        .map(|(name, dtype, shape)| (*name, TensorView::new(*dtype, shape.to_vec(), &zeros[name]).unwrap()));
    fs::write(folder.join(name), safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap()).unwrap();
}

fn tensors(folder: &Path) {
    let make = |name: &str, tensors: &[Shape<'_>]| safetensors(folder, name, tensors, 0.0);
    make("good", &[Q, K, V]);
    make("cross", &[Q, ("k", Dtype::F32, &[1, 8, 1, 8]), ("v", Dtype::F32, &[1, 8, 1, 8])]);
    make("no-v", &[Q, K]);
    make("three-extents", &[("q", Dtype::F32, &[4, 2, 8]), K, V]);
    make("integers", &[("q", Dtype::I32, &[1, 4, 2, 8]), K, V]);
    make("two-dtypes", &[Q, ("k", Dtype::F16, &[1, 4, 1, 8]), V]);
    make("k-unlike-v", &[Q, ("k", Dtype::F32, &[1, 3, 1, 8]), V]);
    make("q-unlike-k", &[("q", Dtype::F32, &[2, 4, 2, 8]), K, V]);
    make("sinks-shape", &[Q, K, V, ("sinks", Dtype::F32, &[3])]);
    safetensors(folder, "sinks-nan", &[Q, K, V, ("sinks", Dtype::F32, &[2])], f32::NAN);
    make(
        "mask-and-bias",
        &[Q, K, V, ("mask", Dtype::BOOL, &[1, 1, 4, 4]), ("bias", Dtype::F32, &[1, 1, 4, 4])],
    );
    make("bias-dtype", &[Q, K, V, ("bias", Dtype::F16, &[1, 1, 4, 4])]);
    make("mask-shape", &[Q, K, V, ("mask", Dtype::BOOL, &[1, 1, 4, 5])]);
    make("bias-shape", &[Q, K, V, ("bias", Dtype::F32, &[2, 4])]);
    make("mask-batch", &[Q, K, V, ("mask", Dtype::BOOL, &[2, 1, 4, 4])]);
    let good = fs::read(folder.join("good")).unwrap();
    let header = u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    fs::write(folder.join("short"), &good[..5]).unwrap();
    fs::write(folder.join("huge-header"), [0xff; 64]).unwrap();
    fs::write(folder.join("cut-header"), &good[..8 + header / 2]).unwrap();
    fs::write(folder.join("cut-data"), &good[..good.len() - 1]).unwrap();
    let empty =
        |name| format!(r#""{name}":{{"dtype":"F32","shape":[4294967295,0,2,32],"data_offsets":[0,0]}}"#);
    let empty = format!("{{{},{},{}}}", empty("q"), empty("k"), empty("v"));
    let length = (empty.len() as u64).to_le_bytes();
    fs::write(folder.join("empty-batch"), [&length[..], empty.as_bytes()].concat()).unwrap();
    fs::write(folder.join("trailing"), [&good[..], b"more"].concat()).unwrap();
}

fn cluster_files(folder: &Path) {
    let ranks = "[[ranks]]\nhost = \"a\"\ndevice = \"cpu\"\n[[ranks]]\nhost = \"b\"\n";
    for (name, text) in [
        ("cluster", ranks.to_owned()),
        ("cluster-unknown-key", format!("color = 1\n{ranks}")),
        ("cluster-empty", "ranks = []\n".to_owned()),
        ("cluster-one", ranks.replace("[[ranks]]\nhost = \"b\"\n", "")),
        ("cluster-host", ranks.replace("\"b\"", "\"b/c\"")),
        ("cluster-device", ranks.replace("cpu", "tpu")),
        ("cluster-long", "# more\n".repeat(1 << 20)),
    ] {
        fs::write(folder.join(name), text).unwrap();
    }
}

/// Descriptions made from a good one by replacing some words.
fn descriptions(folder: &Path) {
    let good = concat!(env!("CARGO_MANIFEST_DIR"), "/../clusters/two-hosts-1gbe.toml");
    let good = fs::read_to_string(good).unwrap();
    let host = &good[good.find("[[host]]").unwrap()..];
    let rates = &good[good.find("[[device.desktop-gpu.attention]]").unwrap()..good.find("[link").unwrap()];
    let pair =
        |a: &str, b: &str| format!("{host}\n[[between]]\nhosts = [\"{a}\", \"{b}\"]\nlink = \"ethernet\"\n");
    let one_host =
        host.replace("count = 2", "").replace("kind = \"desktop-gpu\"", "kind = \"desktop-gpu\", count = 2");
    for (name, from, to) in [
        ("hw", "", ""),
        ("hw-syntax", "copy_us", "copy_ms"),
        ("hw-no-device", "kind = \"desktop-gpu\"", "kind = \"laptop-gpu\""),
        ("hw-no-hosts", "count = 2", "count = 0"),
        ("hw-large", "count = 2", "count = 1024"),
        ("hw-twice", "count = 2", "count = 2\ndevices = []\n[[host]]\nname = \"machine\""),
        ("hw-staging", "staging_gb_per_s = 10\n", ""),
        ("hw-unified", "memory = \"discrete\"", "memory = \"unified\""),
        ("hw-tiles", "tile_rows = 64", "tile_rows = 0"),
        ("hw-no-rate", rates, "attention = []\n"),
        ("hw-rate-dim", "head_dim = 128\ngflop_per_s = 5000", "head_dim = 0\ngflop_per_s = 5000"),
        ("hw-zero-link", "gb_per_s = 0.117", "gb_per_s = 0"),
        ("hw-negative", "latency_us = 200", "latency_us = -1"),
        ("hw-between-unknown", host, &pair("machine-0", "other")),
        ("hw-between-self", host, &pair("machine-0", "machine-0")),
        ("hw-unjoined", "between_hosts = \"ethernet\"\n", ""),
        ("hw-no-inside", host, &one_host),
        ("hw-place-device", "between_hosts", "rank_on_device = [0, 7]\nbetween_hosts"),
        ("hw-place-count", "between_hosts", "rank_on_device = [0]\nbetween_hosts"),
        ("hw-long", "name", &format!("{}\nname", "# more\n".repeat(1 << 20))),
    ] {
        assert!(good.contains(from), "{name}");
        fs::write(folder.join(name), good.replacen(from, to, usize::from(!from.is_empty()))).unwrap();
    }
}
