//! The program's decoders get a file or an argument with arbitrary bytes. They never panic. They
//! hold no more memory than the number of bytes justifies. The targets are the targets of `fuzz/`.

#[path = "../../fuzz/bounded.rs"]
mod bounded;

use bounded::{Limit, corpus, run};
use kyklos_cli::decoders::ALL;

/// The initial inputs of each target, as the program writes them, or as its documents show them.
fn made(target: &str) -> Vec<(String, Vec<u8>)> {
    let texts: &[(&str, &str)] = match target {
        "record" => &[("ring", include_str!("decoders/record.jsonl"))],
        "tuning" => &[("one", include_str!("decoders/tuning.json"))],
        "note" => &[("cpu", include_str!("decoders/note.json"))],
        "timeline" => &[("two", include_str!("decoders/timeline.json"))],
        "times" => &[("two", r#"{"first_ms": 3.5, "times_ms": [1.25, 1e1], "max_abs_error": 0}"#)],
        "description" => &[
            ("here", include_str!("../../clusters/loopback-2-cores.toml")),
            ("two_hosts", include_str!("../../clusters/two-hosts-1gbe.toml")),
        ],
        "values" => &[
            ("mask", "causal+window:16,-1+documents:0,128,512+valid:3,4"),
            ("masks_of_entries", "causal+documents:0,128,512//valid:3//slices:0..4x2..9/both"),
            ("slices", "slices:0..32x0..64/causal,32..64x0..16/both"),
            ("slice", "0..32x0..64/causal"),
            ("mesh", "2x3"),
            ("place", "[fd00::1]:29600"),
            ("device", "wgpu:1"),
            ("words", "per-document"),
        ],
        "request" => {
            &[("get", "GET /metrics?a=b HTTP/1.1\r\nHost: a\r\n\r\n"), ("post", "POST / HTTP/1.0\n\n")]
        }
        "arguments" => &[
            (
                "attend",
                "attend\n--shape\n1,512,8,2,64\n--mask\ncausal+window:16,-1+documents:0,128,512\n--mesh\n2x2\n--split\nwork:1,2,3,4\n--replicated\n0..16",
            ),
            (
                "slices",
                "plan\n--shape\n1,64,2,2,8\n--mask\nslices:0..32x0..64/causal,32..64x0..16/both\n--tokens\n32,32\n--wire\nint8",
            ),
            ("devices", "bench\n--device\nwgpu:1,cpu\n--shape\n1,64,2,2,8\n--against\na=b\n--dtype\nbf16"),
            ("ranks", "certs\nissue\n--ranks\n0-3,9\n--job\ntrain\n--host\na,10.0.0.1"),
            ("group", "attend\n--rank\n1\n--world\n4\n--coordinator\n[fd00::1]:29600\n--mask\nvalid:3,4"),
        ],
        "tensors" => return vec![("qkv".to_owned(), tensors())],
        other => panic!("{other} has no corpus"),
    };
    texts.iter().map(|(name, text)| ((*name).to_owned(), text.as_bytes().to_vec())).collect()
}

/// Two queries and three keys of one head, in f16, with a sink and a mask.
fn tensors() -> Vec<u8> {
    let header = r#"{"q":{"dtype":"F16","shape":[1,2,1,8],"data_offsets":[0,32]},"k":{"dtype":"F16","shape":[1,3,1,8],"data_offsets":[32,80]},"v":{"dtype":"F16","shape":[1,3,1,8],"data_offsets":[80,128]},"sinks":{"dtype":"F32","shape":[1],"data_offsets":[128,132]},"mask":{"dtype":"BOOL","shape":[2,3],"data_offsets":[132,138]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + 138, 1);
    bytes
}

/// The memory limit of a target. A decoded value may be larger than its text, and clap's own
/// command line is large.
fn limit(target: &str) -> Limit {
    match target {
        "arguments" => Limit { fixed: 2 << 20, per_byte: 64 },
        _ => Limit { fixed: 64 << 10, per_byte: 256 },
    }
}

#[test]
fn files_and_arguments_of_any_bytes() {
    for (name, target) in ALL {
        let times = run(name, &corpus(name, &made(name)), limit(name), target);
        println!("{name}: {times} calls");
        assert!(times > 100, "{name}: {times}");
    }
}
